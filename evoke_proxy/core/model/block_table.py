"""The blocks of a prompt as a sequence, with one numpy array for each attribute."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.model.blocks import Block, Role, Span

Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

ROLES = tuple(Role)
_CODE = {role: code for code, role in enumerate(ROLES)}
_USER, _TOOL = _CODE[Role.USER], _CODE[Role.TOOL]
# Number of labels compared at once. Most slices are equal, and equal slices compare fast.
_STRIDE = 512
# More labels than this, added one after the other, are copied into a new dictionary.
_MAX_LATER = 256


class _LabelIndex(NamedTuple):
    """The index of each label of a table.

    Tables that continue one another share `first`, which never changes; copying it in every turn
    would take longer than everything else that adds blocks. The labels added since are in `later`.
    """

    first: dict[str, int]
    later: dict[str, int]

    @classmethod
    def of(cls, labels: Sequence[str]) -> _LabelIndex:
        return cls(dict(zip(labels, range(len(labels)), strict=True)), {})

    def get(self, label: str) -> int | None:
        found = self.first.get(label)
        return self.later.get(label) if found is None else found

    def followed_by(self, labels: Sequence[str], start: int) -> _LabelIndex:
        later = self.later | dict(zip(labels, range(start, start + len(labels)), strict=True))
        if len(later) > _MAX_LATER:
            return _LabelIndex(self.first | later, {})
        return _LabelIndex(self.first, later)


class _Columns(NamedTuple):
    """One value per block; see `BlockTable`."""

    starts: Positions
    ends: Positions
    messages: Positions
    turns: Positions
    roles: Positions
    pinned: Mask
    preferred: Mask
    priority: FloatArray
    reminders: Mask
    added: Mask
    results: Mask

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> _Columns:
        return cls(
            starts=np.array([block.span.start for block in blocks], np.int64),
            ends=np.array([block.span.end for block in blocks], np.int64),
            messages=np.array([block.message for block in blocks], np.int64),
            turns=np.array([block.turn for block in blocks], np.int64),
            roles=np.array([_CODE[block.role] for block in blocks], np.int64),
            pinned=np.array([block.pinned for block in blocks], np.bool_),
            preferred=np.array([block.preferred for block in blocks], np.bool_),
            priority=np.array([block.priority for block in blocks], np.float64),
            reminders=np.array([block.is_reminder for block in blocks], np.bool_),
            added=np.array([block.is_added or block.is_reminder for block in blocks], np.bool_),
            results=np.array([block.is_result for block in blocks], np.bool_),
        )

    def sliced(self, part: slice) -> _Columns:
        columns: list[Any] = [column[part] for column in self]
        return _Columns(*columns)

    def followed_by(self, more: _Columns) -> _Columns:
        columns: list[Any] = [np.concatenate(pair) for pair in zip(self, more, strict=True)]
        return _Columns(*columns)


class BlockTable(Sequence[Block]):
    """Blocks in ascending order that do not overlap.

    A table is immutable. Slices, sums and tables with other copies or labels are new tables that
    share the unchanged parts. Callers must not write to the arrays.

    Attributes:
        starts, ends: token positions of each block [n].
        messages: index of the message that each block belongs to [n].
        turns: turn that created each block [n].
        roles: role of each block as an index into ROLES [n].
        pinned, preferred: the client's marks [n].
        priority: factor of each block's keep-score [n].
        reminders: which blocks are reminders that a client has added to a message [n].
        copied: whether the host pool has a copy of each block [n]; false in a new table.
    """

    __slots__ = (
        *("_blocks", "_columns", "_indexes", "_labels", "_lengths", "_prefix", "_question"),
        "copied",
    )

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        own = tuple(blocks)
        labels = tuple([block.label for block in own])
        self._set(own, labels, _Columns.of(own), np.zeros(len(own), np.bool_))

    @classmethod
    def _from_parts(
        cls, blocks: tuple[Block, ...], labels: tuple[str, ...], columns: _Columns, copied: Mask
    ) -> BlockTable:
        table = cls.__new__(cls)
        table._set(blocks, labels, columns, copied)
        return table

    def _set(
        self, blocks: tuple[Block, ...], labels: tuple[str, ...], columns: _Columns, copied: Mask
    ) -> None:
        self._blocks, self._labels, self._columns, self.copied = blocks, labels, columns, copied
        self._indexes: _LabelIndex | None = None
        self._lengths: Positions | None = None
        self._question: int | None = None
        # The blocks that this table was extended from, if it was.
        self._prefix: tuple[Block, ...] | None = None

    @property
    def starts(self) -> Positions:
        """First token position of each block [n]."""
        return self._columns.starts

    @property
    def ends(self) -> Positions:
        """Token position after the last token of each block [n]."""
        return self._columns.ends

    @property
    def messages(self) -> Positions:
        """Index of each block's message [n]."""
        return self._columns.messages

    @property
    def turns(self) -> Positions:
        """Turn that created each block [n]."""
        return self._columns.turns

    @property
    def roles(self) -> Positions:
        """Role of each block as an index into ROLES [n]."""
        return self._columns.roles

    @property
    def pinned(self) -> Mask:
        """Which blocks must stay resident [n]."""
        return self._columns.pinned

    @property
    def preferred(self) -> Mask:
        """Which blocks the client marked "prefer" [n]."""
        return self._columns.preferred

    @property
    def priority(self) -> FloatArray:
        """Priority of each block [n]."""
        return self._columns.priority

    @property
    def reminders(self) -> Mask:
        """Which blocks are reminders that a client has added to a message [n]."""
        return self._columns.reminders

    @property
    def results(self) -> Mask:
        """Which blocks are of results of tools, also of those with the role of the user [n]."""
        results: Mask = (self.roles == _TOOL) | self._columns.results
        return results

    @property
    def authors(self) -> Positions:
        """Who has written each block, as an index into ROLES [n].

        It is the role, but a tool for results that a client sends as messages of the user, and for
        messages of the user that have nothing but what a client has added, directly after a result
        of a tool or another message of the user. Coding agents send what has changed in a file as
        such a message.
        """
        roles = np.where(self._columns.results, _TOOL, self.roles)
        is_user, added = roles == _USER, self._columns.added
        if not (is_user & added).any():
            return roles
        said = np.unique(self.messages[is_user & ~added])
        unsaid = is_user & ~np.isin(self.messages, said)
        follows = np.zeros(len(self), np.bool_)
        follows[1:] = (self.roles[:-1] == _TOOL) | (self.roles[:-1] == _USER)
        firsts = self.messages.searchsorted(self.messages)
        authors: Positions = np.where(unsaid & follows[firsts], _TOOL, roles)
        return authors

    @property
    def of_user(self) -> Mask:
        """Which blocks are of messages that the user has written, without reminders [n].

        Files that a client has added to such a message belong to it.
        """
        of_user: Mask = (self.authors == _USER) & ~self.reminders
        return of_user

    @property
    def begins_part(self) -> Mask:
        """Which blocks begin a message, or a part of one: a reminder, or the text beside it [n]."""
        begins = np.ones(len(self), np.bool_)
        messages, reminders = self.messages, self.reminders
        begins[1:] = (messages[1:] != messages[:-1]) | (reminders[1:] != reminders[:-1])
        return begins

    @property
    def labels(self) -> Sequence[str]:
        """Label of each block."""
        return self._labels

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
        blocks = self._blocks[at]
        if len(blocks) == len(self) and at.step in (None, 1):
            return self
        columns, copied = self._columns.sliced(at), self.copied[at]
        return self._from_parts(blocks, self._labels[at], columns, copied)

    def __add__(self, more: BlockTable) -> BlockTable:
        if not more or not self:
            return self if self else more
        table = self._from_parts(
            self._blocks + more._blocks,
            self._labels + more._labels,
            self._columns.followed_by(more._columns),
            np.concatenate([self.copied, more.copied]),
        )
        if self._indexes is not None:
            table._indexes = self._indexes.followed_by(more._labels, len(self))
        table._prefix = self._blocks
        return table

    def same_blocks(self, other: BlockTable) -> bool:
        """Whether both tables share the same blocks in memory; if not, they may still be equal."""
        return self._blocks is other._blocks

    def equals(self, other: BlockTable) -> bool:
        """Whether both tables have equal blocks, and copies of the same ones."""
        return self == other and bool(np.array_equal(self.copied, other.copied))

    def with_copies(self, copied: Mask) -> BlockTable:
        """Replace the mask `copied` [n] of blocks that have a copy in the host pool."""
        table = self._from_parts(self._blocks, self._labels, self._columns, copied)
        table._indexes, table._prefix = self._indexes, self._prefix
        table._lengths, table._question = self._lengths, self._question
        return table

    def relabelled(self, labels: Mapping[int, str]) -> BlockTable:
        """Replace the labels of the blocks at these indexes; the copies stay."""
        blocks, names = list(self._blocks), list(self._labels)
        for i, label in labels.items():
            blocks[i], names[i] = replace(blocks[i], label=label), label
        return self._from_parts(tuple(blocks), tuple(names), self._columns, self.copied)

    def with_messages(self, messages: Positions) -> BlockTable:
        """Replace the indexes of the blocks' messages [n]; this table when none differs."""
        changed = (messages != self.messages).nonzero()[0].tolist()
        if not changed:
            return self
        blocks = list(self._blocks)
        for i in changed:
            blocks[i] = replace(blocks[i], message=int(messages[i]))
        columns = self._columns._replace(messages=messages)
        return self._from_parts(tuple(blocks), self._labels, columns, self.copied)

    @property
    def lengths(self) -> Positions:
        """Number of tokens of each block [n]."""
        if self._lengths is None:
            self._lengths = self.ends - self.starts
        return self._lengths

    @property
    def question_start(self) -> int:
        """Index of the first block of the question: of the last message.

        When the last message is a tool result, the question begins with the first of the tool
        results that directly precede it. Last messages of what a client has added alone belong to
        the message of a tool or the user before them. 0 without blocks.
        """
        if self._question is None:
            self._question = self._found_question()
        return self._question

    def _found_question(self) -> int:
        if not len(self):
            return 0
        messages, results, is_step = self.messages, self.results, self.is_step
        first = int(messages.searchsorted(messages[self._last_own()]))
        while first and is_step and results[first - 1]:
            first = int(messages.searchsorted(messages[first - 1]))
        return first

    def _last_own(self) -> int:
        """Index of the last block that the client has not added to what a tool or the user said."""
        own = ((self.roles != _USER) | self.of_user | self.results).nonzero()[0]
        is_said = len(own) > 0 and self.roles[own[-1]] in (_USER, _TOOL)
        return int(own[-1]) if is_said else len(self) - 1

    @property
    def is_step(self) -> bool:
        """Whether the prompt ends with results of tools, so that an agent takes its next step."""
        return len(self) > 0 and bool(self.results[self._last_own()])

    def pick(self, wanted: Mask | Positions) -> list[Block]:
        """The blocks that a mask selects, or those of an array of indexes, in its order."""
        at = wanted.nonzero()[0] if wanted.dtype == np.bool_ else wanted
        return [self._blocks[i] for i in at.tolist()]

    def spans_at(self, indexes: Sequence[int]) -> tuple[Span, ...]:
        """The positions of the blocks at these indexes, as the fewest spans, in ascending order."""
        if not indexes:
            return ()
        at = np.array(sorted(indexes), np.int64)
        starts, ends = self.starts[at], self.ends[at]
        gaps = (starts[1:] > ends[:-1]).nonzero()[0]
        firsts, lasts = [int(starts[0])], ends[gaps].tolist()
        firsts += starts[gaps + 1].tolist()
        lasts.append(int(ends[-1]))
        return tuple(map(Span, firsts, lasts))

    def within(self, spans: Sequence[Span]) -> Mask:
        """Which blocks lie entirely in these ascending, disjoint spans."""
        inside = np.zeros(len(self), np.bool_)
        if not spans:
            return inside
        firsts = self.starts.searchsorted([span.start for span in spans], "left")
        ends = self.ends.searchsorted([span.end for span in spans], "right")
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            inside[first:end] = True
        return inside

    def labelled(self, labels: frozenset[str]) -> Mask:
        """Which blocks have one of these labels."""
        mask = np.zeros(len(self), np.bool_)
        if labels:
            found = map(self._index().get, labels)
            mask[[i for i in found if i is not None]] = True
        return mask

    def has(self, label: str) -> bool:
        """Whether a block has this label."""
        return self._index().get(label) is not None

    def index_of(self, label: str) -> int | None:
        """The index of the block with this label; None when there is none."""
        return self._index().get(label)

    def _index(self) -> _LabelIndex:
        if self._indexes is None:
            self._indexes = _LabelIndex.of(self._labels)
        return self._indexes

    def crossing(self, positions: Iterable[int]) -> list[int]:
        """Ascending indexes of the blocks that one of these positions would split."""
        at = np.array(sorted(positions), np.int64)
        if not len(self) or not len(at):
            return []
        covering = self.starts.searchsorted(at, "left") - 1
        split = (covering >= 0) & (at < self.ends[covering])
        return sorted(set(covering[split].tolist()))

    def find(self, span: Span) -> int | None:
        """The index of the block with exactly this span; None when there is none."""
        at = int(self.starts.searchsorted(span.start))
        return at if at < len(self) and self._blocks[at].span == span else None

    def adjacent(self) -> Positions:
        """Indexes of the blocks that the next block directly follows, in the same message."""
        touch = self.ends[:-1] == self.starts[1:]
        return np.flatnonzero(touch & (self.messages[:-1] == self.messages[1:]))


def shared_labels(one: BlockTable, other: BlockTable) -> int:
    """Length of the common prefix of two tables' labels."""
    count = min(len(one), len(other))
    if one.same_blocks(other) or other._prefix is one._blocks:
        return count
    at, first, second = 0, one.labels, other.labels
    while at < count and first[at : at + _STRIDE] == second[at : at + _STRIDE]:
        at += _STRIDE
    pairs = zip(first[at : at + _STRIDE], second[at : at + _STRIDE], strict=False)
    return min(count, at + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))


def blocks_named(blocks: BlockTable, names: Collection[str | int]) -> Mask:
    """Mask of the blocks that one of these names refers to [n].

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
    """The names that refer to no block, in their order."""
    existing = names_among(blocks, names) if names else ()
    return [name for name in names if name not in existing]


def names_among(blocks: Iterable[Block], names: Collection[str]) -> set[str]:
    """Those of the names that refer to one of these blocks; each block is read once."""
    wanted, found = frozenset(names), set[str]()
    for block in blocks:
        found |= wanted.intersection(_own_names(block))
        found |= wanted.intersection(block.aliases)
    return found


def _names_of(block: Block) -> set[str | int]:
    return {block.message, *_own_names(block), *block.aliases}


def _own_names(block: Block) -> tuple[str, str, str]:
    """The names of a block that follow from its display name."""
    base, _, number = block.display_name.rpartition("#")
    return block.display_name, f"{base}#{number.partition('.')[0]}", base
