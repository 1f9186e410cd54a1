from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slot_model import seen

from evoke_proxy.core.blocks import Block, BlockState, Role, Span
from evoke_proxy.core.policy_view import PolicyView
from evoke_proxy.core.score import keep_scores

N_TOKENS = 100_000
BLOCK = Block("user:0#0", "s/0", Span(64, 128), Role.USER, 1, 0, "")


def score(block: Block, sink_tokens: int = 16) -> float:
    view = PolicyView(*seen((block,), (BlockState.RESIDENT,)), N_TOKENS, N_TOKENS - 1)
    return float(keep_scores(view, sink_tokens)[0])


def at(end: int, role: Role = Role.USER) -> Block:
    return replace(BLOCK, span=Span(end - 64, end), role=role)


@given(
    st.sampled_from(Role),
    st.integers(64, N_TOKENS),
    st.floats(0, 100),
    st.booleans(),
    st.booleans(),
)
def test_a_score_is_between_0_and_1(
    role: Role, end: int, priority: float, pinned: bool, preferred: bool
) -> None:
    block = replace(at(end, role), priority=priority, pinned=pinned, preferred=preferred)
    assert 0 <= score(block) <= 1


@pytest.mark.parametrize("role", Role)
def test_newer_is_worth_more_however_far_back(role: Role) -> None:
    scores = [score(at(end, role)) for end in range(128, N_TOKENS, 997)]
    assert all(a < b for a, b in zip(scores, scores[1:], strict=False))


def test_far_back_a_role_is_worth_its_floor() -> None:
    far = {role: score(at(128, role)) for role in Role}
    assert far[Role.USER] == pytest.approx(0.6, abs=0.01)
    assert far[Role.ASSISTANT] == pytest.approx(0.5, abs=0.01)
    assert far[Role.SYSTEM] == pytest.approx(0.8, abs=0.01)
    assert far[Role.TOOL] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("role", Role)
def test_the_newest_is_worth_everything(role: Role) -> None:
    assert score(at(N_TOKENS, role)) == 1.0


def test_sinks_and_pins_are_worth_everything_whatever_their_priority() -> None:
    worthless = replace(BLOCK, role=Role.TOOL, priority=0.0)
    assert score(replace(worthless, span=Span(15, 79))) == 1.0
    assert score(replace(worthless, span=Span(16, 80))) == 0.0
    assert score(replace(worthless, pinned=True)) == 1.0


def test_preferred_and_priority_raise_a_score_but_not_above_1() -> None:
    tool = at(N_TOKENS - 2000, Role.TOOL)
    assert score(replace(tool, preferred=True)) == pytest.approx(2 * score(tool))
    assert score(replace(tool, priority=0.5)) == pytest.approx(score(tool) / 2)
    assert score(replace(tool, priority=90.0)) == 1.0


def test_scores_are_in_the_blocks_order() -> None:
    blocks = tuple(at(end) for end in (300, 9_000, 70_000))
    view = PolicyView(*seen(blocks, (BlockState.RESIDENT,) * 3), N_TOKENS, 99_999)
    assert keep_scores(view, 16).argsort().tolist() == [0, 1, 2]
    assert keep_scores(PolicyView(*seen((), ()), 1, 0), 16).tolist() == []
