"""A model of one slot of llama-server and its host pool, with the rules that plans depend on.

Decisions are tested against it. It follows patches/API.md; real servers are tested in
tests/contract. A call either succeeds completely or raises Refused and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable, Mask
from evoke_proxy.core.model.blocks import Block, Span, merged
from evoke_proxy.core.model.plan import DecodeBudget, Plan
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.core.prompt.rendered import SlotView

BATCH = 128
CHECKPOINTS = 4


class BlockState(StrEnum):
    """Where the rows of a block are: in the cache, in the host pool, both, or nowhere."""

    RESIDENT = "resident"
    SAVED = "saved"
    RESIDENT_SAVED = "resident_saved"
    DROPPED = "dropped"

    @property
    def resident(self) -> bool:
        """Whether its rows are in the cache."""
        return self in (BlockState.RESIDENT, BlockState.RESIDENT_SAVED)

    @property
    def saved(self) -> bool:
        """Whether the host pool has a copy of its rows."""
        return self in (BlockState.SAVED, BlockState.RESIDENT_SAVED)

    @classmethod
    def of(cls, resident: bool, saved: bool) -> BlockState:
        """The state of a block with these properties."""
        if resident:
            return cls.RESIDENT_SAVED if saved else cls.RESIDENT
        return cls.SAVED if saved else cls.DROPPED


def states_of(view: PolicyView | Layout) -> tuple[BlockState, ...]:
    """The state of each block, in the order of the blocks."""
    pairs = zip(view.in_cache.tolist(), view.in_pool.tolist(), strict=True)
    return tuple(BlockState.of(*pair) for pair in pairs)


def min_budget(stream: DecodeBudget) -> int:
    """The smallest budget that llama-server accepts: what is never evicted, plus one block."""
    return stream.sink + stream.recent + sum(map(len, stream.protect)) + stream.block


def total(spans: Iterable[Span]) -> int:
    """The number of positions in the spans; a position in two of them counts once."""
    return sum(len(span) for span in merged(spans))


def _runs(rows: Sequence[int]) -> tuple[Span, ...]:
    """The fewest spans that cover rows in ascending order."""
    starts = [row for before, row in pairwise([-2, *rows]) if row != before + 1]
    ends = [row + 1 for row, after in pairwise([*rows, -2]) if after != row + 1]
    return tuple(map(Span, starts, ends))


def view_columns(
    blocks: Iterable[Block], states: Iterable[BlockState]
) -> tuple[BlockTable, Mask, Mask]:
    """The first three fields of a PolicyView: the blocks, which are cached, which are saved."""
    each = tuple(states)
    in_cache = np.array([state.resident for state in each], np.bool_)
    in_pool = np.array([state.saved for state in each], np.bool_)
    return BlockTable(blocks), in_cache, in_pool


class Refused(Exception):
    """The server refuses the call; `name` is the label that caused it, if any."""

    def __init__(self, type: str, name: str | None = None) -> None:
        super().__init__(f"{type} {name or ''}")
        self.type = type
        self.name = name


@dataclass
class SlotModel:
    """The state of a slot.

    Attributes:
        n_cells: Cells of the slot.
        tokens: The slot's tokens, resident or not.
        rows: The resident positions.
        store: The span of each copy, and the tokens up to its end.
        stream: The budget for decoding.
        loaded: Positions loaded since the latest answer.
        auto_evicted: Start, end and name of what the server evicted since the latest answer.
        peak: The most resident rows since the latest answer.
        recurrent: Whether decoding continues only from checkpoints; such a slot cannot be adopted.
        held: The rows before the checkpoints, which are not evictable.
    """

    n_cells: int
    tokens: list[int] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)
    store: dict[str, tuple[Span, tuple[int, ...]]] = field(default_factory=dict)
    stream: DecodeBudget = field(default_factory=lambda: DecodeBudget(0))
    loaded: set[int] = field(default_factory=set)
    auto_evicted: list[tuple[int, int, str]] = field(default_factory=list)
    epoch: int = 1
    peak: int = 0
    recurrent: bool = False
    held: list[int] = field(default_factory=list)

    def view(self, prompt: Sequence[int]) -> SlotView:
        shared = 0
        while shared < min(len(prompt), len(self.tokens)) and prompt[shared] == self.tokens[shared]:
            shared += 1
        resident = _runs(sorted(self.rows))
        n_free = self.n_cells - len(self.rows)
        held = tuple(Span(row, row + 1) for row in sorted(self.held))
        return SlotView(
            0, self.epoch, len(self.tokens), shared, resident, n_free, non_evictable=held
        )

    def run(self, plan: Plan, prompt: Sequence[int]) -> None:
        """Runs a plan as the server does: first the adopt, then the saves, then other ops."""
        trial = self._copy()
        if plan.adopt is not None:
            trial._adopt(list(prompt[: plan.adopt.n_tokens]), plan.adopt.labels)
        ops = plan.ops()
        for op in [op for op in ops if op["op"] == "save"]:
            trial._save(op["name"], Span(op["p0"], op["p1"]))
        for op in [op for op in ops if op["op"] != "save"]:
            trial._op(op, plan)
            trial._note_peak()
        self.__dict__.update(trial.__dict__)

    def _copy(self) -> SlotModel:
        """An equal model; a call on either does not change the other."""
        return replace(
            self,
            tokens=self.tokens.copy(),
            rows=self.rows.copy(),
            store=self.store.copy(),
            loaded=self.loaded.copy(),
            auto_evicted=self.auto_evicted.copy(),
            held=self.held.copy(),
        )

    def answer(self, prompt: Sequence[int], generated: Iterable[int]) -> dict[str, Any]:
        """Decodes a marked request and its answer; returns the timings of the reply."""
        n_past = self._reusable_prefix(prompt)
        # Rows after the common prefix are removed before anything is decoded.
        n_common = self.view(prompt).n_common
        removed = {row for row in self.rows - self.loaded if row >= n_common}
        self.peak -= len(removed)
        self.tokens = list(prompt[:n_past])
        self.rows = {row for row in self.rows if row < n_past}
        self.held = [row for row in self.held if row < n_past][-CHECKPOINTS:]
        self.loaded = {row for row in self.loaded if row < n_past}
        while len(self.tokens) < len(prompt):
            done = len(self.tokens)
            n = self._room(min(len(prompt) - done, BATCH))
            self._append(prompt[done : done + n])
            if self.recurrent:
                self.held = [*self.held, len(self.tokens) - 1][-CHECKPOINTS:]
        recovered = len(self.loaded & self.rows)
        present = len([row for row in self.rows if row < n_past])
        hidden = {p for a, b, _ in self.auto_evicted for p in range(max(a, n_past), b)}
        accounting = {
            "n_prompt": len(prompt),
            "decoded": len(prompt) - n_past,
            "decoded_hidden": len(hidden),
            "recovered": recovered,
            "resident_before": present - recovered,
            "omitted": n_past - present,
        }
        for token in generated:
            self._room(1)
            self._append([token])
        accounting |= {"n_resident": len(self.rows), "n_resident_peak": self.peak}
        accounting |= {"budget": self.stream.budget, "epoch": self.epoch}
        evicted = [list(item) for item in self.auto_evicted]
        self.auto_evicted, self.loaded, self.peak = [], set(), len(self.rows)
        return {"evoke": {**accounting, "marker": "ok", "auto_evicted": evicted}}

    def taken_by(self, tokens: Sequence[int], epoch: int) -> None:
        """Runs an unmarked request of another client on the slot."""
        self.tokens, self.rows, self.epoch = list(tokens), set(range(len(tokens))), epoch
        self.stream, self.loaded, self.auto_evicted, self.held = DecodeBudget(0), set(), [], []
        self.peak = len(self.rows)

    def _reusable_prefix(self, prompt: Sequence[int]) -> int:
        n_past = self.view(prompt).n_past(len(prompt))
        if not self.recurrent or n_past == len(self.tokens):
            return n_past
        return max((row + 1 for row in self.held if row < n_past), default=0)

    def _op(self, op: dict[str, Any], plan: Plan) -> None:
        if op["op"] == "evict":
            self._evict(Span(op["p0"], op["p1"]))
        elif op["op"] == "load":
            for name in op["names"]:
                self._load(name)
        elif op["op"] == "drop":
            for name in op["names"]:
                self.store.pop(name, None)
        elif op["op"] == "reuse":
            assert op["n_tokens"] == 0
            self.tokens, self.rows = [], set()
        else:
            assert plan.stream is not None
            if 0 < plan.stream.budget < min_budget(plan.stream):
                raise Refused("invalid_request_error")
            self.stream, self.peak = plan.stream, 0

    def _save(self, name: str, span: Span) -> None:
        if not len(span) or not set(range(span.start, span.end)) <= self.rows:
            raise Refused("invalid_request_error", name)
        self.store[name] = (span, tuple(self.tokens[: span.end]))

    def _evict(self, span: Span) -> None:
        if self.rows and max(self.rows) in span:
            raise Refused("invalid_request_error")
        evicted = set(range(span.start, span.end))
        if evicted.intersection(self.held):
            raise Refused("held_row")
        self.rows, self.loaded = self.rows - evicted, self.loaded - evicted

    def _load(self, name: str) -> None:
        span = self._copy_of(name, self.tokens)
        rows = set(range(span.start, span.end))
        if rows & self.rows:
            raise Refused("already_resident", name)
        limits = [self.n_cells, self.stream.budget or self.n_cells]
        if len(self.rows) + len(rows) > min(limits):
            raise Refused("no_free_cells", name)
        self.rows, self.loaded = self.rows | rows, self.loaded | rows

    def _copy_of(self, name: str, tokens: Sequence[int]) -> Span:
        if name not in self.store:
            raise Refused("unknown_block", name)
        span, before = self.store[name]
        if tuple(tokens[: span.end]) != before:
            raise Refused("stale_block", name)
        return span

    def _adopt(self, tokens: list[int], names: Iterable[str]) -> None:
        if self.recurrent:
            raise Refused("not_supported_error")
        spans = [self._copy_of(name, tokens) for name in names]
        if not spans or max(span.end for span in spans) != len(tokens):
            raise Refused("invalid_request_error")
        rows = {row for span in spans for row in range(span.start, span.end)}
        if len(rows) > self.n_cells or len(rows) != sum(len(span) for span in spans):
            raise Refused("no_free_cells")
        self.taken_by(tokens, self.epoch + 1)
        self.rows, self.loaded, self.peak = rows, set(rows), len(rows)

    def _append(self, tokens: Sequence[int]) -> None:
        self.rows |= set(range(len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak = max(self.peak, len(self.rows))

    def _room(self, requested: int) -> int:
        if not self.stream.budget:
            return requested
        chunk = min(requested, self.stream.block)
        for victim in self.stream.order:
            if self.stream.budget - len(self.rows) >= chunk:
                break
            if set(range(victim.span.start, victim.span.end)) <= self._evictable():
                self._auto_evict(victim.label, victim.span)
        while self.stream.budget - len(self.rows) < chunk and self._evictable():
            self._auto_evict_oldest()
        return max(1, min(requested, self.stream.budget - len(self.rows)))

    def _evictable(self) -> set[int]:
        stream = self.stream
        top = max(self.rows, default=-1) + 1
        protected = {row for span in stream.protect for row in range(span.start, span.end)}
        protected |= {*range(stream.sink), *range(top - max(1, stream.recent), top)}
        return self.rows - protected - set(self.held)

    def _auto_evict_oldest(self) -> None:
        evictable = self._evictable()
        end = start = min(evictable)
        while end in evictable and (end == start or end % self.stream.block):
            end += 1
        self._auto_evict(f"auto/{self.epoch}/{start}-{end}", Span(start, end))

    def _auto_evict(self, name: str, span: Span) -> None:
        self._save(name, span)
        self._evict(span)
        self.auto_evicted.append((span.start, span.end, name))
