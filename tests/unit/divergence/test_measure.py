"""The summary of a measurement, and what the oracle evicts."""

from __future__ import annotations

from typing import Any

import bench.policies  # noqa: F401 -- registers baselines
from evoke_proxy.divergence.measure import ARMS, arm_names, summarise
from evoke_proxy.divergence.reference import _evicted, _without


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


def test_the_oracle_evicts_the_blocks_with_least_attention_per_token() -> None:
    blocks = [(0, 64), (64, 128), (128, 192), (192, 200)]
    # The last block is short: per token it has most.
    assert _evicted(blocks, [3.0, 1.0, 2.0, 2.0], room=120) == [(64, 192)]
    assert _evicted(blocks, [3.0, 1.0, 2.0, 2.0], room=200) == []
    assert _evicted(blocks, [3.0, 1.0, 2.0, 2.0], room=0) == [(0, 200)]


def test_rows_of_context_checkpoints_are_not_evicted() -> None:
    assert _without([(0, 64), (100, 164)], [(63, 64), (120, 121)]) == [
        (0, 63),
        (100, 120),
        (121, 164),
    ]
    assert _without([(0, 64)], []) == [(0, 64)]


def test_policies_of_further_modules_are_arms() -> None:
    assert arm_names()[: len(ARMS)] == ARMS
    assert {"breadcrumb", "infllm"} < set(arm_names()) - set(ARMS)
    assert "evoke" not in arm_names()
    rows = [row("default", 1, [True]), row("breadcrumb", 1, [False])]
    assert [found["arm"] for found in summarise(rows)] == ["default", "breadcrumb"]
