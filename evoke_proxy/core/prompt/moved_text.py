"""Finds the text that a prompt has at other positions than the previous prompt of its session.

After a message was changed, inserted or removed, the text behind it is the same, some tokens
earlier or later. Runs of equal tokens are found as rsync does it: by short pieces of the old
prompt, at fixed distances, that occur anywhere in the new one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import log

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable, Mask
from evoke_proxy.core.model.blocks import Block, Span
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix

# Tokens of a piece: fewer occur by chance, and more miss short runs.
_PIECE = 16
# A piece that occurs more often in the old prompt says little about how far its text has moved.
_MAX_OCCURRENCES = 8
# Distances that are tried: each edit adds one.
_MAX_SHIFTS = 64
# Share of the moved tokens that is decoded again because it mentions what was changed.
_AFFECTED_SHARE = 0.15
_WORD = re.compile(r"\w{3,256}")


@dataclass(frozen=True, slots=True)
class MovedRun:
    """Tokens that two prompts have in common at different positions.

    Attributes:
        old: Their positions in the old prompt.
        start: The position of the first one in the new prompt.
    """

    old: Span
    start: int

    @property
    def new(self) -> Span:
        """Their positions in the new prompt."""
        return Span(self.start, self.start + len(self.old))


@dataclass(frozen=True, slots=True)
class MovedBlock:
    """A block of the old prompt whose rows can be used at other positions of the new one.

    Attributes:
        block: The block, as it was in the old prompt.
        start: Its first position in the new prompt.
        is_resident: Whether its rows are in the slot.
        is_saved: Whether it has a copy.
    """

    block: Block
    start: int
    is_resident: bool
    is_saved: bool

    @property
    def old(self) -> Span:
        """Its positions in the old prompt."""
        return self.block.span

    @property
    def new(self) -> Span:
        """Its positions in the new prompt."""
        return Span(self.start, self.start + len(self.old))


@dataclass(frozen=True, slots=True)
class MovedText:
    """What of a prompt can be moved from the previous one.

    Attributes:
        blocks: The blocks to move, in the order of the new prompt.
        spans: The ranges of all blocks of the new prompt.
    """

    blocks: tuple[MovedBlock, ...] = ()
    spans: tuple[Span, ...] = ()


def moved_runs(old: Tokens, new: Tokens, start: int, least: int) -> list[MovedRun]:
    """Return the runs of at least `least` tokens from `start` on, in the order of both prompts.

    `start` is the end of the common prefix. The longest run is used first; others lie before or
    behind it in both prompts, and lose what they have in common with it. Text that changed its
    order is found once.
    """
    runs: list[MovedRun] = []
    found = [run for shift in _shifts(old, new, start) for run in _runs(old, new, start, shift)]
    for run in sorted(found, key=lambda run: -len(run.old)):
        at = bisect_left(runs, run.start, key=lambda other: other.start)
        before = runs[at - 1] if at else MovedRun(Span(start, start), start)
        end = MovedRun(Span(len(old), len(old)), len(new))
        part = _between(run, before, runs[at] if at < len(runs) else end)
        if len(part.old) >= least:
            runs.insert(at, part)
    return runs


def _shifts(old: Tokens, new: Tokens, start: int) -> list[int]:
    """Return the distances by which most of the pieces have moved, the most frequent first."""
    pieces: dict[bytes, list[int]] = {}
    for at in range(start, len(old) - _PIECE + 1, _PIECE):
        pieces.setdefault(old[at : at + _PIECE].tobytes(), []).append(at)
    data, size = new.tobytes(), new.itemsize
    n_pieces = Counter[int]()
    for position in range(start, len(new) - _PIECE + 1):
        found = pieces.get(data[position * size : (position + _PIECE) * size], ())
        if len(found) <= _MAX_OCCURRENCES:
            n_pieces.update(position - at for at in found)
    return [shift for shift, _ in n_pieces.most_common(_MAX_SHIFTS)]


def _runs(old: Tokens, new: Tokens, start: int, shift: int) -> list[MovedRun]:
    """Return all runs at one distance, from `start` on in both prompts."""
    first = max(start, start - shift)
    last = max(first, min(len(old), len(new) - shift))
    equal = old[first:last] == new[first + shift : last + shift]
    edges = np.flatnonzero(np.diff(equal, prepend=False, append=False)).tolist()
    return [
        MovedRun(Span(first + a, first + b), first + shift + a)
        for a, b in zip(edges[::2], edges[1::2], strict=True)
        if b - a >= _PIECE
    ]


def _between(run: MovedRun, before: MovedRun, after: MovedRun) -> MovedRun:
    """Return the part of a run that is between two others in both prompts; may be empty."""
    cut = max(0, before.old.end - run.old.start, before.new.end - run.start)
    n = min(run.old.end, after.old.start, run.old.start + after.start - run.start)
    first = run.old.start + cut
    return MovedRun(Span(first, max(first, n)), run.start + cut)


def moved_text(
    before: Layout, after: Layout, resident: Sequence[Span], saved: Mask, least: int
) -> MovedText:
    """Return the blocks of a layout that the next one has at other positions.

    `before` is the layout of the previous prompt, `after` that of the next one. `resident` are the
    rows of the slot, `saved` [n_blocks] says which blocks of `before` have a current copy, and
    `least` is the smallest run in tokens.

    Left out, and decoded again, are blocks without rows and copy, the last token of the prompt, and
    the rows that depend most on the changed text: the first block of each run, and those blocks
    that mention what was changed, up to 15 % of the tokens. The share is that of CacheBlend (Yao et
    al., 2024), which compares the rows of the first layers instead of words.
    """
    blocks, tokens = before.blocks, after.tokens
    shared = common_prefix(before.tokens, tokens)
    runs = moved_runs(before.tokens, tokens[:-1], shared, least)
    in_slot = blocks.within(resident)
    moved: list[MovedBlock] = []
    for run in runs:
        first = int(blocks.starts.searchsorted(run.old.start)) + 1
        end = int(blocks.ends.searchsorted(run.old.end, "right"))
        for i in range(first, end):
            if in_slot[i] or saved[i]:
                start = run.start + blocks[i].span.start - run.old.start
                moved.append(MovedBlock(blocks[i], start, bool(in_slot[i]), bool(saved[i])))
    last = runs[-1] if runs else MovedRun(Span(shared, shared), shared)
    changed = (
        _text_outside(blocks, Span(shared, last.old.end), [run.old for run in runs]),
        _text_outside(after.blocks, Span(shared, last.new.end), [run.new for run in runs]),
    )
    affected = _mentioning(moved, _words(changed[0]) ^ _words(changed[1]))
    kept = tuple(item for item in moved if item.block.label not in affected)
    return MovedText(kept, tuple(block.span for block in after.blocks))


def _text_outside(blocks: BlockTable, part: Span, runs: Sequence[Span]) -> str:
    """Return the text of the blocks in a part of a prompt that are not inside of these ranges."""
    inside = blocks.within(runs)
    at = np.flatnonzero((blocks.ends > part.start) & (blocks.starts < part.end) & ~inside)
    return " ".join(blocks[i].text for i in at.tolist())


def _mentioning(moved: Sequence[MovedBlock], words: Set[str]) -> Set[str]:
    """Return the labels of the blocks that mention most of these words, rare ones above all."""
    found = [words & _words(item.block.text) for item in moved]
    n_blocks = Counter(word for each in found for word in each)
    scores = [sum(log(1 + len(moved) / n_blocks[word]) for word in each) for each in found]
    room = _AFFECTED_SHARE * sum(len(item.old) for item in moved)
    labels = set[str]()
    for i in sorted(range(len(moved)), key=lambda i: -scores[i]):
        room -= len(moved[i].old)
        if not found[i] or room < 0:
            break
        labels.add(moved[i].block.label)
    return labels


def _words(text: str) -> Set[str]:
    # Other threads can run between two matches, which they cannot during `findall`.
    return {match[0] for match in _WORD.finditer(text.lower())}
