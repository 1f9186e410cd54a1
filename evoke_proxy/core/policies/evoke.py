"""The policy the project is named after: one working set per question, moved as little as needed.

Every block that has rows, in the cache or in the host pool, competes for the budget with what it is
worth anyway and what it has to do with the question. Winners that are out come in, losers that are
in go out, saved first. With `recovers` off it is the control arm: losers are gone.
"""

from __future__ import annotations

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.block_table import Mask
from evoke_proxy.core.blocks import count, merged
from evoke_proxy.core.plan import Adopt, Drop, Evict, Load, Plan, Save, Stream, Victim
from evoke_proxy.core.policies.working_set import (
    Candidates,
    WorkingSet,
    by_value,
    candidates,
    choose,
    that_fit,
)
from evoke_proxy.core.policy_view import PolicyView
from evoke_proxy.core.score import Scores, keep_scores

_RELEVANCE = 2.0
# A longer answer than this share of the budget is left to the stream: rows for tokens that may
# never come are worth less than blocks that are there.
_MAX_RESERVE_SHARE = 4
# What a long turn is about stands at its beginning or at its end; so much of both is looked up,
# and so much to rank the turn's own text, of which all of it would be a part.
_QUERY_CHARS = 2048
_FOCUS_CHARS = 300


def decide(view: PolicyView, query: str, config: PolicyConfig, recovers: bool) -> Plan:
    """See `policies.decide`; `recovers` says whether evicted blocks are saved and may come back."""
    values = _values(view, query, config)
    given = candidates(view, config.sink_tokens, recovers)
    if view.adopt_to and recovers:
        return _adopting(view, config, given, values)
    capacity = _capacity(view.tail, view.max_tokens, config)
    chosen = choose(given, values, capacity, config.margin)
    out = given.resident & ~chosen.chosen
    loads = _loads(view, config, given, values, chosen)
    rows = view.strange_rows if loads.any() and config.budget is not None else ()
    return Plan(
        saves=_saves(view, out) if recovers else (),
        evicts=(*_evicts(view, out), *(Evict(span) for span in rows)),
        loads=tuple(Load(block.label, block.span) for block in view.blocks.pick(loads)),
        drops=_drops(view, recovers),
        stream=_stream(view, config, values, (given.resident & ~out) | loads, loads, query),
        infeasible=chosen.infeasible,
        reason=_reason(view, config, chosen, capacity),
    )


def _adopting(view: PolicyView, config: PolicyConfig, given: Candidates, values: Scores) -> Plan:
    capacity = _capacity(view.n_tokens - view.adopt_to, view.max_tokens, config)
    chosen = choose(given, values, capacity, config.margin)
    room = view.n_free + count(view.resident) - (view.n_tokens - view.adopt_to)
    if config.budget is not None:
        room = min(room, config.budget)
    loads = that_fit(given, values, chosen.chosen, room)
    blocks = view.blocks.pick(loads)
    if not blocks or blocks[-1].span.end != view.adopt_to:
        # Without the block decoding goes on from there is nothing to adopt: decode it all.
        nothing = np.zeros(len(loads), dtype=bool)
        stream = _stream(view, config, values, nothing, nothing, "")
        return Plan(stream=stream, drops=_drops(view, True), reason="no cells to come back to")
    spans = tuple(block.span for block in blocks)
    return Plan(
        adopt=Adopt(view.adopt_to, tuple(block.label for block in blocks), spans),
        drops=_drops(view, True),
        stream=_stream(view, config, values, loads, loads, ""),
        infeasible=chosen.infeasible,
        reason=_reason(view, config, chosen, capacity),
    )


def _values(view: PolicyView, query: str, config: PolicyConfig) -> Scores:
    keep = keep_scores(view, config.sink_tokens)
    asked = _ends(query, _QUERY_CHARS)
    values = keep + _RELEVANCE * view.index.relevance(asked, view.blocks)
    rounded: Scores = values.round(9)  # sums in another order must not make another plan
    return rounded


def _capacity(tail: int, max_tokens: int | None, config: PolicyConfig) -> int | None:
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
    view: PolicyView,
    config: PolicyConfig,
    values: Scores,
    resident: Mask,
    loads: Mask,
    query: str,
) -> Stream:
    """How the engine holds the budget once decoding starts; off without a budget.

    What was just recovered is protected, as far as the budget allows, so that the answer begins
    with it in place.
    """
    if config.budget is None:
        return Stream(0)
    room = config.budget - config.sink_tokens - config.recent_tokens - config.block_tokens
    protected = _protected(view, values, resident, loads, room)
    return Stream(
        budget=config.budget,
        sink=config.sink_tokens,
        recent=config.recent_tokens,
        block=config.block_tokens,
        protect=merged(view.blocks[i].span for i in protected),
        order=_order(view, config, values, resident, protected, query),
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
    view: PolicyView,
    config: PolicyConfig,
    values: Scores,
    resident: Mask,
    protected: list[int],
    query: str,
) -> tuple[Victim, ...]:
    """Least valuable first: what was there before this turn, then the turn's own text."""
    cursor = view.adopt_to or view.n_past
    blocks = view.blocks
    free = blocks.starts >= config.sink_tokens
    free[protected] = False
    old, new = free & resident, free & (blocks.starts >= cursor)
    worth = values
    if new.any() and len(query) > 2 * _FOCUS_CHARS:
        worth = _values(view, _ends(query, _FOCUS_CHARS), config)
    order = np.concatenate([by_value(old, -values, blocks), by_value(new, -worth, blocks)])
    return tuple([Victim(block.label, block.span) for block in blocks.pick(order)])


def _ends(text: str, chars: int) -> str:
    return text if len(text) <= 2 * chars else f"{text[:chars]}\n{text[-chars:]}"


def _reason(
    view: PolicyView, config: PolicyConfig, chosen: WorkingSet, capacity: int | None
) -> str:
    if capacity is None:
        return "no budget"
    what = f"tail {view.n_tokens - (view.adopt_to or view.n_past)}, budget {config.budget}"
    if chosen.infeasible:
        return f"{chosen.tokens} tokens must stay, {max(0, capacity)} fit: {what}"
    return f"{chosen.tokens} of {capacity} tokens used: {what}"
