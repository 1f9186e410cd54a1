"""Layout of one session's prompt: its blocks, their residency and their copies.

A layout is immutable; each turn derives the next one from llama-server's rendering and slot state.
Residency always comes from the server. The layout records which labels have a copy; a failed call
corrects it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import BlockTable, Mask, shared_labels
from evoke_proxy.core.model.blocks import Block, Span, clipped
from evoke_proxy.core.prompt.rendered import Rendered, SlotView, Tokens, common_prefix
from evoke_proxy.core.prompt.segment import (
    CutOptions,
    Draft,
    TextAlignment,
    cut,
    inside,
    next_numbers,
    outside_media,
)
from evoke_proxy.core.request.messages import Message

# Branches of a session whose copies are kept, and the shortest end of a prompt that is one.
_MAX_BRANCHES, _MIN_BRANCH_TOKENS = 4, 128
_MAX_SESSION_BYTES = 100  # of the 200 bytes that llama-server allows for a label


@dataclass(frozen=True, slots=True)
class SavedRange:
    """A copy in the host pool of generated tokens, which no block of the prompt covers yet.

    Attributes:
        label: name of the copy in calls to llama-server.
        span: positions of its rows.
    """

    label: str
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """The end of an earlier prompt that its user has gone back behind, and may return to.

    Attributes:
        tokens: that prompt [n_tokens].
        copies: the copies of its end, in ascending order.
    """

    tokens: Tokens
    copies: tuple[SavedRange, ...]

    def part(self, tokens: Tokens) -> tuple[SavedRange, ...]:
        """The copies of rows that a prompt has as well: of the same tokens after the same ones."""
        end = common_prefix(self.tokens, tokens)
        return tuple(item for item in self.copies if item.span.end <= end)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Blocks that tile [0, generation) of a prompt; a block is resident completely or not at all.

    Attributes:
        session: id of the session.
        tokens: the prompt [n_tokens].
        generation: position where the answer begins.
        blocks: the blocks; their mask `copied` says which have a copy.
        ranges: copies that belong to no block.
        stale: labels of copies that are of no further use.
        branches: ends of earlier prompts with their copies, the latest first.
        unverified: labels of copies whose tokens only llama-server can compare.
        resident: rows of the slot below `n_past`.
        n_past: number of leading positions that need no decoding.
        divergence: position where the prompt left the previous one; None when it extends it.
        numbers: next free number of each block name, see `segment.next_numbers`.
    """

    session: str
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    generation: int = 0
    blocks: BlockTable = field(default_factory=BlockTable)
    ranges: tuple[SavedRange, ...] = ()
    stale: frozenset[str] = frozenset()
    branches: tuple[Branch, ...] = ()
    unverified: frozenset[str] = frozenset()
    resident: tuple[Span, ...] = ()
    n_past: int = 0
    divergence: int | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def in_cache(self) -> Mask:
        """Which blocks are resident [n_blocks]."""
        return self.blocks.within(self.resident)

    @property
    def in_pool(self) -> Mask:
        """Which blocks have a copy [n_blocks]."""
        return self.blocks.copied

    @property
    def saved(self) -> frozenset[str]:
        """Labels of the blocks that have a copy."""
        return frozenset(compress(self.blocks.labels, self.in_pool.tolist()))

    @property
    def usable_copies(self) -> frozenset[str]:
        """Labels of the copies of parts of this prompt, those without a block included."""
        return self.saved.union(item.label for item in self.ranges)

    @property
    def unused_copies(self) -> frozenset[str]:
        """Labels of the copies of no part of this prompt."""
        return self.stale.union(_labels_of(self.branches))

    def returns_to(self, tokens: Tokens) -> int:
        """End of the last copy of a branch that a prompt returns to; 0 when it returns to none."""
        part = _best_part(self.branches, tokens)
        return part[-1].span.end if part else 0

    @property
    def n_copies(self) -> int:
        """Number of labels that llama-server may have a copy of."""
        others = self.unused_copies.union(item.label for item in self.ranges)
        return int(np.count_nonzero(self.in_pool)) + len(others)

    def reconcile(
        self,
        rendered: Rendered,
        view: SlotView,
        messages: Sequence[Message],
        turn: int,
        config: PolicyConfig,
    ) -> Layout:
        """Make the layout of the next prompt on this slot.

        Blocks in the common prefix keep their label and copy; the rest of the prompt is cut into
        new blocks. Blocks are split where residency or a saved range begins or ends, and around
        non-evictable rows, so that these do not keep a full block resident.
        """
        tokens = rendered.tokens
        shared = common_prefix(self.tokens, tokens)
        n_past = view.n_past(len(tokens)) if len(tokens) else 0
        resident = clipped(view.resident, Span(0, n_past))
        boundaries = _ends((*resident, *clipped(view.non_evictable, Span(0, n_past))))
        boundaries = outside_media(boundaries, rendered.media)
        prefix = self._kept_prefix(min(shared, rendered.generation), boundaries, tokens)
        prefix = self._before_branch(prefix, tokens)
        # Other messages may have the same tokens: a transcript is no longer divided into its turns
        # once its conversation goes on, and a client may leave out a message without tokens.
        prefix = prefix.with_messages(rendered.messages_at(prefix.starts))
        ranges = [item for item in self.ranges if self._may_match(item, shared, view)]
        keeps_all = len(prefix) >= len(self.blocks)
        numbers = self.numbers if keeps_all else next_numbers(b.display_name for b in prefix)
        start = prefix[-1].span.end if prefix else 0
        branches = self._branches(prefix, rendered, shared)
        returned, branches = _returned(branches, tokens, start, ranges)
        ranges += returned
        boundaries |= _ends(item.span for item in ranges)
        options = CutOptions(config.block_tokens, boundaries | {config.sink_tokens}, start, numbers)
        drafts = cut(rendered, messages, options)
        names = self._labels([draft.span for draft in drafts], tokens, prefix)
        pairs = zip(drafts, names, strict=True)
        tail = BlockTable(_block(draft, turn, label) for draft, label in pairs)
        unused = self._copies_outside(prefix)
        # Claimed separately: relabelling the tail must not copy the blocks that stay.
        prefix, claimed_by_prefix = _claim_ranges(prefix, ranges)
        tail, claimed_by_tail = _claim_ranges(tail, ranges)
        claimed = (*claimed_by_prefix, *claimed_by_tail)
        blocks = prefix + tail
        branches = tuple(
            _without(branches, {label for label in _labels_of(branches) if blocks.has(label)})
        )
        stale = unused.union(_labels_of(self.branches)).difference(
            _labels_of(branches),
            (item.label for item in claimed),
            blocks.labels if self.branches else (),
        )
        compared_end = max(shared, view.n_common)
        compared = {item.label for item in returned}
        unverified = {item.label for item in claimed if item.span.end > compared_end} - compared
        return Layout(
            session=self.session,
            tokens=tokens,
            generation=rendered.generation,
            blocks=blocks,
            stale=stale,
            branches=branches,
            unverified=(self.unverified - stale) | unverified,
            resident=resident,
            n_past=n_past,
            divergence=shared if shared < self.generation else None,
            numbers=next_numbers((draft.display_name for draft in drafts), numbers),
        )

    def with_saved(self, copies: Iterable[tuple[str, Span]]) -> Layout:
        """Add copies, given as pairs of label and span.

        A copy of a part of a block splits the block, so that the rest of it can be saved, too.
        """
        copied, labels_of_blocks = self.in_pool.copy(), set[str]()
        ranges = {item.label: item for item in self.ranges}
        starts, ends = self.blocks.starts, self.blocks.ends
        for label, span in copies:
            at = self.blocks.index_of(label)
            if at is None:
                ranges[label] = SavedRange(label, span)
            elif starts[at] == span.start and ends[at] == span.end:
                copied[at] = True
                labels_of_blocks.add(label)
        saved = replace(
            self,
            blocks=self.blocks.with_copies(copied),
            ranges=tuple(ranges.values()),
            stale=self.stale - labels_of_blocks - ranges.keys(),
        )
        return saved._split_at_ranges()

    def _split_at_ranges(self) -> Layout:
        """Split the blocks where saved ranges begin or end, and give them the ranges inside."""
        end = int(self.blocks.ends[-1]) if len(self.blocks) else 0
        inside_blocks = [item for item in self.ranges if item.span.end <= end]
        if not inside_blocks:
            return self
        boundaries = _ends(item.span for item in inside_blocks)
        blocks = self._kept_prefix(end, boundaries, self.tokens)
        unused = self._copies_outside(blocks)
        blocks, claimed = _claim_ranges(blocks, inside_blocks)
        labels_claimed = {item.label for item in claimed}
        ranges = tuple(item for item in self.ranges if item.span.end > end)
        stale = unused.difference(labels_claimed, (item.label for item in ranges))
        return replace(self, blocks=blocks, ranges=ranges, stale=stale)

    def without_saved(self, labels: Collection[str]) -> Layout:
        """Remove copies that llama-server does not have, or has with other tokens.

        When an unverified copy is among them, the answer's tokens differ from that position on, so
        all unverified copies after it become stale.
        """
        missing = frozenset(labels)
        if not missing:
            return self
        unverified_blocks = [block for block in self.blocks if block.label in self.unverified]
        wrong = [block.span.start for block in unverified_blocks if block.label in missing]
        stale = {
            block.label for block in unverified_blocks if wrong and block.span.start >= min(wrong)
        }
        return replace(
            self,
            blocks=self.blocks.with_copies(self.in_pool & ~self.blocks.labelled(missing | stale)),
            ranges=tuple(item for item in self.ranges if item.label not in missing),
            branches=tuple(_without(self.branches, missing)),
            stale=(self.stale - missing) | stale,
            unverified=self.unverified - missing - stale,
        )

    def with_marks(
        self, keep_marks: Mapping[int, str], turns: Mapping[int, tuple[bool, float]]
    ) -> Layout:
        """Set the client's marks on the blocks.

        `keep_marks` maps message indexes to "pin" or "prefer". `turns` maps turn numbers to pairs
        of pinned and priority.
        """
        if not turns and not keep_marks:
            blocks = self.blocks
            if not (blocks.pinned | blocks.preferred | (blocks.priority != 1.0)).any():
                return self
        blocks = BlockTable(_with_marks(block, keep_marks, turns) for block in self.blocks)
        return replace(self, blocks=blocks.with_copies(self.in_pool))

    @property
    def copies_end(self) -> int:
        """End of the last copy; 0 when there is none."""
        ends = self.blocks.ends[self.in_pool][-1:].tolist()
        return max([*ends, *(item.span.end for item in self.ranges)], default=0)

    def saved_end(self, limit: int) -> int:
        """End, at most `limit`, of the copies that cover the prompt from 0 without a gap."""
        counted = self.in_pool & (self.blocks.ends <= limit)
        n = len(counted) if counted.all() else int(counted.argmin())
        return int(self.blocks.ends[n - 1]) if n else 0

    def last_saved_end(self, limit: int) -> int:
        """End, at most `limit`, of the last block with a copy, whether or not others have one."""
        ends = self.blocks.ends[self.in_pool & (self.blocks.ends <= limit)]
        return int(ends[-1]) if len(ends) else 0

    def _branches(self, prefix: BlockTable, rendered: Rendered, shared: int) -> tuple[Branch, ...]:
        """The branches, with the end of this prompt when the user goes back or changes branches.

        The user goes back when only the newest message of the next prompt is not in this one. A
        client that rewrites its history does not return to it.
        """
        spans = rendered.turn_spans
        goes_back = shared < self.generation and len(spans) and spans[-1].span.start <= shared
        if not goes_back and not self.returns_to(rendered.tokens):
            return self.branches
        end = int(prefix.ends[-1]) if prefix else 0
        rest = self.blocks[int(self.blocks.ends.searchsorted(end, "right")) :]
        copies = tuple(
            SavedRange(block.label, block.span)
            for block in rest.pick(rest.copied)
            if not prefix.has(block.label)
        )
        n_tokens = sum(len(item.span) for item in copies)
        if n_tokens < _MIN_BRANCH_TOKENS:
            return self.branches
        return (Branch(self.tokens, copies), *self.branches)[:_MAX_BRANCHES]

    def _before_branch(self, prefix: BlockTable, tokens: Tokens) -> BlockTable:
        """The blocks before the first copy of the branch that a prompt returns to.

        The prompt may share some tokens of that copy with the present one.
        """
        end = int(prefix.ends[-1]) if prefix else 0
        copies = _best_part(self.branches, tokens)
        crossing = next((one for one in copies if one.span.start < end < one.span.end), None)
        if crossing is None:
            return prefix
        n = int(prefix.ends.searchsorted(crossing.span.start, "right"))
        starts_at = int(prefix.ends[n - 1]) if n else 0
        return prefix[:n] if starts_at == crossing.span.start else prefix

    def _kept_prefix(self, limit: int, boundaries: Collection[int], tokens: Tokens) -> BlockTable:
        """The blocks that end at or before `limit`, split at these positions."""
        prefix = self.blocks[: int(self.blocks.ends.searchsorted(limit, "right"))]
        for i in reversed(prefix.crossing(boundaries)):
            pieces = self._with_labels(_split(prefix[i], sorted(boundaries)), tokens, prefix[:i])
            prefix = prefix[:i] + pieces + prefix[i + 1 :]
        return prefix

    def _may_match(self, item: SavedRange, shared: int, view: SlotView) -> bool:
        """Whether the tokens of a saved range may equal those of the new prompt.

        While the slot contains the session, the tokens that it has in common with the prompt
        decide. Otherwise the proxy cannot compare the generated tokens; llama-server does when the
        range is loaded.
        """
        if view.n_common >= shared:
            return item.span.end <= view.n_common
        return shared == len(self.tokens)

    def _with_labels(
        self, blocks: Sequence[Block], tokens: Tokens, before: BlockTable
    ) -> BlockTable:
        """Make a table of the blocks with labels that continue those of `before`."""
        names = self._labels([block.span for block in blocks], tokens, before)
        pairs = zip(blocks, names, strict=True)
        return BlockTable(replace(block, label=name) for block, name in pairs)

    def _labels(self, spans: Sequence[Span], tokens: Tokens, before: BlockTable) -> list[str]:
        """Make labels of these spans that continue those of `before`."""
        return labels(self.session, tokens, spans, before[-1].label if before else "")

    def _copies_outside(self, prefix: BlockTable) -> frozenset[str]:
        """Labels of all copies that belong to none of these blocks."""
        unused = self.stale.union(item.label for item in self.ranges)
        shared = shared_labels(prefix, self.blocks)
        if shared == len(self.blocks):
            return unused
        rest = self.blocks[shared:]
        copied = compress(rest.labels, rest.copied.tolist())
        return unused.union(label for label in copied if not prefix.has(label))


def _ends(spans: Iterable[Span]) -> set[int]:
    return {position for span in spans for position in (span.start, span.end)}


def _returned(
    branches: Sequence[Branch], tokens: Tokens, start: int, ranges: Sequence[SavedRange]
) -> tuple[list[SavedRange], tuple[Branch, ...]]:
    """Take the copies of a prompt's rows from position `start` on out of the best branch.

    Copies that overlap `ranges` stay there. Also returns the branches without those taken.
    """
    others = sorted((other.span for other in ranges), key=lambda span: span.start)
    starts = [span.start for span in others]
    # The highest end of the first ranges, by their number.
    ends = [0, *accumulate((span.end for span in others), max)]
    taken = [
        item
        for item in _best_part(branches, tokens)
        if item.span.start >= start and ends[bisect_left(starts, item.span.end)] <= item.span.start
    ]
    return taken, tuple(_without(branches, {item.label for item in taken}))


def _best_part(branches: Sequence[Branch], tokens: Tokens) -> tuple[SavedRange, ...]:
    """The copies of a prompt's rows in the branch that has them up to the highest position."""
    parts = [branch.part(tokens) for branch in branches]
    return max(parts, key=lambda part: part[-1].span.end if part else 0, default=())


def _labels_of(branches: Iterable[Branch]) -> set[str]:
    return {item.label for branch in branches for item in branch.copies}


def _without(branches: Iterable[Branch], labels: Collection[str]) -> Iterable[Branch]:
    """Yield the branches without copies with these labels; a branch without copies is left out."""
    for branch in branches:
        copies = tuple(item for item in branch.copies if item.label not in labels)
        if copies:
            yield replace(branch, copies=copies)


def _claim_ranges(
    blocks: BlockTable, ranges: Iterable[SavedRange]
) -> tuple[BlockTable, Sequence[SavedRange]]:
    """Give saved ranges to the blocks with the same span that have no copy.

    Such a block gets the range's label and copy. Also returns the claimed ranges.
    """
    claimed = {i: item for item in ranges if (i := blocks.find(item.span)) is not None}
    claimed = {i: item for i, item in claimed.items() if not blocks.copied[i]}
    if not claimed:
        return blocks, ()
    copied = blocks.copied.copy()
    copied[list(claimed)] = True
    relabelled = blocks.relabelled({i: item.label for i, item in claimed.items()})
    return relabelled.with_copies(copied), tuple(claimed.values())


def wire_name(session: str) -> str:
    """The session's name in labels: its id, or a hash of an id that is too long for a label."""
    if len(session.encode()) <= _MAX_SESSION_BYTES:
        return session
    return hashlib.blake2b(session.encode(), digest_size=12).hexdigest()


def labels(session: str, tokens: Tokens, spans: Sequence[Span], before: str = "") -> list[str]:
    """Make a label for each of these ascending spans.

    A label contains session, span and a hash of all tokens up to the span's end. `before` is the
    label of the block before the first span.
    """
    owner = wire_name(session)
    hashed = LabelHash(tokens, spans[0].start if before and spans else 0, before)
    return [f"{owner}/{span.start}-{span.end}-{hashed.up_to(span.end)}" for span in spans]


class LabelHash:
    """The last part of labels: a hash of the tokens from a position on, or from the start.

    `before` is the label of the block that ends at the position; "" at the start.
    """

    def __init__(self, tokens: Tokens, start: int = 0, before: str = "") -> None:
        self._tokens = tokens
        self._at = start
        self._hash = hashlib.blake2b(before.encode(), digest_size=8)
        self._digest = self._hash.hexdigest()

    def up_to(self, end: int) -> str:
        """The hash of the tokens up to a position; calls must be in ascending order."""
        if end > self._at:
            piece = np.ascontiguousarray(self._tokens[self._at : end], dtype="<i4")
            self._hash.update(piece.tobytes())
            self._at, self._digest = end, self._hash.hexdigest()
        return self._digest


def _split(block: Block, boundaries: Sequence[int]) -> list[Block]:
    """Divide a block at the boundaries inside it; the parts have no labels yet."""
    cuts = inside(boundaries, block.span)
    if not cuts:
        return [block]
    text = TextAlignment(block.text, block.span)
    starts, ends = [block.span.start, *cuts], [*cuts, block.span.end]
    spans = [Span(start, end) for start, end in zip(starts, ends, strict=True)]
    return [
        replace(
            block,
            display_name=f"{block.display_name}.{number}",
            label="",
            span=span,
            text=text.of(span),
        )
        for number, span in enumerate(spans)
    ]


def _block(draft: Draft, turn: int, label: str) -> Block:
    return Block(
        display_name=draft.display_name,
        label=label,
        span=draft.span,
        role=draft.role,
        turn=turn,
        message=draft.message,
        text=draft.text,
        aliases=draft.aliases,
        is_reminder=draft.is_reminder,
        is_added=draft.is_added,
        is_result=draft.is_result,
    )


def _with_marks(
    block: Block, keep_marks: Mapping[int, str], turns: Mapping[int, tuple[bool, float]]
) -> Block:
    keep = keep_marks.get(block.message, "")
    turn_pinned, priority = turns.get(block.turn, (False, 1.0))
    pinned, preferred = keep == "pin" or turn_pinned, keep == "prefer"
    if (block.pinned, block.preferred, block.priority) == (pinned, preferred, priority):
        return block
    return replace(block, pinned=pinned, preferred=preferred, priority=priority)
