"""Which lost blocks are decoded again before a turn, and what is adopted before each of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from cpu_time import exponent
from policy_fixtures import CONFIG, FILLER, block_view

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.lost_blocks import Refill, _joined, refills
from evoke_proxy.core.policy.registry import decide
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.query import Query

UNLIMITED = replace(CONFIG, budget=None)
QUERY = Query("where is the ferry")


def adopting(
    states: str,
    adopt_to: int | None = None,
    texts: list[str] = FILLER,
    role: Role = Role.USER,
) -> PolicyView:
    """A view of a slot with another text, with the blocks of `states` saved or lost."""
    view = block_view(texts[: len(states)], states, role=role)
    view.index.update(view.blocks)
    end = len(states) * 64
    return replace(
        view, n_past=0, resident=(), n_free=4096, adopt_to=end if adopt_to is None else adopt_to
    )


def numbers(step: Refill) -> tuple[list[int], list[int]]:
    """The numbers of the blocks that a step adopts, and of those that it decodes."""
    adopted = [span.start // 64 for span in step.adopt.spans] if step.adopt else []
    return adopted, [block.span.start // 64 for block in step.blocks]


def steps(view: PolicyView, config: PolicyConfig) -> list[tuple[list[int], list[int]]]:
    end = int(view.blocks.ends[view.in_pool][-1])
    found = refills(view, QUERY, config, end)
    for step in found:
        assert step.n_tokens == 64 * len(step.blocks) and step.end == step.blocks[-1].span.end
        if step.adopt is not None:  # llama-server continues after the last adopted row
            assert step.adopt.spans[-1].end == step.adopt.n_tokens == step.blocks[0].span.start
    return [numbers(step) for step in found]


def test_a_prompt_that_fits_has_each_lost_block_decoded_after_all_rows_before_it() -> None:
    view = adopting("ssdsssddss", adopt_to=128)
    assert steps(view, UNLIMITED) == [([0, 1], [2]), ([0, 1, 2, 3, 4, 5], [6, 7])]


def test_the_first_block_is_decoded_without_adopting() -> None:
    assert steps(adopting("dsssssss", adopt_to=0), UNLIMITED) == [([], [0])]


def test_nothing_is_decoded_where_the_rest_of_the_prompt_is_as_short() -> None:
    assert steps(adopting("ssssdsss", adopt_to=256), UNLIMITED) == []
    assert steps(adopting("sssssss", adopt_to=448), UNLIMITED) == []


def test_within_a_budget_only_what_the_plan_would_recover_is_decoded() -> None:
    texts = list(FILLER)
    texts[4] = "the ferry leaves at nine"
    view = adopting("sdsddsdddsss", texts=texts)
    assert decide(view, QUERY, CONFIG).adopt is not None
    found = steps(view, CONFIG)
    decoded = [number for _, blocks in found for number in blocks]
    assert 4 in decoded and len(decoded) < 6
    for before, blocks in found:
        assert 64 * (len(before) + len(blocks)) <= 512


def test_a_lost_block_before_a_wanted_one_is_decoded_with_it() -> None:
    texts = list(FILLER)
    texts[5] = "the ferry leaves at nine"
    view = adopting("ssssddssssss", texts=texts)
    found = steps(view, CONFIG)
    assert [blocks for _, blocks in found] == [[4, 5]]


def test_less_than_a_block_is_decoded_only_where_it_must_stay_or_is_a_message_of_the_user() -> None:
    texts = list(FILLER)
    texts[4] = "the ferry leaves at nine"
    larger = replace(CONFIG, block_tokens=65)
    assert steps(adopting("sssddsssssss", texts=texts), larger) != []
    assert steps(adopting("ssssdsssssss", texts=texts), CONFIG) == [([0, 3], [4])]
    answers = adopting("ssssdsssssss", texts=texts, role=Role.ASSISTANT)
    assert steps(answers, CONFIG) == [([0, 3], [4])] and steps(answers, larger) == []
    assert steps(adopting("ssssdsssssss", texts=texts), larger) == [([0, 3], [4])]
    part = adopting("ssssdsssssss", texts=texts)
    blocks = BlockTable(replace(b, message=min(b.message, 3)) for b in part.blocks)
    assert steps(replace(part, blocks=blocks), larger) == []
    first = adopting("dsssssssssss", texts=texts, role=Role.ASSISTANT)
    assert [blocks for _, blocks in steps(first, larger)] == [[0]]


def test_many_scattered_blocks_are_decoded_in_few_steps() -> None:
    texts = [f"text {i}" for i in range(40)]
    view = adopting("sd" * 19 + "ss", adopt_to=64, texts=texts)
    found = refills(view, QUERY, UNLIMITED, 40 * 64)
    assert len(found) == 8
    lost = {i for i in range(40) if not view.in_pool[i]}
    assert lost <= {number for step in found for number in numbers(step)[1]}


def test_many_scattered_blocks_are_joined_in_linear_time() -> None:
    starts = np.concatenate([[0], np.cumsum(np.arange(8192) % 7 + 1)])
    blocks = BlockTable(
        Block(f"u#{i}", f"{i}", Span(int(first), int(end)), Role.USER, 1, i, "x")
        for i, (first, end) in enumerate(pairwise(starts))
    )

    def join(n: int) -> None:
        joined = _joined([(i, i + 1) for i in range(0, n, 2)], blocks)
        gaps = [after[0] - before[1] for before, after in pairwise(joined)]
        assert len(joined) == 8 and gaps == [1] * 7

    assert exponent(join, 1024) < 1.5


def test_steps_that_do_not_fit_the_cells_are_not_begun() -> None:
    view = replace(adopting("ssdsssddss", adopt_to=128), n_free=300)
    assert steps(view, UNLIMITED) == []


def test_no_blocks_of_another_role_are_needed() -> None:
    view = block_view(FILLER[:4], "rrrr", role=Role.SYSTEM)
    assert view.resident == (Span(0, 256),)
    assert refills(view, QUERY, CONFIG, 0) == ()
