"""The tasks bench: its cases, the messages they need, and their scores."""

from __future__ import annotations

import argparse
import re
from itertools import pairwise

import pytest

from bench.engines import DEFAULT, SETTINGS, InProcess, history_of
from bench.evidence.conversations import conversations, split_of
from bench.fills import Rankings
from bench.presence import ARMS, Asked, Talk, cells, fills, measure, shares_of_needed
from bench.tasks.__main__ import bars_of, report, summary_of, talk_of
from bench.tasks.cases import (
    QUERIES,
    SPLITS,
    SYSTEM,
    TEMPLATES,
    Case,
    Templates,
    cases,
    kinds,
    pools_in,
    read,
    tokens_of,
)


def _texts(templates: Templates) -> set[str]:
    scenes = [
        text
        for scene in templates.scenes
        for text in [
            *scene.say, scene.ask, *scene.old, *scene.other, *(t for b in scene.before for t in b)
        ]
    ]  # fmt: skip
    pairs = [text for pair in templates.pairs for text in (pair["say"], pair["ask"])]
    return {*scenes, *pairs, *templates.replies, *templates.openings}


def _size(case: Case) -> float:
    return sum(tokens_of(message["content"]) for message in case.messages)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", kinds())
def test_a_case_is_reproducible_and_needs_only_messages_of_the_user(split: str, kind: str) -> None:
    first = cases(split, kind, 4000, 6)
    assert first == cases(split, kind, 4000, 6)
    assert len({case.messages for case in map(_hashable, first)}) == len(first)
    for case in first:
        assert case.messages[0] == {"role": "system", "content": SYSTEM}
        assert [m["role"] for m in case.messages[1:]] == ["user", "assistant"] * (
            len(case.messages) // 2
        )
        assert case.needed and all(a < b for a, b in pairwise(case.needed))
        assert all(case.messages[index]["role"] == "user" for index in case.needed)
        assert case.asked[-1]["role"] == "user"
        assert 3600 < _size(case) < 4700


def _hashable(case: Case) -> Case:
    texts = tuple(message["content"] for message in case.messages)
    return Case(case.id, case.kind, case.scene, texts, (), tuple(case.needed))  # type: ignore[arg-type]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", kinds())
def test_every_slot_is_filled_and_the_needed_texts_are_those_of_the_template(
    split: str, kind: str
) -> None:
    templates = read(split)
    for case in cases(split, kind, 4000, 10):
        needed = [case.messages[index]["content"] for index in case.needed]
        asked = [message["content"] for message in case.asked]
        assert not [text for text in (*needed, *asked) if re.search(r"\{[a-z]+\d*\}", text)]
        if kind in QUERIES:
            assert len(needed) == QUERIES[kind]
            assert case.asked[-1]["content"].count("?") >= QUERIES[kind]
        else:
            scene = templates.scenes_of(kind)[case.scene]
            assert len(needed) == len(scene.say)
            for template, text in zip(scene.say, needed, strict=True):
                words = [re.escape(part) for part in re.split(r"\{\w+\}", template.rstrip("."))]
                assert re.search(".+".join(words), text), (template, text)


@pytest.mark.parametrize("split", SPLITS)
def test_a_haystack_of_statements_is_what_users_of_the_split_tell(split: str) -> None:
    told = [
        sentence
        for each in conversations()
        if each.id.startswith("bfcl") and split_of()[each.id] == split
        for sentence in re.split(r"(?<=[.!?])\s+", "\n".join(each.texts))
    ]
    for case in cases(split, "needle", 4000, 3, haystack="statements"):
        said = [m["content"] for m in case.messages if m["role"] == "user"]
        needed = {case.messages[index]["content"] for index in case.needed}
        straw = [text for text in said if text in told]
        assert len(straw) > 60 and len(said) - len(straw) < 10 and needed <= set(said)
        assert 3600 < _size(case) < 4700


def test_the_name_of_each_set_of_templates_begins_with_its_split() -> None:
    assert {name.partition("_")[0] for name in TEMPLATES} == set(SPLITS) <= set(TEMPLATES)


def test_each_kind_has_its_number_of_needed_messages() -> None:
    for name in (each for each in TEMPLATES if not each.endswith(("_second", "_third", "_fourth"))):
        templates = read(name)
        if templates.dialogs:  # of another language, with shorter lists
            continue
        assert all(len(scene.say) == 8 for scene in templates.scenes_of("multi-value"))
        assert all(len(scene.say) == 12 for scene in templates.scenes_of("summaries"))
        assert all(len(scene.say) == 5 for scene in templates.scenes_of("variable tracking"))
        assert all(scene.before for scene in templates.scenes_of("pronoun follow-ups"))
        assert all(scene.old for scene in templates.scenes_of("corrections"))
        assert name not in SPLITS or len(templates.pairs) >= max(QUERIES.values())


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in SPLITS])
def test_further_templates_make_cases_with_all_needed_messages(name: str) -> None:
    templates = read(name)
    slots = "|".join((*templates.pools, "number", "code", "time", "amount", "size"))
    for kind in templates.kinds:
        for case in cases(name, kind, 4000, len(templates.scenes_of(kind))):
            assert len(case.needed) == len(templates.scenes_of(kind)[case.scene].say)
            texts = [message["content"] for message in (*case.messages, *case.asked)]
            assert not [text for text in texts if re.search(rf"\{{(?:{slots})\d*\}}", text)]


def test_the_splits_share_no_template_and_no_name() -> None:
    tuning, reporting = map(read, SPLITS)
    assert not _texts(tuning) & _texts(reporting)
    told = {
        split: {
            text
            for templates in map(read, TEMPLATES)
            if templates.split == split
            for text in _texts(templates) - {*templates.replies, *templates.openings}
        }
        for split in SPLITS
    }
    assert not told["tuning"] & told["reporting"]
    named = {name for names in tuning.pools.values() for name in names}
    assert not named & {name for names in reporting.pools.values() for name in names}


def test_replaced_values_come_before_the_newest_one() -> None:
    for case in cases("tuning", "corrections", 4000, 14):
        texts = [message["content"] for message in case.messages]
        scene = read("tuning").scenes_of("corrections")[case.scene]
        beginning = scene.old[0].split("{")[0]
        if len(beginning) > 8:
            old = next(at for at, text in enumerate(texts) if text.startswith(beginning))
            assert old < case.needed[-1]


def test_rivals_differ_from_the_fact_in_the_names_of_the_question() -> None:
    templates = read("tuning")
    for case in cases("tuning", "multi-key", 4000, 8):
        scene = templates.scenes_of("multi-key")[case.scene]
        ending = re.split(r"\{\w+\}", scene.say[0])[0]
        if ending:
            alike = [m["content"] for m in case.messages if m["content"].startswith(ending)]
            keys = [pool for pool in pools_in(scene.ask) if pool in templates.pools]
            names = {name for pool in keys for name in templates.pools[pool]}
            found = [next(name for name in names if name in text) for text in alike]
            assert len(alike) > 4 and len(set(found)) == len(found)


def test_standing_instructions_are_in_the_first_messages() -> None:
    for case in cases("tuning", "standing instructions", 4000, 10):
        assert case.needed[0] < 0.4 * len(case.messages)


def _case(n: int, needed: tuple[int, ...], texts: dict[int, str]) -> Case:
    messages = [{"role": "user", "content": texts.get(at, "straw")} for at in range(n)]
    asked = [{"role": "user", "content": "Where is the geranium?"}]
    return Case("tuning kind 4000 0", "kind", 0, messages, asked, needed)


def _spans(n: int, size: int = 50) -> dict[int, tuple[int, int]]:
    return {at: (at * size, (at + 1) * size) for at in range(n + 1)}


def test_a_message_counts_only_if_all_its_positions_are_resident() -> None:
    asked, spans = Asked("id", [], (1, 2)), _spans(4)
    assert shares_of_needed(asked, spans, [(50, 150)]) == [1.0, 1.0]
    assert shares_of_needed(asked, spans, [(50, 149)]) == [1.0, 0.98]
    assert shares_of_needed(asked, spans, [(51, 149)]) == [0.98, 0.98]


def test_fills_spend_the_budget_left_by_the_turn_and_the_system_prompt() -> None:
    case = _case(10, (3,), {3: "the geranium is on the sill"})
    # 200 tokens: 50 for the system prompt, 50 for the turn, two messages of 50.
    found = _filled(case, 200)
    assert found["oracle"] == found["bm25"] == [1.0]
    assert found["newest"] == [0.0]
    assert _filled(case, 149)["oracle"] == [0.0]
    assert _filled(_case(10, (9,), {}), 200)["newest"] == [1.0]
    assert _filled(case, 100_000)["random"] == [1.0]


def _filled(case: Case, budget: int) -> dict[str, list[float]]:
    messages = [message["content"] for message in case.messages[1:]]
    asked = Asked(case.id, case.asked, case.needed)
    talk = Talk(case.messages, [asked], [], range(1, len(case.messages)), {}, (0,))
    return fills(talk, asked, _spans(len(case.messages)), (Rankings(messages), budget))


def _row(kind: str, arm: str, case: int, whole: float) -> dict[str, object]:
    return {
        "kind": kind, "kinds": (kind,), "conversation": f"{kind} {case % 2}", "length": 4000,
        "question": f"{kind} {case}", "share": 8, "tokens": 4000, "budget": 500, "arm": arm,
        "whole": whole >= 1, "half": whole >= 0.5, "messages": whole,
    }  # fmt: skip


def test_the_summary_has_percentages_differences_and_missed_bars() -> None:
    rows = [
        *(_row("multi-value", "default", at, 1.0 if at < 5 else 0.5) for at in range(10)),
        *(_row("multi-value", "bm25", at, 1.0 if at < 2 else 0.0) for at in range(10)),
        *(_row("multi-query 4", "default", at, 1.0) for at in range(10)),
        *(_row("multi-query 4", "bm25", at, 1.0) for at in range(10)),
    ]
    summary = summary_of(rows)
    said = summary["4000"]["1/8"]
    assert {cell: arms["default"]["whole"] for cell, arms in said["arms"].items()} == {
        "multi-value": 50.0, "multi-query 4": 100.0, "all kinds": 75.0, "mean of kinds": 75.0,
    }  # fmt: skip
    assert said["default minus"]["bm25"]["points"] == 15.0
    missed = [bar["kind"] for bar in bars_of(summary) if bar["found"] < bar["wanted"]]
    assert missed == ["multi-value"]
    verdicts = {(v["cell"], v["criterion"]): v["verdict"] for v in said["verdicts"]}
    assert verdicts["4000 1/8 multi-value", "best single fill"] == "pass"
    assert ("4000 1/8 all kinds", "best single fill") in verdicts
    cell = next(c for c in cells(rows, ("kind", "length")) if c["arm"] == "default")
    assert (cell["questions"], cell["whole"], cell["messages"]) == (10, 50.0, 75.0)
    args = argparse.Namespace(
        haystack="dialogs", split="tuning", lengths=[4000], misses=0, count=1, kinds=["needle"]
    )
    made = report(args, rows)
    assert made.missed == ["multi-value at 4000"] and made.picture.startswith("<svg")


def test_every_arm_of_a_case_is_measured_in_one_process() -> None:
    """Without a budget every message is present."""
    case = cases("tuning", "multi-key", 4000, 1)[0]
    arms = [arm for arm in ARMS if "encoder" not in arm]
    rows = {row["arm"]: row for row in measure(InProcess(), talk_of(case), (8,), arms)}
    assert set(rows) == set(arms)
    assert rows["no eviction"]["messages"] == rows["oracle"]["messages"] == 1.0
    assert 3600 < rows["default"]["tokens"] < 4400
    assert rows["default"]["budget"] == rows["default"]["tokens"] // 8


def test_quoted_text_counts_as_present() -> None:
    case = cases("tuning", "multi-key", 4000, 1)[0]
    messages, made = [*case.messages, *case.asked], InProcess()
    spans = made.spans(messages)
    by_text = next(setting for setting in SETTINGS if setting.arm == "breadcrumb")
    chats = [history_of(messages), messages]
    (_, copied), (_, quoted) = (
        made.resident(setting, 512, setting.arm, chats) for setting in (DEFAULT, by_text)
    )
    assert sum(end - start for start, end in copied) <= 512
    assert set(shares_of_needed(talk_of(case).asked[0], spans, quoted)) == {1.0}


def test_the_history_before_the_question_ends_with_a_message_of_the_user() -> None:
    case = cases("tuning", "pronoun follow-ups", 4000, 1)[0]
    before = history_of([*case.messages, *case.asked])
    assert before[-1] == case.asked[0]
    case = cases("tuning", "multi-key", 4000, 1)[0]
    assert history_of([*case.messages, *case.asked]) == case.messages[:-1]
