"""Selects the working set of the evoke policy within a capacity in tokens.

Blocks that stay whatever the query finds are taken first, then the ranked units within their share
of the room, then the other blocks that are worth most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evoke_proxy.core.model.block_table import FloatArray, Mask, Positions
from evoke_proxy.core.policy.planner import (
    Candidates,
    WorkingSet,
    best_fit,
    fill_capacity,
    first_fit,
)
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.fusion import Ranking, interleaved
from evoke_proxy.core.retrieval.units import Units

# Blocks with at least this score are taken before the ranking; see the scores of `policy.evoke`.
BEFORE_RANKING = 3.0
# Units that come later get this many tokens for each token of the others.
_LATER_WEIGHT = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class SelectionOrder:
    """The order in which units and blocks are taken.

    Attributes:
        units: The units of the blocks.
        order: Indexes of the units that the query finds, best first.
        margin: Added to the worth of resident blocks when the blocks that are left after the
            ranking compete; one number, or one per block [n].
        worth: What these blocks compete with [n].
        share: Share of the room that the ranked units may take, in (0, 1].
    """

    units: Units
    order: Positions
    margin: float | FloatArray
    worth: FloatArray
    share: float = 1.0


def select_blocks(
    candidates: Candidates, scores: FloatArray, capacity: int | None, selection: SelectionOrder
) -> WorkingSet:
    """Return the working set: required blocks, ranked units that fit, then the best other blocks.

    Of a unit, the blocks with resident or saved rows are taken, all or none. A unit that does not
    fit is skipped, and a later, shorter one may be taken. None as capacity takes all blocks.
    """

    def fill(room: int) -> Mask:
        optional, blocks = candidates.optional, candidates.blocks
        taken = best_fit(optional & (scores >= BEFORE_RANKING), scores, blocks, room)
        room -= int(candidates.lengths[taken].sum())
        ranked = _first_fit(selection, candidates.lengths, optional & ~taken, room)
        room -= int(candidates.lengths[ranked].sum())
        taken |= ranked
        worth = selection.worth + np.where(candidates.was_resident, selection.margin, 0.0)
        return taken | best_fit(optional & ~taken, worth, blocks, room)

    return fill_capacity(candidates, capacity, fill)


def leading_last(order: Positions, units: Units, leads: Mask, room: int) -> Positions:
    """Return the order with later places for units that only lead up to the question.

    `leads` [n] are the blocks of such units. The first of them that fit into `room` tokens keep
    their places.
    """
    later = np.zeros(len(units), np.bool_)
    later[units.of_block[leads]] = True
    kept = first_fit(order[later[order]], units.lengths, room)
    later &= ~kept
    is_later = later[order]
    if not is_later.any():
        return order
    first = order[~is_later]
    # The best unit comes before all of these, also when it is long.
    n_before = int(units.lengths[first[:1]].sum())
    rankings = Ranking(first), Ranking(order[is_later], _LATER_WEIGHT, n_before)
    return interleaved(rankings, units.lengths)


def blocks_to_keep(
    selection: SelectionOrder, view: PolicyView, scores: FloatArray, room: int
) -> Mask:
    """Return the blocks [n] of the whole prompt to keep in `room` tokens, if all had rows."""
    taken = best_fit(scores >= BEFORE_RANKING, scores, view.blocks, room)
    lengths = view.blocks.lengths
    room -= int(lengths[taken].sum())
    ranked = _first_fit(selection, lengths, ~taken, room)
    taken |= ranked
    if selection.share == 1.0:
        return taken
    room -= int(lengths[ranked].sum())
    others = ~taken
    others[view.blocks.question_start :] = False
    return taken | best_fit(others, selection.worth, view.blocks, room)


def _first_fit(selection: SelectionOrder, lengths: Positions, wanted: Mask, room: int) -> Mask:
    """Return the wanted blocks [n] of the ranked units that fit into their share of `room`."""
    units, order = selection.units, selection.order
    costs = units.sums(np.where(wanted, lengths, 0))
    has_wanted = order[costs[order] > 0]
    return wanted & first_fit(has_wanted, costs, int(selection.share * room))[units.of_block]
