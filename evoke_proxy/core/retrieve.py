"""Recover-scores: how much each block has to do with the question.

BM25 over the words of the blocks, plus exact mentions of what a block is called. Words that stand
in most blocks of the session weigh next to nothing, because the statistics are the session's own.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from operator import is_

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.block_table import BlockTable
from evoke_proxy.core.blocks import Block
from evoke_proxy.core.question import Question

Scores = npt.NDArray[np.float64]

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
        return len(self._held)

    def relevance(self, question: Question, blocks: BlockTable) -> Scores:
        """One value in [0, 1] a block, in their order; all 0 when nothing matches.

        The index is first made to hold exactly these blocks.
        """
        self._hold(blocks)
        query = question.text
        words = self._bm25(query)
        scores = words + _MENTION * max(words.max(initial=0.0), 1.0) * self._mentioned(query)
        mine = scores[self._numbers]
        top = mine.max(initial=0.0)
        return _with_neighbours(mine / top, blocks) if top > 0 else mine

    def _clear(self) -> None:
        self._held = BlockTable()
        self._numbers = np.zeros(0, dtype=np.int64)
        self._lengths = array("d")
        self._postings: dict[str, tuple[array[int], array[float]]] = {}
        self._names: dict[str, array[int]] = {}
        self._alive = np.zeros(0, dtype=bool)

    def _hold(self, blocks: BlockTable) -> None:
        dead = len(self._lengths) - len(self._held)
        if dead > max(_COMPACT_ABOVE, len(self._held)):
            self._clear()
        same = _shared(self._held.labels, blocks.labels)
        if same == len(self._held) == len(blocks):
            return
        had = dict(zip(self._held.labels[same:], self._numbers[same:].tolist(), strict=True))
        added = [had[b.label] if b.label in had else self._add(b) for b in blocks[same:]]
        self._numbers = np.concatenate([self._numbers[:same], np.array(added, np.int64)])
        self._held = blocks
        self._alive = np.zeros(len(self._lengths), dtype=bool)
        self._alive[self._numbers] = True

    def _add(self, block: Block) -> int:
        number = len(self._lengths)
        counts = Counter(terms(block.text))
        self._lengths.append(float(counts.total()))
        for term, count in counts.items():
            ids, weights = self._postings.setdefault(term, (array("l"), array("d")))
            ids.append(number)
            weights.append(float(count))
        for name in {name.lower() for name in block.identity}:
            self._names.setdefault(name, array("l")).append(number)
        return number

    def _bm25(self, query: str) -> Scores:
        scores = np.zeros(len(self._lengths))
        n_blocks = len(self._held)
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


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many labels two tables begin with alike: the very same objects, which is quick to see."""
    same = np.fromiter(map(is_, one, other), np.bool_, min(len(one), len(other)))
    return len(same) if same.all() else int(same.argmin())


def _with_neighbours(scores: Scores, blocks: BlockTable) -> Scores:
    shared = scores.copy()
    left = blocks.adjacent()
    right = left + 1
    shared[left] = np.maximum(shared[left], _NEIGHBOUR * scores[right])
    shared[right] = np.maximum(shared[right], _NEIGHBOUR * scores[left])
    return shared
