"""Words that look alike: inflections, typing errors, fragments, found by their character n-grams.

The n-grams are of the session's words, not of its blocks: a word that stands in a hundred blocks is
taken apart once.
"""

from __future__ import annotations

from array import array

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
        grams = _grams(word, 3)
        self._words.append(word)
        self._sizes.append(len(grams))
        for gram in grams:
            self._having.setdefault(gram, array("q")).append(number)

    def like(self, word: str) -> list[tuple[str, float]]:
        """Other words that look like this one, with how much (Dice's coefficient of their bigrams,
        0.5 to 1), the most alike first."""
        if not comparable(word):
            return []
        mine = _grams(word, 2)
        pairs = [(other, _alike(word, other, mine)) for other in self._candidates(word)]
        found = [(other, alike) for other, alike in pairs if alike >= _ALIKE and other != word]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))

    def _candidates(self, word: str) -> list[str]:
        grams = _grams(word, 3)
        most = max(_NEVER_PRUNED, int(_MAX_SHARE * len(self._words)))
        having = [self._having[gram] for gram in grams if gram in self._having]
        rows = [np.array(row) for row in having if len(row) <= most]
        if not rows:
            return []
        shared = np.bincount(np.concatenate(rows))
        numbers = np.flatnonzero(shared > 0)
        counts, sizes = shared[numbers], np.frombuffer(self._sizes, np.int64)[numbers]
        alike: npt.NDArray[np.float64] = 2 * counts / (len(grams) + sizes)
        # One that holds the other shares all that is inside the shorter.
        likely = (alike >= _LEAST) | (counts >= np.minimum(len(grams), sizes) - 2)
        numbers, alike = numbers[likely], alike[likely]
        best = np.lexsort((numbers, -alike))[:_CANDIDATES]
        return [self._words[i] for i in numbers[best].tolist()]


def comparable(word: str) -> bool:
    """Whether words that look alike may mean the same; no number that is nearly the same does."""
    return _SHORTEST <= len(word) <= _LONGEST and word.isalnum() and not word.isdigit()


def _grams(word: str, n: int) -> set[str]:
    padded = f"^{word}$"
    return {padded[i : i + n] for i in range(len(padded) - n + 1)}


def _alike(word: str, other: str, mine: set[str]) -> float:
    theirs = _grams(other, 2)
    # One digit of a code makes another code; part of it is still a part of it.
    dice = 2 * len(mine & theirs) / (len(mine) + len(theirs)) if (word + other).isalpha() else 0.0
    return max(dice, _HOLDS) if word in other or other in word else dice
