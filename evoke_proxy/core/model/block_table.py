"""The blocks of a prompt, with what is asked of all of them at once as arrays.

A conversation has many more blocks than a turn changes: a table is made from the one before by
taking its beginning and adding what is new, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.model.append_only import Grown
from evoke_proxy.core.model.blocks import Block, Role, Span

Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

ROLES = tuple(Role)
# So many labels are compared at once.
_STRIDE = 512
_CODE = {role: code for code, role in enumerate(ROLES)}


class _Run:
    """Blocks that tables begin with: only ever added to. `at` is where each label is."""

    __slots__ = ("at", "blocks", "labels")

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks: list[Block] = []
        self.labels: list[str] = []
        self.at: dict[str, int] = {}
        self.add(blocks)

    def add(self, blocks: Iterable[Block]) -> None:
        first = len(self.blocks)
        self.blocks += blocks
        self.labels += [block.label for block in self.blocks[first:]]
        self.at.update(zip(self.labels[first:], range(first, len(self.blocks)), strict=True))


class BlockTable(Sequence[Block]):
    """Blocks in ascending order that do not overlap; immutable, and so are its arrays.

    Each array has one value a block: `starts` and `ends` positions, `messages` and `turns` numbers,
    `roles` indexes into ROLES. `copied` says which blocks have a copy in the host pool; in a new
    table none has. Slices and sums are tables again; what is added to one that nobody has gone on
    from otherwise is put behind it in the same memory.
    """

    __slots__ = ("_columns", "_count", "_run", "copied")

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._run = _Run(blocks)
        given, self._count = self._run.blocks, len(self._run.blocks)
        values = (
            (np.int64, [block.span.start for block in given]),
            (np.int64, [block.span.end for block in given]),
            (np.int64, [block.message for block in given]),
            (np.int64, [block.turn for block in given]),
            (np.int64, [_CODE[block.role] for block in given]),
            (np.bool_, [block.pinned for block in given]),
            (np.bool_, [block.preferred for block in given]),
            (np.float64, [block.priority for block in given]),
        )
        self._columns = tuple([Grown.of(np.array(column, kind)) for kind, column in values])
        self.copied: Mask = np.zeros(len(given), np.bool_)

    def _column(self, number: int) -> npt.NDArray[Any]:
        return self._columns[number].rows[: self._count]

    @property
    def starts(self) -> Positions:
        """Where each block begins."""
        return self._column(0)

    @property
    def ends(self) -> Positions:
        """Where each block ends."""
        return self._column(1)

    @property
    def messages(self) -> Positions:
        """Which message each block is of."""
        return self._column(2)

    @property
    def turns(self) -> Positions:
        """The turn that has cut each block."""
        return self._column(3)

    @property
    def roles(self) -> Positions:
        """Who each block is from, as an index into ROLES."""
        return self._column(4)

    @property
    def pinned(self) -> Mask:
        """Which blocks are pinned."""
        return self._column(5)

    @property
    def preferred(self) -> Mask:
        """Which blocks are preferred."""
        return self._column(6)

    @property
    def priority(self) -> FloatArray:
        """The priority of each block."""
        return self._column(7)

    @property
    def labels(self) -> Sequence[str]:
        """The name of each block; a copy, of many blocks better not in every turn."""
        return self._run.labels[: self._count]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Block]:
        return islice(self._run.blocks, self._count)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockTable) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, at: int) -> Block: ...
    @overload
    def __getitem__(self, at: slice) -> BlockTable: ...
    def __getitem__(self, at: int | slice) -> Block | BlockTable:
        if not isinstance(at, slice):
            return self._run.blocks[range(self._count)[at]]
        start, stop, step = at.indices(self._count)
        if start or step != 1:
            return BlockTable(self._run.blocks[start:stop:step]).with_copies(self.copied[at])
        part = self.with_copies(self.copied[at])
        part._count = len(part.copied)
        return part

    def __add__(self, more: BlockTable) -> BlockTable:
        if not more or not self:
            return self if self else more
        count, added, run = self._count, list(more), self._run
        both = BlockTable.__new__(BlockTable)
        if run.blocks[count : count + len(added)] != added:
            if len(run.blocks) > count:
                run = _Run(run.blocks[:count])
            run.add(added)
        both._run, both._count = run, count + len(added)
        columns = enumerate(self._columns)
        both._columns = tuple([own.followed(count, more._column(i)) for i, own in columns])
        both.copied = np.concatenate([self.copied, more.copied])
        return both

    def same_blocks(self, other: BlockTable) -> bool:
        """Whether another table is known to have the very same blocks."""
        return self._run is other._run and self._count == other._count

    def with_copies(self, copied: Mask) -> BlockTable:
        """The same blocks, these of them with a copy."""
        other = BlockTable.__new__(BlockTable)
        other._run, other._count, other._columns = self._run, self._count, self._columns
        other.copied = copied
        return other

    def named(self, labels: Mapping[int, str]) -> BlockTable:
        """The same with other labels for the blocks of these indexes."""
        blocks = list(self)
        for i, label in labels.items():
            blocks[i] = replace(blocks[i], label=label)
        changed = self.with_copies(self.copied)
        changed._run = _Run(blocks)
        return changed

    @property
    def lengths(self) -> Positions:
        """How many tokens each block has."""
        return self.ends - self.starts

    def pick(self, wanted: Mask | Positions) -> list[Block]:
        """The blocks of a mask, or those of these indexes in their order."""
        at = np.flatnonzero(wanted) if wanted.dtype == np.bool_ else wanted
        blocks = self._run.blocks
        return [blocks[i] for i in at.tolist()]

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
        having, count, at = np.zeros(len(self), np.bool_), len(self), self._run.at
        having[[i for label in labels if (i := at.get(label, count)) < count]] = True
        return having

    def has(self, label: str) -> bool:
        """Whether a block has this label."""
        return self._run.at.get(label, len(self)) < len(self)

    def index_of(self, label: str) -> int | None:
        """The index of the block of this label; None when there is none."""
        at = self._run.at.get(label, len(self))
        return at if at < len(self) else None

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
        return at if at < len(self) and self._run.blocks[at].span == span else None

    def adjacent(self) -> Positions:
        """Indexes of blocks that touch the next one and are of one message with it."""
        touch = self.ends[:-1] == self.starts[1:]
        return np.flatnonzero(touch & (self.messages[:-1] == self.messages[1:]))


def shared_labels(one: BlockTable, other: BlockTable) -> int:
    """How many labels two tables begin with alike: nearly always the very same objects."""
    count = min(len(one), len(other))
    if one._run is other._run:
        return count
    at, ours, theirs = 0, one._run.labels, other._run.labels
    while at < count and ours[at : at + _STRIDE] == theirs[at : at + _STRIDE]:
        at += _STRIDE
    pairs = zip(ours[at : at + _STRIDE], theirs[at : at + _STRIDE], strict=False)
    return min(count, at + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))


def blocks_named(blocks: BlockTable, names: Collection[str | int]) -> Mask:
    """Which blocks these names mean.

    A name is a block's display name (`file:config.py#2`), its part before the number
    (`file:config.py`, `user:7`, or the `evoke_name` that the client gave), or one of its aliases:
    a path, file name, tool call or message name. A number is the index of a message.
    """
    if not names:
        return np.zeros(len(blocks), np.bool_)
    wanted = frozenset(names)
    matches = (not wanted.isdisjoint(_names_of(block)) for block in blocks)
    return np.fromiter(matches, np.bool_, len(blocks))


def unknown_names(blocks: BlockTable, names: Collection[str]) -> list[str]:
    """The names that mean no block, in their order."""
    existing = {name for block in blocks for name in _names_of(block)} if names else set()
    return [name for name in names if name not in existing]


def _names_of(block: Block) -> set[str | int]:
    base, _, number = block.display_name.rpartition("#")
    before_split = f"{base}#{number.partition('.')[0]}"
    return {block.message, block.display_name, before_split, base, *block.aliases}
