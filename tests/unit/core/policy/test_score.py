from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slot_model import BlockState, view_columns

from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.view import KeepWeights, PolicyView, Task, keep_scores
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.query import Query

N_TOKENS = 100_000
BLOCK = Block("user:0#0", "s/0", Span(64, 128), Role.USER, 1, 0, "")


def score(block: Block) -> float:
    view = PolicyView(*view_columns((block,), (BlockState.RESIDENT,)), N_TOKENS, N_TOKENS - 1)
    return float(keep_scores(view, 16)[0])


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
    view = PolicyView(*view_columns(blocks, (BlockState.RESIDENT,) * 3), N_TOKENS, 99_999)
    assert keep_scores(view, 16).argsort().tolist() == [0, 1, 2]
    assert keep_scores(PolicyView(*view_columns((), ()), 1, 0), 16).tolist() == []


def placed(weights: KeepWeights, **seen_too: object) -> list[float]:
    blocks = tuple(replace(at(end, Role.TOOL), label=f"s/{end}") for end in (300, 9_000, 70_000))
    view = PolicyView(*view_columns(blocks, (BlockState.RESIDENT,) * 3), N_TOKENS, 99_999)
    index = Index()
    index.relevance(Query(), view.blocks)
    index.add_vectors([("s/300", EAST[None]), ("s/9000", -EAST[None])])
    return keep_scores(replace(view, index=index, **seen_too), 16, weights).tolist()  # type: ignore[arg-type]


EAST = np.array([1.0, 0.0], np.float32)


def test_a_block_of_the_task_is_worth_more_and_one_without_a_vector_half() -> None:
    focus = KeepWeights(recency=0.0, focus=1.0)
    assert placed(focus, task=Task(EAST)) == pytest.approx([1.0, 0.0, 0.5])
    assert placed(focus) == [0.0, 0.0, 0.0]
    assert placed(KeepWeights(0.0, 0.0), task=Task(EAST)) == [0.0, 0.0, 0.0]


def test_attention_counts_once_it_is_there_and_as_much_as_configured() -> None:
    weights = KeepWeights(recency=0.0, focus=3.0, attention=1.0)
    looked = np.array([0.0, 1.0, 0.5])
    assert placed(weights, attention=looked, task=Task(EAST)) == pytest.approx([0.75, 0.25, 0.5])
    assert placed(replace(weights, focus=0.0), attention=looked) == looked.tolist()


def test_what_came_before_a_boundary_is_old_at_once_and_keeps_its_order() -> None:
    weights = KeepWeights(recency=1.0, focus=0.0)
    before, after = placed(weights), placed(weights, task=Task(start=69_000))
    assert after[2] == before[2]
    assert 0 < after[0] < before[0] and 0 < after[1] < before[1] and after[0] < after[1]
    near = placed(weights, task=Task(start=N_TOKENS))
    assert near[2] <= 512 / (9 * 512)
