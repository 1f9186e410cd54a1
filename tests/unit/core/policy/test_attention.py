"""What the model looked at: what is captured for whom, and what it says of blocks."""

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

LOOKING = {"h2o", "snapkv", "tova", "scored", "arkvale"}
LOOKED = (0.1, 0.9, 0.2, 0.8, 0.3, 0.4, 0.5, 0.6)


def view(attention: tuple[float, ...] | None = LOOKED, **facts: object) -> PolicyView:
    """Eight resident blocks of 64 tokens, of which six fit beside the tail."""
    plain = block_view(FILLER[:8], "rrrrrrrr", tail=64)
    looked = None if attention is None else np.array(attention)
    return replace(plain, attention=looked, **facts)  # type: ignore[arg-type]


def kept(name: str, given: PolicyView, **settings: int) -> str:
    config = replace(CONFIG, name=name, **settings)  # type: ignore[arg-type]
    return resident_after(given, registry.decide(given, Query.of("anything"), config))


# Block 0 has sinks, block 7 is the one that decoding goes on from.
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("h2o", "0 3 4 5 6 7"),  # half of the room for the newest
        ("snapkv", "0 2 3 4 6 7"),  # a window of one block
        ("tova", "0 1 2 3 4 7"),
    ],
)
def test_what_was_looked_at_stays_beside_a_window(name: str, left: str) -> None:
    given = view((0.0, 0.9, 0.9, 0.9, 0.9, 0.1, 0.1, 0.0))
    assert kept(name, given, recent_tokens=64) == left


@pytest.mark.parametrize("name", ["h2o", "snapkv", "tova", "scored"])
def test_age_decides_until_something_was_captured(name: str) -> None:
    given = view(None)
    assert kept(name, given) == "0 3 4 5 6 7"
    config = replace(CONFIG, name=name)
    plan = registry.decide(given, Query.of("anything"), config)
    assert not plan.saves and not plan.loads


def test_scored_keeps_what_was_looked_at_last() -> None:
    turns = np.array([1.0, 9.0, 3.0, 8.0, 2.0, 4.0, 5.0, 6.0])
    assert kept("scored", view(last_attended=turns)) == "0 1 3 5 6 7"


def test_only_policies_that_look_at_attention_have_it_captured() -> None:
    wanted = {name for name in policy_names() if capture_of(replace(CONFIG, name=name))}
    assert wanted == LOOKING | {"evoke_attention"}
    assert capture_of(replace(CONFIG, name="h2o", budget=None)) is None


def test_the_op_says_what_and_of_which_layers() -> None:
    assert Capture("sum").op((1, 2)) == {
        **{"op": "attn-capture", "layers": [1, 2], "mode": "sum"},
        **{"decay": 0.95, "window": 32},
    }


@pytest.mark.parametrize(
    ("possible", "count", "taken"),
    [
        (range(28), 4, (3, 10, 17, 24)),
        (range(4), 4, (0, 1, 2, 3)),
        ((5, 11), 4, (5, 11)),
        (range(24), 1, (12,)),
        ((), 4, ()),
    ],
)
def test_layers_are_spread(possible: range, count: int, taken: tuple[int, ...]) -> None:
    assert captured_layers(possible, count) == taken


ANSWERS: list[dict[str, object]] = [{}, {"mass": [1] * 7, "n_obs": 3}, {"mass": [0] * 8}]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_says_nothing_changes_nothing(answer: dict[str, object]) -> None:
    plain = view(None)
    assert AttentionTracker().updated(plain, answer, 1, 16) is plain


def test_shares_compare_tokens_with_the_mean_without_sinks() -> None:
    blocks = view().blocks
    mass = np.array([900.0, 64.0, 192.0, 0.0, 128.0, 0.0, 0.0, 0.0])
    known = np.array([True] * 5 + [False] * 3)
    found = attention_shares(mass, blocks, known, sink_tokens=16)
    # the mean of 1, 3, 0, 2 a token is 1.5
    assert found[:5] == pytest.approx([14.0625 / 15.5625, 0.4, 2 / 3, 0.0, 2 / 3.5])
    nothing = attention_shares(np.zeros(8), blocks, known, sink_tokens=16)
    assert nothing.tolist() == [0.5] * 8


def test_a_block_that_is_out_keeps_what_it_had() -> None:
    memory, plain = AttentionTracker(), view(None)
    assert memory.annotated(plain) is plain
    # shares: 0.5 for the mean of 2 a token, 0 for none; block 0 has the sinks
    first = {"mass": [0, 256, 0, 256, 0, 128, 128, 128], "n_obs": 3}
    shown = memory.updated(plain, first, 4, 16)
    assert shown.attention is not None and shown.last_attended is not None
    assert shown.attention == pytest.approx([0, 2 / 3, 0, 2 / 3, 0, 0.5, 0.5, 0.5], abs=1e-9)
    # made in turn 1; in turn 4 these had the mean or more
    assert shown.last_attended.tolist() == [1, 4, 1, 4, 1, 4, 4, 4]
    known = plain.in_cache.copy()
    known[1] = False
    second = {"mass": [0, 0, 64, 0, 0, 0, 0, 0], "n_obs": 4}
    shown = memory.updated(replace(plain, in_cache=known), second, 5, 16)
    assert shown.attention is not None and shown.last_attended is not None
    assert shown.attention == pytest.approx([0, 2 / 3, 6 / 7, 0, 0, 0, 0, 0], abs=1e-9)
    assert shown.last_attended.tolist() == [1, 4, 5, 4, 1, 4, 4, 4]
    fewer = replace(plain, blocks=plain.blocks[:1], in_cache=known[:1])
    memory.updated(fewer, {"mass": [64], "n_obs": 5}, 6, 0)
    again = memory.annotated(plain)
    assert again.attention is not None and again.attention.tolist() == [0.5] + [0.5] * 7
