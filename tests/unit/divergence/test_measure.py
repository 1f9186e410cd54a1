"""The summary of a measurement, and what the oracle evicts."""

from __future__ import annotations

from typing import Any

import bench.policies  # noqa: F401 -- registers baselines
from evoke_proxy.divergence.measure import ARMS, arm_names, summarise


def row(arm: str, answer: int, top1: list[bool], conversation: str = "a") -> dict[str, Any]:
    return {
        "conversation": conversation,
        "answer": answer,
        "arm": arm,
        "tokens": len(top1),
        "kl": [0.0 if same else 1.0 for same in top1],
        "top1": top1,
        "logprob": -4.0,
        "logprob_full": -2.0,
    }


def test_arms_are_compared_on_the_answers_that_all_have() -> None:
    rows = [
        row("default", 1, [True, True]),
        row("default", 2, [True, False]),
        row("default", 3, [False, False]),
        row("oracle", 1, [True, True]),
        row("oracle", 2, [True, True]),
    ]
    default, oracle = summarise(rows)
    assert (default["arm"], default["answers"], default["tokens"]) == ("default", 2, 4)
    assert default["top1_percent"] == 75 and default["answers_changed_percent"] == 50
    assert default["kl_mean"] == 0.25 and default["kl_p95"] == 1
    assert default["logprob_change"] == -1
    assert oracle["top1_percent"] == oracle["low"] == oracle["high"] == 100


def test_the_interval_draws_whole_conversations() -> None:
    alike = [row("default", 1, [True] * 9 + [False], name) for name in "abc"]
    (found,) = summarise(alike)
    assert found["low"] == found["high"] == 90
    unlike = [row("default", 1, [name == "a"] * 10, name) for name in "abc"]
    (found,) = summarise(unlike)
    assert found["low"] == 0 and found["high"] == 100


def test_nothing_in_common_has_no_summary() -> None:
    assert summarise([]) == []
    assert summarise([row("default", 1, [True]), row("oracle", 2, [True])]) == []


def test_policies_of_further_modules_are_arms() -> None:
    assert arm_names()[: len(ARMS)] == ARMS
    assert {"breadcrumb", "infllm"} < set(arm_names()) - set(ARMS)
    assert "evoke" not in arm_names()
    rows = [row("default", 1, [True]), row("breadcrumb", 1, [False])]
    assert [found["arm"] for found in summarise(rows)] == ["default", "breadcrumb"]
