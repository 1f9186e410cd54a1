"""From what blocks are worth to what is moved: the part of a plan that all policies share.

A policy says what each block is worth and how a working set is chosen by that; what has to be
saved, evicted and loaded for it, and what the engine holds the budget with, follows from the view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.conversation.plan import Adopt, Drop, Evict, Load, Plan, Save, Stream
from evoke_proxy.core.conversation.policy_view import PolicyView
from evoke_proxy.core.conversation.score import Scores
from evoke_proxy.core.policies.working_set import (
    Candidates,
    WorkingSet,
    by_value,
    candidates,
    that_fit,
)
from evoke_proxy.core.prompt.block_table import Mask
from evoke_proxy.core.prompt.blocks import Block, count, merged

# A longer answer than this share of the budget is left to the stream: rows for tokens that may
# never come are worth less than blocks that are there.
_MAX_RESERVE_SHARE = 4

# Chooses what is to be resident of what could be, by these values, in room for so many tokens; None
# for those takes everything.
Select = Callable[[Candidates, Scores, int | None], WorkingSet]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What a policy makes of a view: one value a block, and how to choose by them.

    `values` decide what comes back first and what the engine evicts first, of the blocks that were
    there before the turn; `tail` does it for the turn's own. `recovers` says whether evicted blocks
    are saved and may come back.
    """

    values: Scores
    tail: Scores
    select: Select
    recovers: bool


def plan(view: PolicyView, config: PolicyConfig, choice: Choice) -> Plan:
    """The plan that makes a choice true; see `policies.decide` for what it promises."""
    given = candidates(view, config.sink_tokens, choice.recovers)
    if view.adopt_to and choice.recovers:
        return _adopting(view, config, given, choice)
    capacity = room_for(view.tail, view.max_tokens, config)
    chosen = choice.select(given, choice.values, capacity)
    out = given.resident & ~chosen.chosen
    loads = _loads(view, config, given, choice.values, chosen)
    rows = view.strange_rows if loads.any() and config.budget is not None else ()
    return Plan(
        saves=_saves(view, out) if choice.recovers else (),
        evicts=(*_evicts(view, out), *(Evict(span) for span in rows)),
        loads=tuple(Load(block.label, block.span) for block in view.blocks.pick(loads)),
        drops=_drops(view, choice.recovers),
        stream=_stream(view, config, choice, (given.resident & ~out) | loads, loads),
        infeasible=chosen.infeasible,
        reason=_reason(view, config, chosen, capacity),
    )


def _adopting(view: PolicyView, config: PolicyConfig, given: Candidates, choice: Choice) -> Plan:
    capacity = room_for(view.n_tokens - view.adopt_to, view.max_tokens, config)
    chosen = choice.select(given, choice.values, capacity)
    room = view.n_free + count(view.resident) - (view.n_tokens - view.adopt_to)
    if config.budget is not None:
        room = min(room, config.budget)
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
        stream=_stream(view, config, choice, loads, loads & ~given.settled),
        infeasible=chosen.infeasible,
        reason=_reason(view, config, chosen, capacity),
    )


def room_for(tail: int, max_tokens: int | None, config: PolicyConfig) -> int | None:
    """Tokens that are left for blocks beside a tail and its answer; None without a budget."""
    if config.budget is None:
        return None
    wanted = config.reserve_tokens if max_tokens is None else max_tokens
    return config.budget - tail - min(wanted, config.budget // _MAX_RESERVE_SHARE)


def _loads(
    view: PolicyView, config: PolicyConfig, given: Candidates, values: Scores, chosen: WorkingSet
) -> Mask:
    """The chosen blocks that are out, as far as cells and the budget have room during the plan."""
    out = given.resident & ~chosen.chosen
    freed = int(given.lengths[out].sum())
    room = view.n_free + freed - view.tail
    if config.budget is not None:
        strange = count(view.strange_rows)
        rows = count(view.resident) - freed - strange
        room = min(room + strange, config.budget - rows)
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
) -> Stream:
    """How the engine holds the budget once decoding starts; off without a budget.

    What was just recovered is protected, as far as the budget allows, so that the answer begins
    with it in place.
    """
    if config.budget is None:
        return Stream(0)
    room = config.budget - config.sink_tokens - config.recent_tokens - config.block_tokens
    protected = _protected(view, choice.values, resident, loads, room)
    return Stream(
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
