"""A trained hybrid that thinks before each answer recalls evicted facts on real servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from harness import server_binary

from bench.model import HYBRID
from bench.quality.plan import Cell, Plan
from bench.quality.sessions import TUNING
from bench.quality.work import Work
from bench.record import Journal

PLAN = Plan((Cell("facts5", "facts5", 1500, 2, best=0),), (8.0,))
N_PROBES = 10


@pytest.fixture(scope="module", params=["on", "off"])
def reasoning(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def records(reasoning: str, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The records of both sessions by policy."""
    journal = Journal(tmp_path_factory.mktemp("thinking") / "journal.jsonl", "test")
    options = ["--reasoning", reasoning]
    work = Work(server_binary(patched=True), HYBRID, journal, options=options)
    work.run(PLAN.units(TUNING.start), lanes=1)
    found = list(journal.records().values())
    return {
        name: [r for r in found if r["policy"] == name] for name in {r["policy"] for r in found}
    }


def right(records: Sequence[Mapping[str, Any]]) -> int:
    return sum(probe["right"] for record in records for probe in record["probes"])


def test_evicted_facts_are_recalled_with_and_without_thoughts(records: Mapping[str, Any]) -> None:
    assert right(records["no_eviction"]) > N_PROBES / 2  # it knows 93 to 98 % of these facts
    assert right(records["evoke"]) >= right(records["no_eviction"]) - 1
    assert right(records["discard"]) < N_PROBES / 2


def test_budgets_hold_and_token_counts_sum_to_the_prompt(records: Mapping[str, Any]) -> None:
    assert [fault for found in records.values() for each in found for fault in each["faults"]] == []


def test_answers_are_decoded_again_only_behind_removed_thoughts(
    reasoning: str, records: Mapping[str, Any]
) -> None:
    again = sum(record["answers_again"] for record in records["no_eviction"])
    assert (again > 0) == (reasoning == "on")
