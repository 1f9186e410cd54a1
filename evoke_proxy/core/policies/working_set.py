"""The best set of blocks that fits: what a budget is spent on for one question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.blocks import BlockState, total
from evoke_proxy.core.policy_view import PolicyView
from evoke_proxy.core.score import Scores

Mask = npt.NDArray[np.bool_]

_RESIDENT = {state: state.resident for state in BlockState}
_SAVED = {state: state.saved for state in BlockState}


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The blocks of a view as arrays. `must` may not leave, or has to come back."""

    keys: tuple[str, ...]
    lengths: npt.NDArray[np.int64]
    resident: Mask
    loadable: Mask
    must: Mask
    loose_rows: int


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
    blocks, states = view.blocks, view.states
    starts = np.array([block.span.start for block in blocks], dtype=np.int64)
    ends = np.array([block.span.end for block in blocks], dtype=np.int64)
    resident = _of(states, _RESIDENT) & (not adopts)
    saved = _of(states, _SAVED)
    below = ends <= cursor
    loadable = saved & below & ~resident if recovers else np.zeros(len(blocks), bool)
    pinned = np.array([block.pinned for block in blocks], dtype=bool)
    stays = pinned | (starts < sink_tokens) | ((starts < cursor) & (cursor <= ends))
    lengths = ends - starts
    loose = 0 if adopts else total(view.kept_rows) - int(lengths[resident].sum())
    keys = tuple(block.key for block in blocks)
    return Candidates(keys, lengths, resident, loadable, stays & (resident | loadable), loose)


def choose(given: Candidates, values: Scores, capacity: int | None, margin: float) -> WorkingSet:
    """What must stay, then the most valuable of the rest, as long as it fits `capacity` tokens.

    A block that does not fit is passed over for a smaller one of less value. A resident block is
    worth `margin` more than one that would have to be moved. None for `capacity` takes everything.
    """
    used = int(given.lengths[given.must].sum()) + given.loose_rows
    if capacity is None:
        chosen = given.resident | given.loadable
        return WorkingSet(chosen, False, int(given.lengths[chosen].sum()) + given.loose_rows)
    chosen = given.must.copy()
    if used > capacity:
        return WorkingSet(chosen, True, used)
    worth = values + np.where(given.resident, margin, 0.0)
    lengths = given.lengths.tolist()
    for i in by_value(np.flatnonzero((given.resident | given.loadable) & ~chosen), worth, given):
        if used + lengths[i] <= capacity:
            chosen[i] = True
            used += lengths[i]
    return WorkingSet(chosen, False, used)


def that_fit(given: Candidates, values: Scores, wanted: Mask, room: int) -> Mask:
    """Of the blocks wanted back, those that must be first and then the most valuable in `room`."""
    fitting = np.zeros(len(wanted), dtype=bool)
    order = by_value(np.flatnonzero(wanted), values + np.where(given.must, 1e6, 0.0), given)
    lengths = given.lengths.tolist()
    for i in order:
        if lengths[i] <= room:
            fitting[i] = True
            room -= lengths[i]
    return fitting


def by_value(indexes: npt.NDArray[np.int64], values: Scores, given: Candidates) -> list[int]:
    """Most valuable first; equal ones by key."""
    costs, keys = (-values).tolist(), given.keys
    return sorted(indexes.tolist(), key=lambda i: (costs[i], keys[i]))


def _of(states: Sequence[BlockState], wanted: Mapping[BlockState, bool]) -> Mask:
    return np.array([wanted[state] for state in states], dtype=bool)
