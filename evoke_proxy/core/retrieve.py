"""Recover-scores: how much each block has to do with the question.

BM25 over the words of the blocks, plus exact mentions of what a block is called. Words that stand
in most blocks of the session weigh next to nothing, because the statistics are the session's own.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.blocks import Block

Scores = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]

# Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009).
_K1 = 1.2
_B = 0.75
# A block that is called by its name beats any number of shared words.
_MENTION = 2.0
# What a block's neighbours in its message get of its score: text is cut at tokens, not at facts.
_NEIGHBOUR = 0.5
_COMPACT_ABOVE = 1024

_WORD = re.compile(r"\w+(?:[-./]\w+)*")
_PART = re.compile(r"[^\W_]+")


def terms(text: str) -> list[str]:
    """Words, numbers and identifiers, lower case: whole, and their parts if they have several."""
    found: list[str] = []
    for match in _WORD.finditer(text.lower()):
        word = match.group()
        parts = _PART.findall(word)
        found.append(word)
        if len(parts) > 1:
            found += parts
    return found


class Index:
    """The blocks of one session, by word. Mutable; owned by its session.

    Blocks are told apart by label: a label always stands for the same text.
    """

    def __init__(self) -> None:
        self._clear()

    def __len__(self) -> int:
        return len(self._number)

    def relevance(self, query: str, blocks: Sequence[Block]) -> Scores:
        """One value in [0, 1] a block, in their order; all 0 when nothing matches.

        The index is first made to hold exactly these blocks.
        """
        self._hold(blocks)
        words = self._bm25(query)
        scores = words + _MENTION * max(words.max(initial=0.0), 1.0) * self._mentioned(query)
        mine = scores[[self._number[block.label] for block in blocks]]
        top = mine.max(initial=0.0)
        return _with_neighbours(mine / top, blocks) if top > 0 else mine

    def _clear(self) -> None:
        self._number: dict[str, int] = {}
        self._lengths = array("d")
        self._postings: dict[str, tuple[array[int], array[float]]] = {}
        self._names: dict[str, array[int]] = {}
        self._alive = np.zeros(0, dtype=bool)

    def _hold(self, blocks: Sequence[Block]) -> None:
        dead = len(self._lengths) - len(self._number)
        if dead > max(_COMPACT_ABOVE, len(self._number)):
            self._clear()
        wanted = {block.label for block in blocks}
        for label in [label for label in self._number if label not in wanted]:
            del self._number[label]
        for block in blocks:
            if block.label not in self._number:
                self._add(block)
        self._alive = np.zeros(len(self._lengths), dtype=bool)
        self._alive[list(self._number.values())] = True

    def _add(self, block: Block) -> None:
        number = len(self._lengths)
        counts = Counter(terms(block.text))
        self._number[block.label] = number
        self._lengths.append(float(counts.total()))
        for term, count in counts.items():
            ids, weights = self._postings.setdefault(term, (array("l"), array("d")))
            ids.append(number)
            weights.append(float(count))
        for name in {name.lower() for name in block.identity}:
            self._names.setdefault(name, array("l")).append(number)

    def _bm25(self, query: str) -> Scores:
        scores = np.zeros(len(self._lengths))
        n_blocks = len(self._number)
        lengths = np.array(self._lengths)
        mean = lengths[self._alive].mean() if n_blocks else 0.0
        norm = _K1 * (1 - _B + _B * lengths / max(mean, 1.0))
        for term in set(terms(query)) & self._postings.keys():
            ids = np.array(self._postings[term][0])
            alive = self._alive[ids]
            ids, counts = ids[alive], np.array(self._postings[term][1])[alive]
            idf = math.log1p((n_blocks - len(ids) + 0.5) / (len(ids) + 0.5))
            scores[ids] += idf * counts * (_K1 + 1) / (counts + norm[ids])
        return scores

    def _mentioned(self, query: str) -> Scores:
        """1 for a block whose path, file name, tool or id stands in the query, else 0."""
        found = np.zeros(len(self._lengths))
        for name in _spelled(query) & self._names.keys():
            found[np.array(self._names[name])] = 1.0
        return found


def _spelled(query: str) -> set[str]:
    """Everything in a text that could be a name: words with what is in and after their slashes."""
    runs = query.lower().split()
    bare = (run.strip("\"'`.,;:!?()[]{}<>*") for run in runs)
    return {form for run in bare for form in (run, run.rsplit("/", 1)[-1]) if form}


def _with_neighbours(scores: Scores, blocks: Sequence[Block]) -> Scores:
    shared = scores.copy()
    left, right = _adjacent(blocks)
    shared[left] = np.maximum(shared[left], _NEIGHBOUR * scores[right])
    shared[right] = np.maximum(shared[right], _NEIGHBOUR * scores[left])
    return shared


def _adjacent(blocks: Sequence[Block]) -> tuple[Indexes, Indexes]:
    """Indexes of blocks that touch and are of one message: left ones, and their right ones."""
    starts = np.array([block.span.start for block in blocks], dtype=np.int64)
    ends = np.array([block.span.end for block in blocks], dtype=np.int64)
    messages = np.array([block.message for block in blocks], dtype=np.int64)
    order = starts.argsort(kind="stable")
    left, right = order[:-1], order[1:]
    touch = (ends[left] == starts[right]) & (messages[left] == messages[right])
    return left[touch], right[touch]
