"""Keep-scores of blocks: recency, role, priority, task, attention."""

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


def test_a_reminder_of_a_client_has_no_floor() -> None:
    old = at(128)
    assert score(old) >= 0.6 > score(replace(old, is_reminder=True))


@pytest.mark.parametrize("role", Role)
def test_a_newer_block_always_scores_higher(role: Role) -> None:
    scores = [score(at(end, role)) for end in range(128, N_TOKENS, 997)]
    assert all(a < b for a, b in zip(scores, scores[1:], strict=False))


def test_the_score_of_an_old_block_is_the_floor_of_its_role() -> None:
    far = {role: score(at(128, role)) for role in Role}
    assert far[Role.USER] == pytest.approx(0.6, abs=0.01)
    assert far[Role.ASSISTANT] == pytest.approx(0.5, abs=0.01)
    assert far[Role.SYSTEM] == pytest.approx(0.8, abs=0.01)
    assert far[Role.TOOL] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("role", Role)
def test_the_newest_block_scores_1_but_a_result_of_few_words_less(role: Role) -> None:
    words = [f"word{i}" for i in range(12)]
    assert score(replace(at(N_TOKENS, role), text=" ".join(words))) == 1.0
    least = 1.0 if role != Role.TOOL else (0.6 + 0.33 * 3 / 12) / 0.93
    assert score(replace(at(N_TOKENS, role), text=" ".join(words[:3]))) == pytest.approx(least)


def test_results_of_tools_score_by_words_without_later_copies_below_what_people_say() -> None:
    rare, common = " ".join(f"name{i}" for i in range(12)), "port key house"
    roles = [Role.TOOL, Role.TOOL, Role.USER, Role.ASSISTANT, *[Role.TOOL] * 3]
    texts = [rare, common, rare[:40], rare[40:], *[common] * 3]
    blocks = [
        replace(at(128 + 64 * i, role), label=f"s/{i}", message=i, text=text)
        for i, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]
    blocks.append(replace(at(600), label="s/7", message=7, text=common))
    columns = view_columns(tuple(blocks), (BlockState.RESIDENT,) * len(blocks))
    view = PolicyView(*columns, N_TOKENS, 99_999)
    scores = keep_scores(view, 16).tolist()
    by_age = keep_scores(view, 16, KeepWeights(rarity=0.0)).tolist()
    assert scores[0] == pytest.approx((0.6 * by_age[0] + 0.33) / 0.93)
    assert scores[1] == pytest.approx(0.6 * by_age[1] / 0.93)
    assert scores[-2] == pytest.approx((0.6 * by_age[-2] + 0.33 * 3 / 12) / 0.93)
    assert max(scores[:2]) < min(scores[2:4])
    assert scores[2:4] == by_age[2:4], "what people say is not compared by its words"


def test_a_changed_file_after_a_result_is_worth_as_much_as_a_result() -> None:
    blocks = [
        replace(at(128 + 64 * i, role), label=f"s/{i}", message=i, text="port key house")
        for i, role in enumerate((Role.TOOL, Role.USER, Role.ASSISTANT, Role.USER))
    ]
    blocks[1] = replace(blocks[1], is_added=True)
    columns = view_columns(tuple(blocks), (BlockState.RESIDENT,) * 4)
    scores = keep_scores(PolicyView(*columns, N_TOKENS, 99_999), 16)
    assert scores[0] == pytest.approx(scores[1], abs=0.001) and scores[3] >= 0.6 > scores[1]
    blocks[1] = replace(blocks[1], is_added=False, is_result=True)
    columns = view_columns(tuple(blocks), (BlockState.RESIDENT,) * 4)
    assert scores.tolist() == keep_scores(PolicyView(*columns, N_TOKENS, 99_999), 16).tolist()


def test_sinks_and_pinned_blocks_score_1_whatever_their_priority() -> None:
    worthless = replace(BLOCK, role=Role.TOOL, priority=0.0)
    assert score(replace(worthless, span=Span(15, 79))) == 1.0
    assert score(replace(worthless, span=Span(16, 80))) == 0.0
    assert score(replace(worthless, pinned=True)) == 1.0


def test_preference_and_priority_multiply_a_score_up_to_1() -> None:
    tool = at(N_TOKENS - 2000, Role.TOOL)
    assert score(replace(tool, preferred=True)) == pytest.approx(2 * score(tool))
    assert score(replace(tool, priority=0.5)) == pytest.approx(score(tool) / 2)
    assert score(replace(tool, priority=90.0)) == 1.0


def test_scores_are_in_the_blocks_order() -> None:
    blocks = tuple(at(end) for end in (300, 9_000, 70_000))
    view = PolicyView(*view_columns(blocks, (BlockState.RESIDENT,) * 3), N_TOKENS, 99_999)
    assert keep_scores(view, 16).argsort().tolist() == [0, 1, 2]
    assert keep_scores(PolicyView(*view_columns((), ()), 1, 0), 16).tolist() == []


def scores_with(weights: KeepWeights, **fields: object) -> list[float]:
    """The scores of three tool results; the first two have opposite vectors, the last has none."""
    blocks = tuple(replace(at(end, Role.TOOL), label=f"s/{end}") for end in (300, 9_000, 70_000))
    view = PolicyView(*view_columns(blocks, (BlockState.RESIDENT,) * 3), N_TOKENS, 99_999)
    index = Index()
    index.relevance(Query(), view.blocks)
    index.add_vectors([("s/300", EAST[None]), ("s/9000", -EAST[None])])
    return keep_scores(replace(view, index=index, **fields), 16, weights).tolist()  # type: ignore[arg-type]


EAST = np.array([1.0, 0.0], np.float32)


def test_with_a_task_focus_similar_blocks_score_high_and_those_without_a_vector_half() -> None:
    focus = KeepWeights(recency=0.0, focus=1.0, rarity=0.0)
    assert scores_with(focus, task=Task(EAST)) == pytest.approx([1.0, 0.0, 0.5])
    assert scores_with(focus) == [0.0, 0.0, 0.0]
    assert scores_with(KeepWeights(0.0, 0.0, rarity=0.0), task=Task(EAST)) == [0.0, 0.0, 0.0]


def test_attention_counts_with_its_weight_if_it_was_captured() -> None:
    weights = KeepWeights(0.0, focus=3.0, attention=1.0, rarity=0.0)
    attention = np.array([0.0, 1.0, 0.5])
    assert scores_with(weights, attention=attention, task=Task(EAST)) == pytest.approx(
        [0.75, 0.25, 0.5]
    )
    assert scores_with(replace(weights, focus=0.0), attention=attention) == attention.tolist()


def test_blocks_before_a_task_boundary_score_as_old_in_the_same_order() -> None:
    weights = KeepWeights(recency=1.0, focus=0.0, rarity=0.0)
    before, after = scores_with(weights), scores_with(weights, task=Task(start=69_000))
    assert after[2] == before[2]
    assert 0 < after[0] < before[0] and 0 < after[1] < before[1] and after[0] < after[1]
    near = scores_with(weights, task=Task(start=N_TOKENS))
    assert near[2] <= 512 / (9 * 512)
