"""Room is spent on what stays, on the ranking, then on what is worth keeping."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from policy_fixtures import FILLER, block_view

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.policy.planner import candidates_of
from evoke_proxy.core.policy.spending import Spending, kept, spend
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.units import Units


def chosen(view: PolicyView, scores: list[float], order: list[int], capacity: int) -> list[int]:
    units = Units.of(view.blocks, 256)
    spending = Spending(units, np.array(order, np.int64), 0.0)
    found = spend(candidates_of(view, 0, True), np.array(scores), capacity, spending)
    return np.flatnonzero(found.chosen).tolist()


def in_messages(view: PolicyView, messages: list[int]) -> PolicyView:
    pairs = zip(view.blocks, messages, strict=True)
    return replace(view, blocks=BlockTable(replace(b, message=m) for b, m in pairs))


def test_a_message_is_taken_as_a_whole_or_skipped_for_a_shorter_one() -> None:
    view = in_messages(block_view(FILLER[:6], "ssssrr"), [0, 0, 0, 1, 2, 3])
    scores = [2.0, 2.0, 2.0, 1.5, 0.1, 0.2]
    assert chosen(view, scores, [0, 1], 64 * 4) == [0, 1, 2, 5]
    # A part of the longer one takes what is left.
    assert chosen(view, scores, [0, 1], 64 * 3) == [0, 3, 5]


def test_the_ranking_comes_before_what_is_worth_keeping_and_after_what_stays() -> None:
    view = block_view(FILLER[:6], "ssssrr")
    scores = [1.5, 0.9, 4.0, 0.8, 0.7, 0.6]
    assert chosen(view, scores, [0], 64 * 3) == [0, 2, 5]
    assert chosen(view, scores, [0], 64 * 4) == [0, 1, 2, 5]


def test_new_blocks_are_kept_by_the_same_rule() -> None:
    view = in_messages(block_view(FILLER[:6], "ssssrr"), [0, 0, 0, 1, 2, 3])
    units = Units.of(view.blocks, 256)
    spending = Spending(units, np.array([0, 1], np.int64), 0.0)
    mask = kept(spending, view, np.zeros(6), 64 * 2)
    assert np.flatnonzero(mask).tolist() == [3]
