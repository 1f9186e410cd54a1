"""The best set of blocks that fits: what a budget is spent on for one question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable, Mask, Positions
from evoke_proxy.core.model.blocks import count
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.policy.score import Scores

# So many blocks are looked at before those that have become too long are left out of the rest.
_STRIDE = 64
# So many are sorted at once.
_SORTED = 2048


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The blocks of a view, and what may be done with each. `settled` ones are resident, or were
    before a restart. `must` may not leave, or has to come back."""

    blocks: BlockTable
    lengths: Positions
    resident: Mask
    loadable: Mask
    settled: Mask
    must: Mask
    loose_rows: int

    def rows(self, mask: Mask) -> int:
        """How many rows there are with these blocks resident and no other."""
        return int(self.lengths[mask].sum()) + self.loose_rows


@dataclass(frozen=True, slots=True, eq=False)
class WorkingSet:
    """Which blocks are to be resident; `infeasible` when not even those that must fit."""

    chosen: Mask
    infeasible: bool
    tokens: int


def candidates(view: PolicyView, sink_tokens: int, recovers: bool) -> Candidates:
    """What can be chosen from: resident blocks, and saved ones below the write cursor."""
    adopts = view.adopt_to > 0
    cursor = view.adopt_to if adopts else view.n_past
    blocks = view.blocks
    starts, ends, lengths = blocks.starts, blocks.ends, blocks.lengths
    resident = view.in_cache & (not adopts)
    loadable = view.in_pool & (ends <= cursor) & ~resident & recovers
    settled = loadable & blocks.within(view.left) if adopts else resident
    stays = blocks.pinned | (starts < sink_tokens) | ((starts < cursor) & (cursor <= ends))
    stays |= blocks.within(view.held)
    loose = 0 if adopts else count(view.kept_rows) - int(lengths[resident].sum())
    must = stays & (resident | loadable)
    return Candidates(blocks, lengths, resident, loadable, settled, must, loose)


def filled(given: Candidates, capacity: int | None, fill: Callable[[int], Mask]) -> WorkingSet:
    """What must stay, and what `fill` takes of the rest for so many tokens of room.

    None for `capacity` takes everything; infeasible when it has no room for what must stay.
    """
    if capacity is None:
        chosen = given.resident | given.loadable
        return WorkingSet(chosen, False, given.rows(chosen))
    room = capacity - given.rows(given.must)
    chosen = given.must | fill(room) if room >= 0 else given.must
    return WorkingSet(chosen, room < 0, given.rows(chosen))


def choose(
    given: Candidates, values: Scores, capacity: int | None, margin: float | Scores
) -> WorkingSet:
    """What must stay, then the most valuable of the rest, as long as it fits `capacity` tokens.

    A block that does not fit is passed over for a smaller one of less value. A settled block is
    worth `margin` more than one that would have to be moved: one number, or one a block. None for
    `capacity` takes everything.
    """

    def fill(room: int) -> Mask:
        worth = values + np.where(given.settled, margin, 0.0)
        wanted = (given.resident | given.loadable) & ~given.must
        return best_that_fit(wanted, worth, given.blocks, room)

    return filled(given, capacity, fill)


def best_that_fit(wanted: Mask, values: Scores, blocks: BlockTable, room: int) -> Mask:
    """What `first_fit` takes of `by_value`, with only those sorted that there may be room for."""
    lengths, taken = blocks.lengths, np.zeros(len(blocks), np.bool_)
    left = np.flatnonzero(wanted & (lengths <= room))
    while len(left):
        ahead = np.ones(len(left), np.bool_)
        if len(left) > _SORTED:
            ahead = values[left] >= np.partition(values[left], len(left) - _SORTED)[-_SORTED]
        near = np.zeros(len(blocks), np.bool_)
        near[left[ahead]] = True
        found = first_fit(by_value(near, values, blocks), lengths, room)
        taken |= found
        room -= int(lengths[found].sum())
        left = left[~ahead & (lengths[left] <= room)]
    return taken


def that_fit(given: Candidates, values: Scores, wanted: Mask, room: int) -> Mask:
    """Of the blocks wanted back, those that must be first and then the most valuable in `room`."""
    order = by_value(wanted, values + np.where(given.must, 1e6, 0.0), given.blocks)
    return first_fit(order, given.lengths, room)


def by_value(wanted: Mask, values: Scores, blocks: BlockTable) -> Positions:
    """Indexes of these blocks, most valuable first; equal ones by key."""
    indexes = np.flatnonzero(wanted)
    order = indexes[(-values[indexes]).argsort(kind="stable")]
    ranked = values[order]
    equal = np.flatnonzero(ranked[1:] == ranked[:-1])
    if len(equal):
        for first in np.setdiff1d(equal, equal + 1).tolist():
            end = first + int((ranked[first:] == ranked[first]).sum())
            order[first:end] = sorted(
                order[first:end].tolist(), key=lambda i: blocks[i].display_name
            )
    return order


def first_fit(order: Positions, lengths: Positions, room: int) -> Mask:
    """Of these indexes the first that fits, the next that fits beside it, and so on."""
    taken = np.zeros(len(lengths), np.bool_)
    left = order
    while len(left):
        left = left[lengths[left] <= room]
        near = left[:_STRIDE]
        for i, length in zip(near.tolist(), lengths[near].tolist(), strict=True):
            if length <= room:
                taken[i] = True
                room -= length
        left = left[_STRIDE:]
    return taken
