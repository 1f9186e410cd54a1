"""The blocks of a prompt, with what is asked of all of them at once as arrays.

A conversation has many more blocks than a turn changes: a table is made from the one before by
taking its beginning and adding what is new, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.blocks import Block, Role, Span

Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]

ROLES = tuple(Role)
# So many labels are compared at once.
_STRIDE = 512
_CODE = {role: code for code, role in enumerate(ROLES)}


class BlockTable(Sequence[Block]):
    """Blocks in ascending order that do not overlap; immutable, and so are its arrays.

    Each array has one value a block: `starts` and `ends` positions, `messages` and `turns` numbers,
    `roles` indexes into ROLES. `copied` says which blocks have a copy in the host pool; in a new
    table none has. Slices and sums are tables again.
    """

    __slots__ = (
        *("_blocks", "labels", "starts", "ends", "messages", "turns", "roles"),
        *("pinned", "preferred", "priority", "copied"),
    )

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._blocks = tuple(blocks)
        given = self._blocks
        self.labels = tuple([block.label for block in given])
        self.starts: Positions = np.array([block.span.start for block in given], np.int64)
        self.ends: Positions = np.array([block.span.end for block in given], np.int64)
        self.messages: Positions = np.array([block.message for block in given], np.int64)
        self.turns: Positions = np.array([block.turn for block in given], np.int64)
        self.roles: Positions = np.array([_CODE[block.role] for block in given], np.int64)
        self.pinned: Mask = np.array([block.pinned for block in given], np.bool_)
        self.preferred: Mask = np.array([block.preferred for block in given], np.bool_)
        self.priority: Numbers = np.array([block.priority for block in given], np.float64)
        self.copied: Mask = np.zeros(len(given), np.bool_)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockTable) and self._blocks == other._blocks

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, at: int) -> Block: ...
    @overload
    def __getitem__(self, at: slice) -> BlockTable: ...
    def __getitem__(self, at: int | slice) -> Block | BlockTable:
        if not isinstance(at, slice):
            return self._blocks[at]
        part = BlockTable.__new__(BlockTable)
        for name in BlockTable.__slots__:
            setattr(part, name, getattr(self, name)[at])
        return part

    def __add__(self, more: BlockTable) -> BlockTable:
        if not more or not self:
            return self if self else more
        both = BlockTable.__new__(BlockTable)
        both._blocks = self._blocks + more._blocks
        both.labels = self.labels + more.labels
        for name in BlockTable.__slots__[2:]:
            setattr(both, name, np.concatenate([getattr(self, name), getattr(more, name)]))
        return both

    def with_copies(self, copied: Mask) -> BlockTable:
        """The same blocks, these of them with a copy."""
        return self._changed(copied=copied)

    def named(self, labels: Mapping[int, str]) -> BlockTable:
        """The same with other labels for the blocks of these indexes."""
        blocks = list(self._blocks)
        for i, label in labels.items():
            blocks[i] = replace(blocks[i], label=label)
        changed = self._changed(_blocks=tuple(blocks))
        changed.labels = tuple([block.label for block in blocks])
        return changed

    def _changed(self, **columns: Any) -> BlockTable:
        other = BlockTable.__new__(BlockTable)
        for name in BlockTable.__slots__:
            setattr(other, name, columns.get(name, getattr(self, name)))
        return other

    @property
    def lengths(self) -> Positions:
        """How many tokens each block has."""
        return self.ends - self.starts

    def pick(self, wanted: Mask | Positions) -> list[Block]:
        """The blocks of a mask, or those of these indexes in their order."""
        at = np.flatnonzero(wanted) if wanted.dtype == np.bool_ else wanted
        return [self._blocks[i] for i in at.tolist()]

    def within(self, spans: Sequence[Span]) -> Mask:
        """Which blocks lie wholly in these ascending, disjoint spans."""
        inside = np.zeros(len(self), np.bool_)
        firsts = self.starts.searchsorted([span.start for span in spans], "left")
        ends = self.ends.searchsorted([span.end for span in spans], "right")
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            inside[first:end] = True
        return inside

    def labelled(self, labels: frozenset[str]) -> Mask:
        """Which blocks have one of these labels."""
        if not labels:
            return np.zeros(len(self), np.bool_)
        return np.fromiter(map(labels.__contains__, self.labels), np.bool_, len(self))

    def crossing(self, edges: Iterable[int]) -> list[int]:
        """Indexes, ascending, of the blocks that one of these positions would split."""
        at = np.array(sorted(edges), np.int64)
        if not len(self) or not len(at):
            return []
        covering = self.starts.searchsorted(at, "left") - 1
        split = (covering >= 0) & (at < self.ends[covering])
        return sorted(set(covering[split].tolist()))

    def find(self, span: Span) -> int | None:
        """The index of the block of exactly this span; None when there is none."""
        at = int(self.starts.searchsorted(span.start))
        return at if at < len(self) and self._blocks[at].span == span else None

    def adjacent(self) -> Positions:
        """Indexes of blocks that touch the next one and are of one message with it."""
        touch = self.ends[:-1] == self.starts[1:]
        return np.flatnonzero(touch & (self.messages[:-1] == self.messages[1:]))


def shared_labels(one: BlockTable, other: BlockTable) -> int:
    """How many labels two tables begin with alike: nearly always the very same objects."""
    ours, theirs = one.labels, other.labels
    if theirs[: len(ours)] == ours:
        return len(ours)
    at, count = 0, min(len(ours), len(theirs))
    while at < count and ours[at : at + _STRIDE] == theirs[at : at + _STRIDE]:
        at += _STRIDE
    pairs = zip(ours[at : at + _STRIDE], theirs[at : at + _STRIDE], strict=False)
    return min(count, at + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
