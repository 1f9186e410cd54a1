"""What the words of a question say about blocks: BM25 over what stands in the blocks of a session.

Words that stand in most blocks weigh next to nothing, because the statistics are the session's own.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.retrieval.grams import Lookalikes
from evoke_proxy.core.retrieval.terms import FUNCTION_WORDS, terms

Scores = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

# Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009).
_K1 = 1.2
_B = 0.75
_FUNCTION_WEIGHT = 0.1
# Words that stand in a larger share of the blocks are not asked what they look like.
_COMMON_SHARE = 0.05
# What a larger share of many texts has tells nothing.
_MOST, _MANY = 0.5, 64


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What one word of a question says: of each text that has it a score, and how much it has it, 1
    for the word itself; `weight` is how much the word tells in this session."""

    numbers: Numbers
    scores: Scores
    having: Scores
    weight: float


class Postings:
    """The words of numbered texts. Numbers are given in order from 0; texts only get more."""

    def __init__(self) -> None:
        self._lengths = array("d")
        self._having: dict[str, tuple[array[int], array[float]]] = {}
        self._lookalikes = Lookalikes()
        self._alive: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._norms: Scores = np.zeros(0)
        self._count = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, text: str) -> int:
        """Take in a text; its number."""
        number = len(self._lengths)
        counts = Counter(terms(text))
        self._lengths.append(float(counts.total()))
        for term, count in counts.items():
            having = self._having.get(term)
            if having is None:
                having = self._having[term] = (array("l"), array("d"))
                self._lookalikes.add(term)
            having[0].append(number)
            having[1].append(count)
        return number

    def ask_about(self, numbers: Numbers) -> None:
        """From now on only these texts count, for statistics too."""
        lengths = np.array(self._lengths)
        self._alive = np.zeros(len(lengths), np.bool_)
        self._alive[numbers] = True
        self._count = len(numbers)
        mean = lengths[numbers].mean() if len(numbers) else 0.0
        self._norms = _K1 * (1 - _B + _B * lengths / max(mean, 1.0))

    def exact(self, term: str) -> Evidence:
        """What a word says about the texts that have exactly it."""
        return self._evidence(term, *self._found(term))

    def alike(self, said: Mapping[str, Evidence]) -> dict[str, Evidence]:
        """What words say about the texts that have them or one that looks like them, `said` being
        what they say by themselves: the very same where no other word is asked."""
        most = max(1.0, _COMMON_SHARE * self._count)
        rare = [
            term
            for term, exact in said.items()
            if len(exact.numbers) <= most and term not in FUNCTION_WORDS
        ]
        others = zip(rare, self._lookalikes.like(rare), strict=True)
        return {**said, **{term: self._with(term, like) for term, like in others if like}}

    def _with(self, term: str, others: Sequence[tuple[str, float]]) -> Evidence:
        """What a word says together with others, each with how much it looks like it."""
        found = [self._found(term)]
        for word, like in others:
            numbers, counts = self._found(word)
            found.append((numbers, counts * like**2))
        together = np.concatenate([one for one, _ in found])
        weights = np.concatenate([one for _, one in found])
        unique, at = np.unique(together, return_inverse=True)
        alike: Scores = np.bincount(at, weights, len(unique)).astype(np.float64)
        return self._evidence(term, unique, alike)

    def telling(self, text: str) -> list[str]:
        """The words of a text to ask about, each once: of all those that say something here.

        Words that only ask, and those that most texts have, count where there are no others.
        """
        said = list(dict.fromkeys(terms(text)))
        content = [term for term in said if term not in FUNCTION_WORDS]
        rare = [term for term in content if self._share(term) <= _MOST]
        return rare or content or said

    def _share(self, term: str) -> float:
        """In how large a share of the texts a word stands, at most."""
        having = self._having.get(term)
        return len(having[0]) / self._count if having and self._count >= _MANY else 0.0

    def _found(self, term: str) -> tuple[Numbers, Scores]:
        """Numbers of the texts that have a word, and how often."""
        having = self._having.get(term)
        if having is None:
            return np.zeros(0, np.int64), np.zeros(0)
        numbers = np.array(having[0])
        alive = self._alive[numbers]
        return numbers[alive], np.array(having[1])[alive]

    def _evidence(self, term: str, numbers: Numbers, counts: Scores) -> Evidence:
        having = len(numbers)
        weight = math.log1p((self._count - having + 0.5) / (having + 0.5))
        weight *= _FUNCTION_WEIGHT if term in FUNCTION_WORDS else 1.0
        scores = weight * counts * (_K1 + 1) / (counts + self._norms[numbers])
        return Evidence(numbers, scores, np.minimum(counts, 1.0), weight)


def summed(evidence: Iterable[Evidence], size: int) -> tuple[Scores, Scores]:
    """Of each of `size` texts its score, and how much of the words' weight it has.

    The second is in [0, 1]: 1 where every word of the question stands.
    """
    scores, weights, possible = np.zeros(size), np.zeros(size), 0.0
    for one in evidence:
        scores[one.numbers] += one.scores
        weights[one.numbers] += one.weight * one.having
        possible += one.weight
    return scores, weights / possible if possible > 0 else weights
