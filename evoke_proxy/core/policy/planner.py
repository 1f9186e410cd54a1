"""Computes the plan for a policy's scores; all policies share it.

A policy scores the blocks and selects a working set. From the set and the view the planner derives
what to save, evict and load, and the budget that llama-server enforces while it decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import BlockTable, FloatArray, Mask, Positions
from evoke_proxy.core.model.blocks import Block, Span, clipped, count
from evoke_proxy.core.model.plan import Adopt, DecodeBudget, Drop, Evict, Load, Plan, Save
from evoke_proxy.core.policy.view import PolicyView

# At most the budget divided by this is reserved for the answer. The decode budget makes room for a
# longer answer, because tokens that may never be generated are worth less than existing blocks.
_MAX_RESERVE_DIVISOR = 4
# llama-server decodes text longer than the budget in pieces. The best earlier blocks keep this
# share of the budget's free part; otherwise a long message would be answered without any of them.
_EARLIER_SHARE = 0.5
# After whole blocks, the eviction order lists the blocks of the turn's own text in pieces of this
# many tokens, so that llama-server can evict a part of a block, for example of one that is not
# completely decoded yet. Otherwise it would evict ranges across block boundaries, whose copies
# belong to no block.
_PIECE_TOKENS = 16
# While a tail within the budget is decoded, the budget divided by this, and at least one piece,
# stays free for the part of the tail that is evicted.
_FREE_DIVISOR = 16
# Number of blocks that are tried before the ones that no longer fit are removed from the rest.
_TRIED_AT_ONCE = 64
# Number of blocks that are sorted at once.
_SORTED_AT_ONCE = 2048
# Added to the scores of required blocks, which are loaded first: more than any score.
_MUST_LOAD = 1e6


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The n blocks of a view, and which of them may be evicted or loaded.

    Attributes:
        blocks: The blocks.
        lengths: [n] tokens of each block.
        resident: [n] blocks in the slot.
        loadable: [n] blocks that can be loaded from the host pool.
        was_resident: [n] blocks that are resident, or were before a restart.
        required: [n] blocks that must not be evicted, or must be loaded.
        n_other_rows: Number of reused rows of the slot that belong to no resident block.
    """

    blocks: BlockTable
    lengths: Positions
    resident: Mask
    loadable: Mask
    was_resident: Mask
    required: Mask
    n_other_rows: int

    @property
    def optional(self) -> Mask:
        """[n] blocks that a policy may choose or leave."""
        return (self.resident | self.loadable) & ~self.required

    def n_rows(self, blocks: Mask) -> int:
        """Return how many rows the slot has when exactly these blocks are resident."""
        return int(self.lengths[blocks].sum()) + self.n_other_rows


@dataclass(frozen=True, slots=True, eq=False)
class WorkingSet:
    """The blocks that a policy selects to be resident.

    Attributes:
        chosen: [n] whether the block is in the set.
        infeasible: Whether the required blocks alone exceed the capacity.
        n_rows: Rows of the slot with this set.
    """

    chosen: Mask
    infeasible: bool
    n_rows: int


# Selects a working set by the scores of the blocks, within a capacity in tokens; None: unlimited.
Select = Callable[[Candidates, FloatArray, int | None], WorkingSet]


@dataclass(frozen=True, slots=True, eq=False)
class TailRoom:
    """Room for blocks in a turn that decodes text before its question and may evict part of it.

    Attributes:
        n_tokens: Tokens for earlier blocks and for the kept blocks of that text.
        kept: [n] blocks of that text to keep; its other blocks are evicted while it is decoded.
        n_asked: Number of tokens at the end of the prompt that ask the question; all of them stay.
    """

    n_tokens: int
    kept: Mask
    n_asked: int


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Scores and selection of a policy for one view.

    Attributes:
        scores: [n] scores that order the loading of earlier blocks, and their eviction while
            decoding.
        tail_scores: [n] scores that order the eviction of the turn's own blocks while decoding.
        select: Selects the working set by `scores`.
        keeps_earlier: Whether a share of the budget is kept for the best earlier blocks when the
            turn's own text would take all of it.
        tail_room: Set when the turn decodes text before its question and may evict part of it;
            None when the tail is not divided.
    """

    scores: FloatArray
    tail_scores: FloatArray
    select: Select
    keeps_earlier: bool = False
    tail_room: TailRoom | None = None


def make_plan(view: PolicyView, config: PolicyConfig, choice: Choice, recovers: bool) -> Plan:
    """Return the plan that realizes a choice; see `registry.decide` for its guarantees.

    `recovers` says whether evicted blocks are saved and may be loaded again.
    """
    return _Planner(view, config, choice, recovers).plan()


class _Planner:
    """Computes the plan of one choice."""

    def __init__(
        self, view: PolicyView, config: PolicyConfig, choice: Choice, recovers: bool
    ) -> None:
        self._view = view
        self._config = config
        self._choice = choice
        self._recovers = recovers
        self._candidates = candidates_of(view, config.sink_tokens, recovers)
        # Number of tokens that fit beside the tail, and number that the policy may use; None for no
        # limit.
        self._room = room_for_blocks(view.n_to_decode, view.max_tokens, config)
        self._capacity = self._room
        if choice.keeps_earlier:
            self._capacity = capacity_for_blocks(view, config)
        if self._capacity is not None and choice.tail_room is not None:
            n_kept = int(self._candidates.lengths[choice.tail_room.kept].sum())
            self._capacity = max(self._capacity, choice.tail_room.n_tokens - n_kept)
        # Whether the working set exceeds the room beside the complete tail, and whether it does so
        # because the policy's capacity is larger than that room.
        self._is_streamed = self._is_over_capacity = False

    def plan(self) -> Plan:
        """Return the plan for a slot that continues, or for one that adopts saved blocks."""
        if self._view.adopt_to and self._recovers:
            return self._adopting_plan()
        return self._continuing_plan()

    def _select(self) -> WorkingSet:
        """Return the working set, and note whether it exceeds what fits beside the tail."""
        selected = self._choice.select(self._candidates, self._choice.scores, self._capacity)
        self._is_streamed = self._room is not None and selected.n_rows > self._room
        self._is_over_capacity = self._is_streamed and self._capacity != self._room
        return selected

    @property
    def _is_infeasible(self) -> bool:
        candidates = self._candidates
        return self._room is not None and candidates.n_rows(candidates.required) > self._room

    def _continuing_plan(self) -> Plan:
        """Return the plan for a slot that keeps its content up to `n_past`."""
        view, candidates = self._view, self._candidates
        selected = self._select()
        evicted = candidates.resident & ~selected.chosen
        loaded = self._loadable_now(selected)
        needs_rows = loaded.any() and self._config.budget is not None
        foreign_rows = view.foreign_rows if needs_rows else ()
        resident = (candidates.resident & ~evicted) | loaded
        return Plan(
            saves=self._saves(evicted) if self._recovers else (),
            evicts=(
                *(Evict(block.span, block.label) for block in view.blocks.pick(evicted)),
                *(Evict(span) for span in foreign_rows),
            ),
            loads=tuple(Load(block.label, block.span) for block in view.blocks.pick(loaded)),
            drops=self._drops(),
            stream=self._stream(resident, selected.chosen if self._is_over_capacity else loaded),
            infeasible=self._is_infeasible,
            over_capacity=self._is_over_capacity,
            reason=self._reason(selected),
        )

    def _adopting_plan(self) -> Plan:
        """Return the plan for a slot whose content is replaced by saved blocks."""
        view, candidates = self._view, self._candidates
        selected = self._select()
        n_free = view.n_free + count(view.resident)
        room = _room_in_cells(n_free, view.n_to_decode, self._config.budget)
        loaded = load_order(candidates, self._choice.scores, selected.chosen, room)
        blocks = view.blocks.pick(loaded)
        if not blocks or blocks[-1].span.end != view.adopt_to:
            # The block that decoding continues from does not fit: decode the whole prompt.
            no_blocks = np.zeros(len(loaded), dtype=bool)
            self._is_streamed = True
            stream = self._stream(no_blocks, no_blocks)
            return Plan(
                stream=stream, drops=self._drops(), reason="no free cells to adopt the blocks"
            )
        labels, spans = (block.label for block in blocks), (block.span for block in blocks)
        protected = loaded if self._is_over_capacity else loaded & ~candidates.was_resident
        return Plan(
            adopt=Adopt(view.adopt_to, tuple(labels), tuple(spans)),
            drops=self._drops(),
            stream=self._stream(loaded, protected),
            infeasible=self._is_infeasible,
            over_capacity=self._is_over_capacity,
            reason=self._reason(selected),
        )

    def _loadable_now(self, selected: WorkingSet) -> Mask:
        """Return the selected blocks to load, as far as free cells and budget allow it now."""
        view, candidates = self._view, self._candidates
        n_evicted = int(candidates.lengths[candidates.resident & ~selected.chosen].sum())
        n_free, budget_left = view.n_free + n_evicted, None
        if self._config.budget is not None:
            n_foreign = count(view.foreign_rows)
            n_free += n_foreign
            budget_left = self._config.budget - (count(view.resident) - n_evicted - n_foreign)
        room = _room_in_cells(n_free, view.n_to_decode, budget_left)
        missing = selected.chosen & ~candidates.resident
        return load_order(candidates, self._choice.scores, missing, room)

    def _saves(self, evicted: Mask) -> tuple[Save, ...]:
        blocks = self._view.blocks.pick(evicted & ~self._view.in_pool)
        return tuple(Save(block.label, block.span) for block in blocks)

    def _drops(self) -> tuple[Drop, ...]:
        labels = set(self._view.stale)
        if not self._recovers:  # copies that the decode budget has saved are useless too
            labels |= {block.label for block in self._view.blocks.pick(self._view.in_pool)}
        return tuple(Drop(label) for label in sorted(labels))

    def _stream(self, resident: Mask, protected: Mask) -> DecodeBudget:
        """Return the budget that llama-server enforces while it decodes; off without a budget.

        Recovered blocks are protected as far as the budget allows, so that they are resident when
        the answer begins.
        """
        config = self._config
        if config.budget is None:
            return DecodeBudget(0)
        least_recent, least_free = config.recent_tokens, config.block_tokens
        # The piece that is being decoded cannot be evicted before it is complete.
        n_incomplete = _PIECE_TOKENS - 1 if self._is_streamed else 0
        tail_room = self._choice.tail_room
        if tail_room is not None and self._is_over_capacity:
            least_recent = min(least_recent, tail_room.n_asked)
            n_before = self._view.n_to_decode - tail_room.n_asked
            least_free = free_tokens(n_before, config.budget, config.block_tokens) - n_incomplete
            protected = protected | tail_room.kept
        # Each slot protects rows in its share of the cells only: otherwise, while other slots fill
        # theirs, llama-server would find none to evict, and refuse the request.
        share = config.budget
        if config.n_slot_cells is not None:
            share = min(share, config.n_slot_cells)
        room = share - config.sink_tokens - least_recent - least_free
        indexes = self._protected_blocks(resident, protected, room, n_incomplete)
        spans = self._view.blocks.spans_at(indexes)
        if spans:
            spans = clipped(spans, Span(config.sink_tokens, max(config.sink_tokens, spans[-1].end)))
        left = config.budget - config.sink_tokens - count(spans) - n_incomplete
        recent = max(least_recent, min(config.recent_tokens, left - config.block_tokens))
        return DecodeBudget(
            budget=config.budget,
            sink=config.sink_tokens,
            recent=recent,
            block=max(1, min(config.block_tokens, left - recent)),
            protect=spans,
            order=self._eviction_order(resident, indexes),
        )

    def _protected_blocks(
        self, resident: Mask, wanted: Mask, room: int, n_incomplete: int
    ) -> list[int]:
        """Return indexes of pinned blocks, then of the best wanted ones, that fit into `room`.

        Sink tokens are always protected, so they take no room. Only pinned blocks may use the last
        `n_incomplete` tokens of the room.
        """
        blocks = self._view.blocks
        is_new = blocks.starts >= self._view.decode_from
        pinned = (blocks.pinned & (resident | is_new)).nonzero()[0]
        others = by_score(wanted & ~blocks.pinned, self._choice.scores, blocks)
        sink = self._config.sink_tokens
        lengths = blocks.ends - np.maximum(blocks.starts, np.minimum(sink, blocks.ends))
        indexes = list[int]()
        for each, spared in ((pinned, 0), (others, n_incomplete)):
            for i, length in zip(each.tolist(), lengths[each].tolist(), strict=True):
                if length <= room - spared:
                    indexes.append(i)
                    room -= length
        return indexes

    def _eviction_order(self, resident: Mask, protected: list[int]) -> tuple[Block, ...]:
        """Return blocks that may be evicted while decoding: earlier ones, then the turn's own.

        Each part begins with the least valuable block. Pieces of the turn's own blocks come last,
        for blocks that are not complete yet.
        """
        blocks = self._view.blocks
        evictable = blocks.starts >= self._config.sink_tokens
        evictable[protected] = False
        earlier = evictable & resident
        new = evictable & (blocks.starts >= self._view.decode_from)
        own = by_score(new, -self._choice.tail_scores, blocks)
        old = by_score(earlier, -self._choice.scores, blocks)
        order = blocks.pick(np.concatenate([old, own]))
        if self._is_streamed:
            order += [piece for block in blocks.pick(own) for piece in block.pieces(_PIECE_TOKENS)]
        return tuple(order)

    def _reason(self, selected: WorkingSet) -> str:
        """Return an explanation of the plan for logs."""
        if self._capacity is None:
            return "no budget"
        limits = f"tail {self._view.n_to_decode}, budget {self._config.budget}"
        if selected.infeasible:
            fit = max(0, self._capacity)
            return f"{selected.n_rows} tokens must stay, {fit} fit: {limits}"
        return f"{selected.n_rows} of {self._capacity} tokens used: {limits}"


def room_for_blocks(n_to_decode: int, max_tokens: int | None, config: PolicyConfig) -> int | None:
    """Return the tokens left for blocks beside a tail and its answer; None without a budget."""
    if config.budget is None:
        return None
    answer = config.reserve_tokens if max_tokens is None else max_tokens
    return config.budget - n_to_decode - min(answer, config.budget // _MAX_RESERVE_DIVISOR)


def room_for_quotes(view: PolicyView, config: PolicyConfig, share: float) -> int:
    """Return how many tokens quotations may take beside what must stay in the cache.

    With a budget that is at most this share of it.
    """
    room = room_for_blocks(view.n_to_decode, view.max_tokens, config)
    if room is None or config.budget is None:
        return view.n_free - view.n_to_decode
    candidates = candidates_of(view, config.sink_tokens, recovers=False)
    n_required = candidates.n_rows(candidates.required)
    return min(room - n_required, int(share * config.budget))


def budget_for(n_tokens: int, max_tokens: int | None, config: PolicyConfig) -> int:
    """Return the least budget with room for `n_tokens` beside the reserve for the answer."""
    answer = config.reserve_tokens if max_tokens is None else max_tokens
    # The reserve is at most a quarter of the budget.
    share = -(-n_tokens * _MAX_RESERVE_DIVISOR // (_MAX_RESERVE_DIVISOR - 1))
    return min(n_tokens + answer, share)


def capacity_for_blocks(view: PolicyView, config: PolicyConfig) -> int | None:
    """Return the tokens for blocks when the best earlier ones keep a share; None without a budget.

    This exceeds the room beside a tail that would take most of the budget.
    """
    room = room_for_blocks(view.n_to_decode, view.max_tokens, config)
    if room is None or config.budget is None:
        return None
    return max(room, int((config.budget - config.least_budget) * _EARLIER_SHARE))


def free_tokens(n_tail: int, budget: int, block_tokens: int) -> int:
    """Return how many tokens stay free while a tail is decoded and partly evicted.

    A tail within the budget is evicted in pieces of blocks, which needs little room. A longer tail
    is a whole conversation: its blocks are evicted as a whole, so that later turns can rank and
    recover them, and this needs room for two blocks.
    """
    most = 2 * block_tokens + _PIECE_TOKENS
    return most if n_tail > budget else min(most, max(_PIECE_TOKENS, budget // _FREE_DIVISOR))


def _room_in_cells(n_free: int, n_to_decode: int, budget_left: int | None) -> int:
    """Return how many rows may be loaded into free cells before the tail is decoded.

    When the free cells suffice for the remaining budget, llama-server makes room for the tail
    itself. Otherwise, or without a budget, the cells for the tail stay free.
    """
    if budget_left is None:
        return n_free - n_to_decode
    return budget_left if n_free >= budget_left else min(budget_left, n_free - n_to_decode)


def candidates_of(view: PolicyView, sink_tokens: int, recovers: bool) -> Candidates:
    """Return the blocks of a view, and which of them are resident, loadable or required.

    A block is loadable when evicted blocks are saved (`recovers`), it has a copy, and it ends at or
    before the first position to decode. No block is resident in a slot that adopts blocks.
    """
    adopts = view.adopt_to > 0
    blocks, start = view.blocks, view.decode_from
    ends, lengths = blocks.ends, blocks.lengths
    resident = view.in_cache & (not adopts)
    loadable = view.in_pool & (ends <= start) & ~resident & recovers
    was_resident = loadable & blocks.within(view.pre_restart_resident) if adopts else resident
    must_stay = required_blocks(view, sink_tokens)
    n_other_rows = 0 if adopts else count(view.reused_rows) - int(lengths[resident].sum())
    return Candidates(
        blocks=blocks,
        lengths=lengths,
        resident=resident,
        loadable=loadable,
        was_resident=was_resident,
        required=must_stay & (resident | loadable),
        n_other_rows=n_other_rows,
    )


def required_blocks(view: PolicyView, sink_tokens: int) -> Mask:
    """Return the blocks [n] that stay if they have rows.

    These are pinned blocks, sinks, the block that decoding continues from, and blocks that
    llama-server does not evict.
    """
    blocks, start = view.blocks, view.decode_from
    continued = (blocks.starts < start) & (start <= blocks.ends)
    return (
        blocks.pinned
        | (blocks.starts < sink_tokens)
        | continued
        | blocks.within(view.non_evictable)
    )


def fill_capacity(
    candidates: Candidates, capacity: int | None, fill: Callable[[int], Mask]
) -> WorkingSet:
    """Return the required blocks and those that `fill` takes for the remaining room, in tokens.

    A capacity of None takes everything. The set is infeasible when the required blocks do not fit.
    """
    if capacity is None:
        chosen = candidates.resident | candidates.loadable
        return WorkingSet(chosen, False, candidates.n_rows(chosen))
    room = capacity - candidates.n_rows(candidates.required)
    chosen = candidates.required | fill(room) if room >= 0 else candidates.required
    return WorkingSet(chosen, room < 0, candidates.n_rows(chosen))


def best_fit(wanted: Mask, scores: FloatArray, blocks: BlockTable, room: int) -> Mask:
    """Return the wanted blocks [n] that fit into `room`, taken greedily, the best score first.

    This is `first_fit` in the order of `by_score`, but sorts only as many blocks as needed.
    """
    lengths, taken = blocks.lengths, np.zeros(len(blocks), np.bool_)
    remaining = (wanted & (lengths <= room)).nonzero()[0]
    while len(remaining):
        batch, rest = remaining, remaining[:0]
        if len(remaining) > _SORTED_AT_ONCE:
            values = scores[remaining]
            rank = len(remaining) - _SORTED_AT_ONCE
            in_batch = values >= np.partition(values, rank)[-_SORTED_AT_ONCE]
            batch, rest = remaining[in_batch], remaining[~in_batch]
        found = _fitting(_best_first(batch, scores, blocks), lengths, room)
        taken[found] = True
        room -= int(lengths[found].sum())
        remaining = rest[lengths[rest] <= room]
    return taken


def load_order(candidates: Candidates, scores: FloatArray, wanted: Mask, room: int) -> Mask:
    """Return the wanted blocks [n] that fit into `room`: required ones, then the best scores."""
    priority = scores + np.where(candidates.required, _MUST_LOAD, 0.0)
    order = by_score(wanted, priority, candidates.blocks)
    return first_fit(order, candidates.lengths, room)


def by_score(wanted: Mask, scores: FloatArray, blocks: BlockTable) -> Positions:
    """Return the indexes of the wanted blocks, highest score first; equal ones by display name."""
    return _best_first(wanted.nonzero()[0], scores, blocks)


def _best_first(indexes: Positions, scores: FloatArray, blocks: BlockTable) -> Positions:
    """Return ascending indexes, highest score first; equal ones by display name."""
    order = indexes[(-scores[indexes]).argsort(kind="stable")]
    ranked = scores[order]
    equal = (ranked[1:] == ranked[:-1]).nonzero()[0]
    if len(equal):
        starts = np.ones(len(equal), np.bool_)
        starts[1:] = equal[1:] > equal[:-1] + 1
        for first in equal[starts].tolist():
            end = first + int((ranked[first:] == ranked[first]).sum())
            order[first:end] = sorted(
                order[first:end].tolist(), key=lambda i: blocks[i].display_name
            )
    return order


def first_fit(order: Positions, lengths: Positions, room: int) -> Mask:
    """Return a mask of the indexes that fit into `room`, taken greedily in this order."""
    taken = np.zeros(len(lengths), np.bool_)
    taken[_fitting(order, lengths, room)] = True
    return taken


def _fitting(order: Positions, lengths: Positions, room: int) -> list[int]:
    """Return the indexes that fit into `room`, taken greedily in this order."""
    # All of them up to the first that does not fit are taken at once.
    ends = lengths[order].cumsum()
    n = int(ends.searchsorted(room, "right"))
    taken: list[int] = order[:n].tolist()
    remaining = order[n:]
    if n:
        room -= int(ends[n - 1])
    while len(remaining):
        remaining = remaining[lengths[remaining] <= room]
        batch = remaining[:_TRIED_AT_ONCE]
        for i, length in zip(batch.tolist(), lengths[batch].tolist(), strict=True):
            if length <= room:
                taken.append(i)
                room -= length
        remaining = remaining[_TRIED_AT_ONCE:]
    return taken
