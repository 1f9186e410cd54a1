"""What is where of one session's prompt: its blocks, which are resident, which have a copy.

A layout never changes; a turn makes the next one from what llama-server says now. Residency is
always the server's word. Which labels have a copy is remembered, and corrected when a call fails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable, Mask, shared_labels
from evoke_proxy.core.model.blocks import Block, Span, clipped
from evoke_proxy.core.prompt.rendered import Rendered, SlotView, Tokens, common_prefix
from evoke_proxy.core.prompt.segment import Draft, Shares, cut, inside, next_numbers
from evoke_proxy.core.request.messages import Message

_MAX_SESSION_BYTES = 100  # of the 200 bytes llama-server allows for a name


@dataclass(frozen=True, slots=True)
class SavedRange:
    """A copy in the host pool that is no block of the prompt yet: tokens that were generated."""

    label: str
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Blocks tile [0, generation) of `tokens`; each is resident as a whole or not at all.

    `resident` are the rows below `n_past`, `ranges` copies from outside the blocks, `stale` labels
    of copies that are of no use any more, `guessed` those of `saved` whose tokens only llama-server
    knows. `divergence` is where the prompt left what was known before, None when it only went on.
    `numbers` are the next ones of block names.
    """

    session: str
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    generation: int = 0
    blocks: BlockTable = field(default_factory=BlockTable)
    ranges: tuple[SavedRange, ...] = ()
    stale: frozenset[str] = frozenset()
    guessed: frozenset[str] = frozenset()
    resident: tuple[Span, ...] = ()
    n_past: int = 0
    divergence: int | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def in_cache(self) -> Mask:
        """Which blocks are resident."""
        return self.blocks.within(self.resident)

    @property
    def in_pool(self) -> Mask:
        """Which blocks have a copy."""
        return self.blocks.copied

    @property
    def saved(self) -> frozenset[str]:
        """The labels of the blocks that have a copy."""
        return frozenset(compress(self.blocks.labels, self.in_pool.tolist()))

    @property
    def n_copies(self) -> int:
        """How many labels llama-server may have a copy of."""
        others = self.stale.union(item.label for item in self.ranges)
        return int(np.count_nonzero(self.in_pool)) + len(others)

    def reconcile(
        self,
        rendered: Rendered,
        view: SlotView,
        messages: Sequence[Message],
        turn: int,
        block_tokens: int,
        sink_tokens: int,
    ) -> Layout:
        """The layout of the next prompt, on this slot.

        Blocks wholly inside the common prefix stay, label and copy included; the rest is cut anew.
        Blocks are split where residency or a saved range begins or ends, and around a held row:
        it must not keep the whole block it is in.
        """
        shared = common_prefix(self.tokens, rendered.tokens)
        n_past = view.n_past(len(rendered.tokens)) if len(rendered.tokens) else 0
        resident = clipped(view.resident, Span(0, n_past))
        held = clipped(view.non_evictable, Span(0, n_past))
        edges = {at for span in (*resident, *held) for at in (span.start, span.end)}
        kept = self._kept(min(shared, rendered.generation), edges, rendered.tokens)
        ranges = [item for item in self.ranges if self._may_hold(item, shared, view)]
        edges |= {at for item in ranges for at in (item.span.start, item.span.end)}
        whole = len(kept) >= len(self.blocks)
        numbers = self.numbers if whole else next_numbers(block.display_name for block in kept)
        drafts = cut(
            len(rendered.tokens),
            rendered.spans,
            messages,
            rendered.generation,
            block_tokens,
            edges | {sink_tokens},
            start=kept[-1].span.end if kept else 0,
            numbers=numbers,
            stops=rendered.sentence_starts,
        )
        new = self._named([_block(d, turn) for d in drafts], rendered.tokens, kept)
        # Each for itself: names for some of the new ones copy none of those that stay.
        (before, of_kept), (new, of_new) = _with_ranges(kept, ranges), _with_ranges(new, ranges)
        taken = (*of_kept, *of_new)
        stale = self._left_behind(kept).difference(item.label for item in taken)
        guessed = {i.label for i in taken if i.span.end > max(shared, view.n_common)}
        return Layout(
            session=self.session,
            tokens=rendered.tokens,
            generation=rendered.generation,
            blocks=before + new,
            stale=stale,
            guessed=(self.guessed - stale) | guessed,
            resident=resident,
            n_past=n_past,
            divergence=shared if shared < self.generation else None,
            numbers=next_numbers((draft.display_name for draft in drafts), numbers),
        )

    def with_saved(self, copies: Iterable[tuple[str, Span]]) -> Layout:
        """The same with more copies, by label: of blocks, or of ranges that are none."""
        copied, own = self.in_pool.copy(), set[str]()
        ranges = {item.label: item for item in self.ranges}
        starts, ends = self.blocks.starts, self.blocks.ends
        for label, span in copies:
            at = self.blocks.index_of(label)
            if at is None:
                ranges[label] = SavedRange(label, span)
            elif starts[at] == span.start and ends[at] == span.end:
                copied[at] = True
                own.add(label)
        return replace(
            self,
            blocks=self.blocks.with_copies(copied),
            ranges=tuple(ranges.values()),
            stale=self.stale - own - ranges.keys(),
        )

    def without_saved(self, labels: Collection[str]) -> Layout:
        """The same after these copies turned out to be gone, or to be of other tokens.

        If one was guessed, then the answer reads differently from there on: so are those after it.
        """
        gone = frozenset(labels)
        if not gone:
            return self
        guesses = [block for block in self.blocks if block.label in self.guessed]
        wrong = [block.span.start for block in guesses if block.label in gone]
        stale = {block.label for block in guesses if wrong and block.span.start >= min(wrong)}
        return replace(
            self,
            blocks=self.blocks.with_copies(self.in_pool & ~self.blocks.labelled(gone | stale)),
            ranges=tuple(item for item in self.ranges if item.label not in gone),
            stale=(self.stale - gone) | stale,
            guessed=self.guessed - gone - stale,
        )

    def marked(self, keeps: Mapping[int, str], turns: Mapping[int, tuple[bool, float]]) -> Layout:
        """The same with the client's marks: messages by index, turns by (pinned, priority)."""
        if not turns and not keeps:
            blocks = self.blocks
            if not (blocks.pinned | blocks.preferred | (blocks.priority != 1.0)).any():
                return self
        blocks = BlockTable(_with_marks(block, keeps, turns) for block in self.blocks)
        return replace(self, blocks=blocks.with_copies(self.in_pool))

    @property
    def copies_end(self) -> int:
        """Where the last copy ends; 0 when no block has one."""
        ends = self.blocks.ends[self.in_pool]
        return max([int(ends[-1]), *(item.span.end for item in self.ranges)]) if len(ends) else 0

    def saved_end(self, limit: int) -> int:
        """Where the copies end that cover the prompt from 0 on without a gap; `limit` at most."""
        counted = self.in_pool & (self.blocks.ends <= limit)
        n = len(counted) if counted.all() else int(counted.argmin())
        return int(self.blocks.ends[n - 1]) if n else 0

    def _kept(self, limit: int, edges: Collection[int], tokens: Tokens) -> BlockTable:
        kept = self.blocks[: int(self.blocks.ends.searchsorted(limit, "right"))]
        for i in reversed(kept.crossing(edges)):
            pieces = self._named(_split(kept[i], sorted(edges)), tokens, kept[:i])
            kept = kept[:i] + pieces + kept[i + 1 :]
        return kept

    def _may_hold(self, item: SavedRange, shared: int, view: SlotView) -> bool:
        """Whether the tokens of a saved range can be those of the new prompt.

        While the slot still has the session it says so itself. Otherwise nobody here knows the
        generated tokens: llama-server compares them when the range is loaded.
        """
        if view.n_common >= shared:
            return item.span.end <= view.n_common
        return shared == len(self.tokens)

    def _named(self, blocks: Sequence[Block], tokens: Tokens, behind: BlockTable) -> BlockTable:
        """These blocks, which follow others, with the labels of their tokens."""
        before = behind[-1].label if behind else ""
        names = labels(self.session, tokens, [block.span for block in blocks], before)
        pairs = zip(blocks, names, strict=True)
        return BlockTable(replace(block, label=name) for block, name in pairs)

    def _left_behind(self, kept: BlockTable) -> frozenset[str]:
        """The copies of no use when only these blocks stay, and no range."""
        useless = self.stale.union(item.label for item in self.ranges)
        shared = shared_labels(kept, self.blocks)
        if shared == len(self.blocks):
            return useless
        left = self.blocks[shared:]
        labels = compress(left.labels, left.copied.tolist())
        return useless.union(label for label in labels if not kept.has(label))


def _with_ranges(
    blocks: BlockTable, ranges: Iterable[SavedRange]
) -> tuple[BlockTable, Sequence[SavedRange]]:
    """A block that is a saved range, and has no copy of its own, takes its name and its copy over;
    also these ranges."""
    taken = {i: item for item in ranges if (i := blocks.find(item.span)) is not None}
    taken = {i: item for i, item in taken.items() if not blocks.copied[i]}
    if not taken:
        return blocks, ()
    copied = blocks.copied.copy()
    copied[list(taken)] = True
    named = blocks.named({i: item.label for i, item in taken.items()})
    return named.with_copies(copied), tuple(taken.values())


def wire_name(session: str) -> str:
    """What a session is called in labels: its id, or a hash of one too long for the wire."""
    if len(session.encode()) <= _MAX_SESSION_BYTES:
        return session
    return hashlib.blake2b(session.encode(), digest_size=12).hexdigest()


def labels(session: str, tokens: Tokens, spans: Sequence[Span], before: str = "") -> list[str]:
    """A name for each of these ascending spans: it says whose and where, and changes with any token
    up to the span's end. `before` is the name of the block the first of them follows."""
    owner = wire_name(session)
    hashed = hashlib.blake2b(before.encode(), digest_size=8)
    at, found = spans[0].start if before and spans else 0, []
    for span in spans:
        hashed.update(np.ascontiguousarray(tokens[at : span.end], dtype="<i4").tobytes())
        at = span.end
        found.append(f"{owner}/{span.start}-{span.end}-{hashed.hexdigest()}")
    return found


def _split(block: Block, edges: Sequence[int]) -> list[Block]:
    found = inside(edges, block.span)
    if not found:
        return [block]
    ends, shares = [*found, block.span.end], Shares(block.text, block.span)
    spans = [Span(a, b) for a, b in zip([block.span.start, *found], ends, strict=True)]
    return [
        replace(
            block,
            display_name=f"{block.display_name}.{number}",
            label="",
            span=span,
            text=shares.of(span),
        )
        for number, span in enumerate(spans)
    ]


def _block(draft: Draft, turn: int) -> Block:
    return Block(
        display_name=draft.display_name,
        label="",
        span=draft.span,
        role=draft.role,
        turn=turn,
        message=draft.message,
        text=draft.text,
        aliases=draft.aliases,
    )


def _with_marks(
    block: Block, keeps: Mapping[int, str], turns: Mapping[int, tuple[bool, float]]
) -> Block:
    keep = keeps.get(block.message, "")
    turn_pinned, priority = turns.get(block.turn, (False, 1.0))
    pinned, preferred = keep == "pin" or turn_pinned, keep == "prefer"
    if (block.pinned, block.preferred, block.priority) == (pinned, preferred, priority):
        return block
    return replace(block, pinned=pinned, preferred=preferred, priority=priority)
