"""Selection of blocks: those that must stay, then the ranking, then by keep-score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from policy_fixtures import FILLER, block_view

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.policy.planner import candidates_of
from evoke_proxy.core.policy.selection import (
    SelectionOrder,
    blocks_to_keep,
    leading_last,
    select_blocks,
)
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.units import Units


def chosen(
    view: PolicyView, scores: list[float], order: list[int], capacity: int, share: float = 1.0
) -> list[int]:
    units = Units.of(view.blocks, 256)
    selection = SelectionOrder(units, np.array(order, np.int64), 0.0, np.array(scores), share)
    result = select_blocks(candidates_of(view, 0, True), np.array(scores), capacity, selection)
    return np.flatnonzero(result.chosen).tolist()


def in_messages(view: PolicyView, messages: list[int]) -> PolicyView:
    pairs = zip(view.blocks, messages, strict=True)
    return replace(view, blocks=BlockTable(replace(b, message=m) for b, m in pairs))


def test_a_message_that_does_not_fit_whole_is_skipped_for_a_shorter_one() -> None:
    view = in_messages(block_view(FILLER[:6], "ssssrr"), [0, 0, 0, 1, 2, 3])
    scores = [2.0, 2.0, 2.0, 1.5, 0.1, 0.2]
    assert chosen(view, scores, [0, 1], 64 * 4) == [0, 1, 2, 5]
    # The rest of the budget holds a part of the longer message.
    assert chosen(view, scores, [0, 1], 64 * 3) == [0, 3, 5]


def test_blocks_are_chosen_by_need_then_by_ranking_then_by_keep_score() -> None:
    view = block_view(FILLER[:6], "ssssrr")
    scores = [1.5, 0.9, 4.0, 0.8, 0.7, 0.6]
    assert chosen(view, scores, [0], 64 * 3) == [0, 2, 5]
    assert chosen(view, scores, [0], 64 * 4) == [0, 1, 2, 5]


def test_new_blocks_are_kept_by_the_same_rule() -> None:
    view = in_messages(block_view(FILLER[:6], "ssssrr"), [0, 0, 0, 1, 2, 3])
    units = Units.of(view.blocks, 256)
    worth = np.arange(6.0)
    selection = SelectionOrder(units, np.array([0, 1], np.int64), 0.0, worth)
    mask = blocks_to_keep(selection, view, np.zeros(6), 64 * 2)
    assert np.flatnonzero(mask).tolist() == [3]
    halved = replace(selection, share=0.5)
    assert np.flatnonzero(blocks_to_keep(halved, view, np.zeros(6), 64 * 2)).tolist() == [3, 4]


def test_the_ranking_chooses_in_its_share_of_the_room_and_worth_in_the_rest() -> None:
    view = block_view(FILLER[:6], "ssssrr")
    scores = [0.1, 0.2, 0.3, 0.8, 0.7, 0.6]
    assert chosen(view, scores, [0, 1, 2], 64 * 4) == [0, 1, 2, 5], "the last block must stay"
    assert chosen(view, scores, [0, 1, 2], 64 * 4, share=0.67) == [0, 1, 3, 5]
    assert chosen(view, scores, [0, 1, 2], 64 * 4, share=0.34) == [0, 3, 4, 5]


def test_messages_that_lead_up_to_the_question_come_later_beyond_their_room() -> None:
    view = block_view(FILLER[:6], "ssssrr")
    units = Units.of(view.blocks, 64)
    order, leads = np.array([5, 4, 0, 1, 2]), np.array([0, 0, 0, 0, 1, 1], bool)
    first, second = (int(units.lengths[i]) for i in (5, 4))
    assert leading_last(order, units, leads, first + second).tolist() == order.tolist()
    assert leading_last(order, units, leads, first).tolist() == [5, 0, 1, 2, 4]
    assert leading_last(order, units, leads, 0).tolist() == [0, 1, 2, 5, 4]


def test_what_leads_up_to_the_question_does_not_come_before_the_best_long_message() -> None:
    # Four blocks are one message of 256 tokens; the question before the last one has 8.
    view = in_messages(block_view(FILLER[:6], "ssssrr"), [0, 0, 0, 0, 1, 2])
    units = Units.of(view.blocks, 512)
    lengths = units.lengths.tolist()
    short = replace(units, lengths=np.array([*lengths[:-1], 8]))
    leads = np.array([0, 0, 0, 0, 0, 1], bool)
    assert len(lengths) == 3 and lengths[0] > 10 * 8
    assert leading_last(np.array([0, 2, 1]), short, leads, 0).tolist() == [0, 1, 2]
