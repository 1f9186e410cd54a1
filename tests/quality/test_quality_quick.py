"""A short run of the quality bench on real servers: recall under a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import server_binary

from bench.quality.plan import QUICK
from bench.quality.sessions import TUNING
from bench.quality.work import Work
from bench.record import Journal
from evoke_proxy.models import bundled_model

Records = Sequence[Mapping[str, Any]]
RATIO = 8.0


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder = tmp_path_factory.mktemp("quality")
    journal = Journal(folder / "journal.jsonl", "test")
    work = Work(server_binary(patched=True), bundled_model(), journal)
    work.run(QUICK.units(TUNING.start), lanes=1)
    return list(journal.records().values())


def probes(records: Records, policy: str) -> list[Mapping[str, Any]]:
    """Return the questions of all sessions under a policy, with their answers."""
    return [probe for item in records if item["policy"] == policy for probe in item["probes"]]


def n_right(records: Records, policy: str) -> int:
    """Return the number of right answers under a policy."""
    return sum(probe["right"] for probe in probes(records, policy))


def test_evicted_facts_are_recalled(records: Records) -> None:
    assert n_right(records, "evoke") >= n_right(records, "no_eviction") - 1
    assert n_right(records, "no_eviction") > len(probes(records, "no_eviction")) // 2


def test_the_blocks_of_a_question_are_resident(records: Records) -> None:
    for policy in ("evoke", "oracle"):
        missing = [probe["question"] for probe in probes(records, policy) if not probe["visible"]]
        assert not missing, (policy, missing)


def test_facts_are_lost_without_recovery(records: Records) -> None:
    n_visible = sum(probe["visible"] for probe in probes(records, "discard"))
    assert n_right(records, "discard") <= n_visible + 1
    assert n_right(records, "discard") < n_right(records, "evoke") / 2


def test_turns_stay_in_their_budget_and_accounting_sums_to_the_prompt(records: Records) -> None:
    assert [fault for item in records for fault in item["faults"]] == []
    assert all(item["tokens"] >= 0.99 * RATIO * item["budget"] for item in records if item["ratio"])


def test_no_evicted_fact_was_decoded(records: Records) -> None:
    for policy in ("evoke", "discard", "oracle"):
        assert not any(probe["decoded_again"] for probe in probes(records, policy)), policy


def test_a_second_run_with_a_complete_journal_makes_no_requests(
    records: Records, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "journal.jsonl", "test")
    todo = QUICK.units(TUNING.start)
    for unit, record in zip(todo, records, strict=True):
        journal.append(unit.key, record)
    before = journal.records()
    Work(Path("/no/such/server"), bundled_model(), journal).run(todo, lanes=1)
    assert len(before) == len(records) and journal.records() == before
