"""Words that look alike: inflections, typing errors, fragments, found by their character n-grams.

The n-grams are of the session's words, not of its blocks: a word that stands in a hundred blocks is
taken apart once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

_SHORTEST = 4
_LONGEST = 40
# An n-gram that so large a share of the words has tells none of them from the others.
_MAX_SHARE = 0.05
_NEVER_PRUNED = 64
_CANDIDATES = 10
_ALIKE = 0.5
# Words of which so few trigrams are shared have no half of their bigrams in common.
_LEAST = 0.2
# What a word is worth that holds the other: port and ports, timeout and requesttimeout.
_HOLDS = 0.7


class Lookalikes:
    """The words of one session by their trigrams. Only grows; owned by its index."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._sizes = array("q")
        self._having: dict[str, array[int]] = {}

    def add(self, word: str) -> None:
        """Take in a word, once; numbers and what is not one word are left out."""
        if not comparable(word):
            return
        number = len(self._words)
        grams = _trigrams(word)
        self._words.append(word)
        self._sizes.append(len(grams))
        for gram in grams:
            self._having.setdefault(gram, array("q")).append(number)

    def like(self, words: Sequence[str]) -> list[list[tuple[str, float]]]:
        """For each word others that look like it, with how much (Dice's coefficient of their
        bigrams, 0.5 to 1), the most alike first."""
        asked = [word for word in words if comparable(word)]
        found: dict[str, list[tuple[str, float]]] = {}
        for word, others in zip(asked, self._candidates(asked), strict=True):
            mine = _bigrams(word)
            pairs = [(other, _alike(word, other, mine)) for other in others if other != word]
            likely = [pair for pair in pairs if pair[1] >= _ALIKE]
            found[word] = sorted(likely, key=lambda pair: (-pair[1], pair[0]))
        return [found.get(word, []) for word in words]

    def _candidates(self, words: Sequence[str]) -> list[list[str]]:
        """For each word those that share most of its trigrams; all of them are looked for at once,
        because each step costs as much for one as for all."""
        shapes, shared_by, counts = self._sharing(words)
        if not shared_by:
            return [[] for _ in words]
        asker = np.repeat(np.arange(len(words)), counts) * len(self._words)
        pairs = np.sort(np.array(shared_by) + asker)
        firsts = np.flatnonzero(np.concatenate(([True], pairs[1:] != pairs[:-1])))
        shared = np.diff(firsts, append=len(pairs))
        which, numbers = np.divmod(pairs[firsts], len(self._words))
        mine, sizes = np.array(shapes)[which], np.frombuffer(self._sizes, np.int64)[numbers]
        alike: npt.NDArray[np.float64] = 2 * shared / (mine + sizes)
        # One that holds the other shares all that is inside the shorter.
        likely = (alike >= _LEAST) | (shared >= np.minimum(mine, sizes) - 2)
        which, numbers, alike = which[likely], numbers[likely], alike[likely]
        order = np.lexsort((numbers, -alike, which))
        ends = np.searchsorted(which, np.arange(len(words) + 1))
        return [
            [self._words[i] for i in numbers[order[start : min(end, start + _CANDIDATES)]].tolist()]
            for start, end in pairwise(ends.tolist())
        ]

    def _sharing(self, words: Sequence[str]) -> tuple[list[int], array[int], list[int]]:
        """How many trigrams each word has; the numbers of the words that share them, once for each
        that is not too common; and how many of these are for each word."""
        most = max(_NEVER_PRUNED, int(_MAX_SHARE * len(self._words)))
        shapes, numbers, counts = [], array("q"), []
        for word in words:
            before, grams = len(numbers), _trigrams(word)
            for gram in grams & self._having.keys():
                if len(self._having[gram]) <= most:
                    numbers.extend(self._having[gram])
            shapes.append(len(grams))
            counts.append(len(numbers) - before)
        return shapes, numbers, counts


def comparable(word: str) -> bool:
    """Whether words that look alike may mean the same; no number that is nearly the same does."""
    return _SHORTEST <= len(word) <= _LONGEST and word.isalnum() and not word.isdigit()


def _bigrams(word: str) -> set[str]:
    padded = f"^{word}$"
    return {padded[i : i + 2] for i in range(len(padded) - 1)}


def _trigrams(word: str) -> set[str]:
    padded = f"^{word}$"
    return set(map("".join, zip(padded, padded[1:], padded[2:], strict=False)))


def _alike(word: str, other: str, mine: set[str]) -> float:
    theirs = _bigrams(other)
    # One digit of a code makes another code; part of it is still a part of it.
    dice = 2 * len(mine & theirs) / (len(mine) + len(theirs)) if (word + other).isalpha() else 0.0
    return max(dice, _HOLDS) if word in other or other in word else dice
