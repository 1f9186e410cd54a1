"""From what blocks are worth to what is moved: the part of a plan that all policies share.

A policy says what each block is worth and how a working set is chosen by that; what has to be
saved, evicted and loaded for it, and what the engine holds the budget with, follows from the view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import Mask
from evoke_proxy.core.model.blocks import Block, count, merged
from evoke_proxy.core.model.plan import Adopt, DecodeBudget, Drop, Evict, Load, Plan, Save
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.policy.score import Scores
from evoke_proxy.core.policy.working_set import (
    Candidates,
    WorkingSet,
    by_value,
    candidates,
    that_fit,
)

# A longer answer than this share of the budget is left to the stream: rows for tokens that may
# never come are worth less than blocks that are there.
_MAX_RESERVE_SHARE = 4

# Text longer than the budget is decoded in pieces; beside it this share of the budget's free part
# stays with the best blocks from before, or a long message would be answered without any of them.
_EARLIER_SHARE = 0.5

# Chooses what is to be resident of what could be, by these values, in room for so many tokens; None
# for those takes everything.
Select = Callable[[Candidates, Scores, int | None], WorkingSet]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What a policy makes of a view: one value a block, and how to choose by them.

    `values` decide what comes back first and what the engine evicts first, of the blocks that were
    there before the turn; `tail` does it for the turn's own. `recovers` says whether evicted blocks
    are saved and may come back. `keeps_earlier` keeps a share of the budget for the best earlier
    blocks where the turn's own text would take all of it.
    """

    values: Scores
    tail: Scores
    select: Select
    recovers: bool
    keeps_earlier: bool = False


def plan(view: PolicyView, config: PolicyConfig, choice: Choice) -> Plan:
    """The plan that makes a choice true; see `policies.decide` for what it promises."""
    given = candidates(view, config.sink_tokens, choice.recovers)
    if view.adopt_to and choice.recovers:
        return _adopting(view, config, given, choice)
    fits = room_for(view.tail, view.max_tokens, config)
    capacity, crowded = _capacity(fits, config, choice)
    chosen = choice.select(given, choice.values, capacity)
    out = given.resident & ~chosen.chosen
    loads = _loads(view, config, given, choice.values, chosen)
    protected = chosen.chosen if crowded else loads
    rows = view.foreign_rows if loads.any() and config.budget is not None else ()
    return Plan(
        saves=_saves(view, out) if choice.recovers else (),
        evicts=(*_evicts(view, out), *(Evict(span) for span in rows)),
        loads=tuple(Load(block.label, block.span) for block in view.blocks.pick(loads)),
        drops=_drops(view, choice.recovers),
        stream=_stream(view, config, choice, (given.resident & ~out) | loads, protected),
        infeasible=_infeasible(given, fits),
        crowded=crowded,
        reason=_reason(view, config, chosen, capacity),
    )


def _adopting(view: PolicyView, config: PolicyConfig, given: Candidates, choice: Choice) -> Plan:
    fits = room_for(view.n_tokens - view.adopt_to, view.max_tokens, config)
    capacity, crowded = _capacity(fits, config, choice)
    chosen = choice.select(given, choice.values, capacity)
    room = _room_in_cells(
        view.n_free + count(view.resident), view.n_tokens - view.adopt_to, config.budget
    )
    loads = that_fit(given, choice.values, chosen.chosen, room)
    blocks = view.blocks.pick(loads)
    if not blocks or blocks[-1].span.end != view.adopt_to:
        # Without the block decoding goes on from there is nothing to adopt: decode it all.
        nothing = np.zeros(len(loads), dtype=bool)
        stream = _stream(view, config, choice, nothing, nothing)
        return Plan(stream=stream, drops=_drops(view, True), reason="no cells to come back to")
    spans = tuple(block.span for block in blocks)
    return Plan(
        adopt=Adopt(view.adopt_to, tuple(block.label for block in blocks), spans),
        drops=_drops(view, True),
        stream=_stream(view, config, choice, loads, loads if crowded else loads & ~given.settled),
        infeasible=_infeasible(given, fits),
        crowded=crowded,
        reason=_reason(view, config, chosen, capacity),
    )


def room_for(tail: int, max_tokens: int | None, config: PolicyConfig) -> int | None:
    """Tokens that are left for blocks beside a tail and its answer; None without a budget."""
    if config.budget is None:
        return None
    wanted = config.reserve_tokens if max_tokens is None else max_tokens
    return config.budget - tail - min(wanted, config.budget // _MAX_RESERVE_SHARE)


def _capacity(fits: int | None, config: PolicyConfig, choice: Choice) -> tuple[int | None, bool]:
    """Tokens for earlier blocks, and whether they are more than `fits` beside the tail."""
    if fits is None or config.budget is None or not choice.keeps_earlier:
        return fits, False
    least = int((config.budget - config.least_budget) * _EARLIER_SHARE)
    return max(fits, least), fits < least


def _infeasible(given: Candidates, fits: int | None) -> bool:
    return fits is not None and given.rows(given.must) > fits


def _room_in_cells(free: int, tail: int, budget: int | None) -> int:
    """How many rows may be loaded into `free` cells before `tail` tokens are decoded.

    `budget` is what is left of the budget. Where the cells hold all of it, the engine makes room
    for the tail by itself; where they do not, or there is none, the tail's own cells stay free.
    """
    if budget is None:
        return free - tail
    return budget if free >= budget else min(budget, free - tail)


def _loads(
    view: PolicyView, config: PolicyConfig, given: Candidates, values: Scores, chosen: WorkingSet
) -> Mask:
    """The chosen blocks that are out, as far as cells and the budget have room during the plan."""
    out = given.resident & ~chosen.chosen
    freed = int(given.lengths[out].sum())
    free, left = view.n_free + freed, None
    if config.budget is not None:
        strange = count(view.foreign_rows)
        free += strange
        left = config.budget - (count(view.resident) - freed - strange)
    room = _room_in_cells(free, view.tail, left)
    return that_fit(given, values, chosen.chosen & ~given.resident, room)


def _saves(view: PolicyView, out: Mask) -> tuple[Save, ...]:
    blocks = view.blocks.pick(out & ~view.in_pool)
    return tuple(Save(block.label, block.span) for block in blocks)


def _evicts(view: PolicyView, out: Mask) -> tuple[Evict, ...]:
    return tuple(Evict(block.span, block.label) for block in view.blocks.pick(out))


def _drops(view: PolicyView, recovers: bool) -> tuple[Drop, ...]:
    useless = set(view.stale)
    if not recovers:  # what the stream has saved is of no use either
        useless |= {block.label for block in view.blocks.pick(view.in_pool)}
    return tuple(Drop(label) for label in sorted(useless))


def _stream(
    view: PolicyView, config: PolicyConfig, choice: Choice, resident: Mask, loads: Mask
) -> DecodeBudget:
    """How the engine holds the budget once decoding starts; off without a budget.

    What was just recovered is protected, as far as the budget allows, so that the answer begins
    with it in place.
    """
    if config.budget is None:
        return DecodeBudget(0)
    room = config.budget - config.sink_tokens - config.recent_tokens - config.block_tokens
    protected = _protected(view, choice.values, resident, loads, room)
    return DecodeBudget(
        budget=config.budget,
        sink=config.sink_tokens,
        recent=config.recent_tokens,
        block=config.block_tokens,
        protect=merged(view.blocks[i].span for i in protected),
        order=_order(view, config, choice, resident, protected),
    )


def _protected(
    view: PolicyView, values: Scores, resident: Mask, loads: Mask, room: int
) -> list[int]:
    blocks = view.blocks
    cursor = view.adopt_to or view.n_past
    pins = np.flatnonzero(blocks.pinned & (resident | (blocks.starts >= cursor)))
    loaded = by_value(loads & ~blocks.pinned, values, blocks)
    lengths, kept = blocks.lengths, list[int]()
    for i in [*pins.tolist(), *loaded.tolist()]:
        length = int(lengths[i])
        if length <= room:
            kept.append(i)
            room -= length
    return kept


def _order(
    view: PolicyView, config: PolicyConfig, choice: Choice, resident: Mask, protected: list[int]
) -> tuple[Block, ...]:
    """Least valuable first: what was there before this turn, then the turn's own text."""
    cursor = view.adopt_to or view.n_past
    blocks = view.blocks
    free = blocks.starts >= config.sink_tokens
    free[protected] = False
    old, new = free & resident, free & (blocks.starts >= cursor)
    order = [by_value(old, -choice.values, blocks), by_value(new, -choice.tail, blocks)]
    return tuple(blocks.pick(np.concatenate(order)))


def _reason(
    view: PolicyView, config: PolicyConfig, chosen: WorkingSet, capacity: int | None
) -> str:
    if capacity is None:
        return "no budget"
    what = f"tail {view.n_tokens - (view.adopt_to or view.n_past)}, budget {config.budget}"
    if chosen.infeasible:
        return f"{chosen.tokens} tokens must stay, {max(0, capacity)} fit: {what}"
    return f"{chosen.tokens} of {capacity} tokens used: {what}"
