"""The quality bench: statistics, reports, bars, journal, and the sessions it draws."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.quality import report
from bench.quality.__main__ import PLANS
from bench.quality.plan import FULL, HEADLINES, PROTOCOL, QUICK, RATIOS, Arm
from bench.quality.report import checks, summarise
from bench.quality.sessions import AT_A_DEPTH, DEPTHS, REPORTING, TUNING, right, scripts
from bench.record import Journal
from bench.stats import clustered, design_effect, mcnemar, share_interval, wilson


def record(session: str, arm: Arm, answers: str, visible: str = "", **more: Any) -> dict[str, Any]:
    """Return the record of a session in an arm.

    Args:
        answers: For each question, "1" if its answer is right.
        visible: For each question, "1" if its fact is resident, "2" if in part; all by default.
    """
    visible = visible or "1" * len(answers)
    probes = [
        {
            "question": f"q{i}",
            "expected": "x",
            "answer": "other | text",
            "known": True,
            "depth": None,
            "right": answer == "1",
            "visible": seen == "1",
            "decoded_again": False,
            "gold": [[10, 20]],
            "seen": [[10, 14]] if seen == "2" else [[10, 20]] if seen == "1" else [],
        }
        for i, (answer, seen) in enumerate(zip(answers, visible, strict=True))
    ]
    defaults = {
        "cell": "facts5",
        "session": session,
        "arm": arm.name,
        "policy": arm.policy,
        "ratio": arm.ratio,
        "budget": arm.budget(4000),
        "again": 0,
        "answers_again": 0,
        "wall_s": 1.0,
        "faults": [],
        "turns": [[100, 100, 0, 0, 0, 90]],
        "probes": probes,
    }
    return {**defaults, **more}


CEILING, EVOKE, DISCARD = Arm("no_eviction"), Arm("evoke", 8.0), Arm("discard", 8.0)


def one_row(records: Sequence[dict[str, Any]], arm: str) -> dict[str, Any]:
    """Return the summary row of an arm."""
    rows = summarise(records)["rows"]
    return next(row for row in rows if row["cell"] == "facts5" and row["arm"] == arm)


def test_a_row_has_the_time_and_the_peak_of_its_own_cell() -> None:
    long = {"cell": "long", "wall_s": 9.0, "turns": [[100, 100, 0, 0, 0, 600]], "again": 70}
    records = [
        made
        for arm in (CEILING, EVOKE)
        for made in (record("a", arm, "11"), record("b", arm, "11", **long))
    ]
    row = one_row(records, EVOKE.name)
    assert (row["wall_s"], row["again_tokens"], row["sessions"]) == (1.0, 0, 1)
    assert row["peak_share"] == 90 / 500


def test_a_share_of_the_ceiling_counts_the_same_questions_in_both_arms() -> None:
    records = [
        record("a", CEILING, "1110"),
        record("a", EVOKE, "1011"),
        record("b", CEILING, "1111"),
        record("b", EVOKE, "1111"),
        record("c", CEILING, "1111"),  # not run under the other arm
    ]
    row = one_row(records, "evoke@8x")
    assert (row["n"], row["sessions"], row["right"]) == (8, 2, 7)
    assert row["share"] == pytest.approx(7 / 7)
    assert (row["lost"], row["gained"]) == (1, 1)


def test_discard_must_not_recall_more_facts_than_are_resident() -> None:
    records = [record("a", CEILING, "1111"), record("a", DISCARD, "1110", visible="1000")]
    bar = next(check for check in checks(summarise(records)) if "discard" in check["bar"])
    assert not bar["ok"]
    records[1] = record("a", DISCARD, "1000", visible="1000")
    bar = next(check for check in checks(summarise(records)) if "discard" in check["bar"])
    assert bar["ok"]


@pytest.mark.parametrize(("wrong", "ok"), [(1, True), (2, False)])
def test_a_model_without_recall_invalidates_the_run(wrong: int, ok: bool) -> None:
    records = [record("a", CEILING, "0" * wrong + "1" * (60 - wrong), cell="files")]
    bars = {check["bar"]: check for check in checks(summarise(records))}
    assert bars["files: no_eviction"]["ok"] is ok
    few = checks(summarise([record("a", CEILING, "0001")]))
    assert not any("no_eviction" in check["bar"] for check in few)


@pytest.mark.parametrize(("answers", "ok"), [("1" * 20, True), ("0" + "1" * 19, False)])
def test_the_oracle_must_recall_as_much_as_the_ceiling(answers: str, ok: bool) -> None:
    records = [record("a", CEILING, "1" * 20), record("a", Arm("oracle", 8.0), answers)]
    bar = next(check for check in checks(summarise(records)) if "oracle" in check["bar"])
    assert bar["ok"] is ok


def test_a_turn_over_its_budget_is_named_and_invalidates_the_run() -> None:
    fault = record("a", EVOKE, "1", faults=["turn 3: peak 501 over 500"])
    result = summarise([record("a", CEILING, "1"), fault])
    assert result["violations"] == ["a evoke@8x: turn 3: peak 501 over 500"]
    assert not result["checks"][-1]["ok"]


def test_the_report_lists_every_cell_and_every_miss() -> None:
    records = [record("a", CEILING, "111"), record("a", EVOKE, "110", visible="110")]
    lines = report.text(summarise(records), records).splitlines()
    assert "facts5" in lines and "multi-fact" in lines
    counts, misses = lines.index("questions that evoke lost") + 2, [line.split() for line in lines]
    assert misses[counts] == ["facts5", "evoke@8x", "1", "0", "0", "0"]
    assert any("other | text" in line and line.endswith("not chosen") for line in lines)


def test_a_miss_has_a_cause_and_a_partly_resident_fact_was_cut_in_two() -> None:
    records = [record("a", CEILING, "111"), record("a", EVOKE, "000", visible="012")]
    result = [report.cause(probe) for _, probe in report.missed(records, "evoke")]
    assert result == ["not chosen", "there, answered otherwise", "cut in two"]


def test_the_wilson_interval_has_published_values() -> None:
    low, high = wilson(15 / 15, 15)
    assert (round(low, 3), round(high, 3)) == (0.796, 1.0)
    low, high = wilson(43 / 75, 75)
    assert (round(low, 3), round(high, 3)) == (0.461, 0.679)


def test_correlated_answers_within_sessions_widen_the_interval() -> None:
    correlated = design_effect([5, 5, 0, 0], [5, 5, 5, 5])
    independent = design_effect([3, 2, 3, 2], [5, 5, 5, 5])
    assert correlated == pytest.approx(4 / 3 * 5)  # all answers of a session are equal
    assert independent == 1.0
    wide, narrow = clustered([5, 5, 0, 0], [5] * 4), clustered([3, 2, 3, 2], [5] * 4)
    assert wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])


@given(st.integers(0, 12), st.integers(0, 12))
def test_mcnemar_is_the_two_sided_binomial_test(lost: int, gained: int) -> None:
    n = lost + gained
    chances = [math.comb(n, i) / 2**n for i in range(n + 1)]
    p_value = sum(chance for chance in chances if chance <= chances[lost] * (1 + 1e-9))
    assert mcnemar(lost, gained) == pytest.approx(p_value)


def test_the_bootstrap_interval_covers_the_true_ratio() -> None:
    random = np.random.default_rng(1)
    n_covered = 0
    for trial in range(60):
        above = random.binomial(5, 0.9, 40)
        kept, gained = random.binomial(above, 0.7), random.binomial(5 - above, 0.9)
        interval = share_interval(kept.tolist(), gained.tolist(), above.tolist(), trial)
        assert interval is not None
        n_covered += interval[0] <= (0.9 * 0.7 + 0.1 * 0.9) / 0.9 <= interval[1]
    assert n_covered >= 51  # 95 % of 60 is 57; below 51 has a probability of one in 200
    assert share_interval([0, 0], [0, 0], [0, 0]) is None


def test_an_arm_with_a_bar_is_checked_against_it() -> None:
    arm = Arm("evoke", 16.0, "fused")
    records = [
        record("a", CEILING, "1" * 20, cell="paraphrase"),
        record("a", arm, "00" + "1" * 18, cell="paraphrase"),
        record("a", Arm("evoke", 16.0), "0" * 20, cell="paraphrase"),
    ]
    bars = {check["bar"]: check["ok"] for check in checks(summarise(records))}
    assert bars["paraphrase: evoke+fused@16x"] is False
    assert bars["paraphrase: evoke@16x"] is False
    records[2] = record("a", Arm("evoke", 16.0), "0" + "1" * 19, cell="paraphrase")
    bars = {check["bar"]: check["ok"] for check in checks(summarise(records))}
    assert bars["paraphrase: evoke@16x"] is True


def test_a_share_without_a_loss_still_has_an_interval() -> None:
    assert share_interval([5] * 40, [0] * 40, [5] * 40) == clustered([5] * 40, [5] * 40)
    # The third session has no question that counts.
    interval = share_interval([5, 5, 0], [0, 0, 0], [5, 5, 0])
    assert interval == wilson(1.0, 2)  # perfect sessions count as one observation each


def test_a_journal_continues_after_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, "new").append("a", {"x": 1})
    Journal(path, "old").append("b", {"x": 2})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"config": "new", "unit": "c", "x"\n')
    Journal(path, "new").append("a", {"x": 3})
    result = Journal(path, "new").records()
    assert {key: item["x"] for key, item in result.items()} == {"a": 3}
    assert json.loads(path.read_text("utf-8").splitlines()[0])["config"] == "new"


def test_tuning_and_reporting_share_no_session() -> None:
    used = [TUNING, range(7_000_000, 7_000_100), range(8_000_000, 8_000_100)]
    assert not any(set(seeds) & set(REPORTING) for seeds in used)
    assert range(*PROTOCOL["seeds"]) == REPORTING
    tuning = scripts(TUNING.start, "facts5", 1000, 2)
    reporting = scripts(REPORTING.start, "facts5", 1000, 2)
    assert {script.name for script in tuning}.isdisjoint(script.name for script in reporting)
    assert [script.messages for script in tuning] != [script.messages for script in reporting]


def test_a_request_is_made_for_every_answer_and_the_last_are_the_probes() -> None:
    for script in scripts(TUNING.start, "needle", 1500, 3):
        ends = script.turns[-len(script.probes) :]
        questions = [script.messages[end - 1]["content"] for end in ends]
        assert questions == [probe.question for probe in script.probes]
        assert sorted(script.depths) == sorted(DEPTHS * AT_A_DEPTH)
        text = " ".join(message["content"] for message in script.messages)
        for depth, probe in zip(script.depths, script.probes, strict=True):
            assert abs(text.index(probe.fact.statement) / len(text) - depth) < 0.1


@pytest.mark.parametrize("task", ["updates", "files", "rereads", "unknown", "paraphrase"])
def test_a_session_of_several_facts_asks_for_each_and_repeats_none(task: str) -> None:
    single = scripts(TUNING.start, task, 2000, 1)[0]
    many = scripts(TUNING.start, task, 4000, 1, 3)[0]
    assert single.name != many.name
    assert len(many.probes) == 3 * len(single.probes)
    assert len({probe.question for probe in many.probes}) == len(many.probes)
    history = many.messages[: many.turns[-len(many.probes)] - 1]
    for probe in many.probes:
        mentions = [m["content"] for m in history if probe.fact.statement in m["content"]]
        if probe.value is not None:
            # A second reading of a file repeats its unchanged lines.
            assert 1 <= len(mentions) <= (2 if task == "rereads" else 1)


def test_reread_files_share_no_text_with_each_other() -> None:
    for script in scripts(TUNING.start, "rereads-apart", 2500, 3, 2):
        lines = [m["content"] for m in script.messages if m["role"] == "tool"]
        files = {line.split(": ")[0] for line in lines}
        parts = [part for name in files for part in name.split(".")]
        digits = [line.replace("is now", "=").split(" = ")[1][0] for line in lines]
        assert len(files) == 4 and len(set(parts)) == 8 and len(set(digits)) == 6
        assert sum(probe.fact.updated for probe in script.probes) == 2
        for probe in script.probes:
            assert [line for line in lines if line.startswith(probe.fact.key)][-1].endswith(
                probe.fact.value
            )


@pytest.mark.parametrize("name", list(HEADLINES))
def test_a_headline_cell_has_200_facts_and_every_unit_is_run_once(name: str) -> None:
    units = FULL.units(TUNING.start)
    assert len(units) == len({unit.key for unit in units})
    n_required = {"evoke": 200, "oracle": 60, "bm25": 30, "random": 30}
    n_required |= {"evoke+model": 30, "evoke+fused": 30, "discard": 30}
    for arm, minimum in [(f"{a}@{r:g}x", n) for a, n in n_required.items() for r in RATIOS]:
        n_facts = sum(
            len(unit.script.probes)
            for unit in units
            if unit.arm.name == arm and unit.cell in HEADLINES[name]
        )
        assert n_facts >= minimum, arm
    assert any(cell.tokens >= 7000 for cell in FULL.cells)
    assert len({unit.script.name for unit in QUICK.units(1)}) == 3


def test_the_ceilings_ask_60_questions_of_every_task_without_a_budget() -> None:
    units = PLANS["ceilings"].units(TUNING.start)
    assert {unit.arm.name for unit in units} == {"no_eviction"}
    asked: dict[str, int] = {}
    for unit in units:
        asked[unit.cell] = asked.get(unit.cell, 0) + len(unit.script.probes)
    assert len(asked) == 36 and set(asked.values()) == {60}


def test_unseen_questions_are_asked_by_text_by_the_model_and_by_both() -> None:
    units = PLANS["unseen"].units(TUNING.start)
    arms = {"no_eviction", "evoke@8x", "evoke+model@8x", "evoke+fused@8x"}
    assert {unit.arm.name for unit in units} == arms


def test_an_answer_is_right_only_with_the_exact_value() -> None:
    probe = next(p for s in scripts(3, "codes", 500, 1) for p in s.probes)
    assert right(probe.answer, probe)
    assert not right(probe.answer.replace(probe.fact.value, probe.fact.value[:-1] + "x"), probe)
    assert not right(probe.fact.unknown_answer, probe)
    missing = scripts(3, "unknown", 500, 1)[0].probes[0]
    assert right(missing.answer, missing)
    assert not right(missing.fact.answer, missing)


def test_an_arm_sends_its_policy_its_budget_and_its_recall() -> None:
    assert Arm("evoke", 8.0).body(4001) == {"evoke_policy": "evoke", "evoke_budget": 500}
    asked = Arm("evoke", 8.0, "model")
    assert asked.name == "evoke+model@8x" and asked.body(80)["evoke_recall"] == "model"
