"""Captured attention: what is captured for which policy, and the shares of blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_fixtures import resident_after
from policy_fixtures import CONFIG, FILLER, block_view

import bench.policies  # noqa: F401 -- registers baselines
from evoke_proxy.config.policy_names import policy_names
from evoke_proxy.core.policy import registry
from evoke_proxy.core.policy.attention import (
    AttentionTracker,
    Capture,
    attention_shares,
    captured_layers,
)
from evoke_proxy.core.policy.registry import capture_of
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.query import Query

WITH_CAPTURE = {"h2o", "snapkv", "tova", "scored", "arkvale"}
SHARES = (0.1, 0.9, 0.2, 0.8, 0.3, 0.4, 0.5, 0.6)


def view(attention: tuple[float, ...] | None = SHARES, **facts: object) -> PolicyView:
    """A view of eight resident blocks of 64 tokens; six of them fit with the tail."""
    plain = block_view(FILLER[:8], "rrrrrrrr", tail=64)
    shares = None if attention is None else np.array(attention)
    return replace(plain, attention=shares, **facts)  # type: ignore[arg-type]


def resident_with(name: str, state: PolicyView, **settings: int) -> str:
    config = replace(CONFIG, name=name, **settings)  # type: ignore[arg-type]
    return resident_after(state, registry.decide(state, Query.of("anything"), config))


# Block 0 has the sinks; decoding continues after block 7.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h2o", "0 3 4 5 6 7"),  # half of the budget for the newest
        ("snapkv", "0 2 3 4 6 7"),  # a window of one block
        ("tova", "0 1 2 3 4 7"),
    ],
)
def test_a_policy_keeps_attended_blocks_and_its_window(name: str, expected: str) -> None:
    state = view((0.0, 0.9, 0.9, 0.9, 0.9, 0.1, 0.1, 0.0))
    assert resident_with(name, state, recent_tokens=64) == expected


@pytest.mark.parametrize("name", ["h2o", "snapkv", "tova", "scored"])
def test_without_captured_attention_the_newest_blocks_are_kept(name: str) -> None:
    state = view(None)
    assert resident_with(name, state) == "0 3 4 5 6 7"
    config = replace(CONFIG, name=name)
    plan = registry.decide(state, Query.of("anything"), config)
    assert not plan.saves and not plan.loads


def test_the_scored_policy_keeps_the_blocks_attended_last() -> None:
    turns = np.array([1.0, 9.0, 3.0, 8.0, 2.0, 4.0, 5.0, 6.0])
    assert resident_with("scored", view(last_attended=turns)) == "0 1 3 5 6 7"


def test_attention_is_captured_only_for_policies_that_use_it() -> None:
    capturing = {name for name in policy_names() if capture_of(replace(CONFIG, name=name))}
    assert capturing == WITH_CAPTURE | {"evoke_attention"}
    assert capture_of(replace(CONFIG, name="h2o", budget=None)) is None


def test_the_capture_op_has_the_mode_and_the_layers() -> None:
    assert Capture("sum").op((1, 2)) == {
        **{"op": "attn-capture", "layers": [1, 2], "mode": "sum"},
        **{"decay": 0.95, "window": 32},
    }


@pytest.mark.parametrize(
    ("possible", "count", "chosen"),
    [
        (range(28), 4, (3, 10, 17, 24)),
        (range(4), 4, (0, 1, 2, 3)),
        ((5, 11), 4, (5, 11)),
        (range(24), 1, (12,)),
        ((), 4, ()),
    ],
)
def test_captured_layers_are_spread_over_the_model(
    possible: range, count: int, chosen: tuple[int, ...]
) -> None:
    assert captured_layers(possible, count) == chosen


ANSWERS: list[dict[str, object]] = [{}, {"mass": [1] * 7, "n_obs": 3}, {"mass": [0] * 8}]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_unusable_answer_changes_nothing(answer: dict[str, object]) -> None:
    plain = view(None)
    assert AttentionTracker().updated(plain, answer, 1, 16) is plain


def test_shares_compare_tokens_with_the_mean_without_sinks() -> None:
    blocks = view().blocks
    mass = np.array([900.0, 64.0, 192.0, 0.0, 128.0, 0.0, 0.0, 0.0])
    in_cache = np.array([True] * 5 + [False] * 3)
    shares_found = attention_shares(mass, blocks, in_cache, sink_tokens=16)
    # the mean of 1, 3, 0 and 2 per token is 1.5
    assert shares_found[:5] == pytest.approx([14.0625 / 15.5625, 0.4, 2 / 3, 0.0, 2 / 3.5])
    nothing = attention_shares(np.zeros(8), blocks, in_cache, sink_tokens=16)
    assert nothing.tolist() == [0.5] * 8


def test_an_evicted_block_keeps_its_share() -> None:
    memory, plain = AttentionTracker(), view(None)
    assert memory.annotated(plain) is plain
    # the share is 0.5 for the mean of 2 per token, 0 for none; block 0 has the sinks
    first = {"mass": [0, 256, 0, 256, 0, 128, 128, 128], "n_obs": 3}
    updated = memory.updated(plain, first, 4, 16)
    assert updated.attention is not None and updated.last_attended is not None
    assert updated.attention == pytest.approx([0, 2 / 3, 0, 2 / 3, 0, 0.5, 0.5, 0.5], abs=1e-9)
    # the blocks are of turn 1; in turn 4 some had the mean or more
    assert updated.last_attended.tolist() == [1, 4, 1, 4, 1, 4, 4, 4]
    in_cache = plain.in_cache.copy()
    in_cache[1] = False
    second = {"mass": [0, 0, 64, 0, 0, 0, 0, 0], "n_obs": 4}
    updated = memory.updated(replace(plain, in_cache=in_cache), second, 5, 16)
    assert updated.attention is not None and updated.last_attended is not None
    assert updated.attention == pytest.approx([0, 2 / 3, 6 / 7, 0, 0, 0, 0, 0], abs=1e-9)
    assert updated.last_attended.tolist() == [1, 4, 5, 4, 1, 4, 4, 4]
    fewer = replace(plain, blocks=plain.blocks[:1], in_cache=in_cache[:1])
    memory.updated(fewer, {"mass": [64], "n_obs": 5}, 6, 0)
    later = memory.annotated(plain)
    assert later.attention is not None and later.attention.tolist() == [0.5] + [0.5] * 7
