"""Finds terms of similar spelling by character n-grams: inflections, typing errors, fragments.

The index contains the n-grams of the distinct terms of a session, not of its blocks: a term that a
hundred blocks contain is indexed once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evoke_proxy.core.model.block_table import FloatArray, Positions

# Terms of other lengths are not compared.
_MIN_CHARS = 4
_MAX_CHARS = 40
# An n-gram that a larger share of the terms contains does not distinguish them. It is ignored when
# more than _ALWAYS_COUNTED terms contain it.
_MAX_SHARE = 0.05
_ALWAYS_COUNTED = 64
# Of the indexed terms, this many with the largest overlap of trigrams are compared by bigrams.
_MAX_CANDIDATES = 10
# Terms with a lower similarity are not similar.
_MIN_SIMILARITY = 0.5
# Terms whose trigrams overlap less cannot have half of their bigrams in common.
_MIN_TRIGRAM_OVERLAP = 0.2
# A search counts at most this many occurrences of trigrams in indexed terms: _COUNTED_PER_TERM for
# each indexed term, which is as many as 200 words that were never used have in a long session, and
# at least and at most the other two. Of more, those of the rarest trigrams are counted.
_COUNTED_PER_TERM, _LEAST_COUNTED, _MOST_COUNTED = 16, 1 << 17, 1 << 20
# So many are sorted at once, which takes 5 ms and 6 MiB.
_SORTED_AT_ONCE = 1 << 17
# Terms whose similar ones are kept until other terms are added: the texts of a question have terms
# in common.
_MAX_FOUND = 1024
# Added terms that wait for the next search, which takes a millisecond longer for them.
_MAX_WAITING = 256
# Fewest letters of a term that is compared with others for typing errors.
_MIN_MISSPELT = 5
# Similarity of a term to one that contains it: port and ports, timeout and requesttimeout.
_CONTAINMENT = 0.7


@dataclass(frozen=True, slots=True, eq=False)
class _SharedTrigrams:
    """Pairs of a query term and an indexed term that share trigrams.

    Attributes:
        queries: [p] index of the query term of each pair, ascending.
        terms: [p] number of the indexed term of each pair.
        shared: [p] number of trigrams that the two share.
        query_sizes: [q] number of trigrams of each query term.
    """

    queries: Positions
    terms: Positions
    shared: Positions
    query_sizes: Positions


class FuzzyTerms:
    """The distinct terms of one session, searchable by trigrams. Terms are never removed."""

    def __init__(self) -> None:
        self._terms: list[str] = []
        # The number of trigrams of each term, and the numbers of the terms with each trigram.
        self._sizes = array("q")
        self._postings: dict[str, array[int]] = {}
        # Terms that were added since the last search or `settle`.
        self._waiting: list[str] = []
        # What `similar` has found since terms were added.
        self._found: dict[str, list[tuple[str, float]]] = {}

    def add(self, term: str) -> None:
        """Add a term that was not added before; one that is not `comparable` is ignored."""
        self._waiting.append(term)
        if len(self._waiting) >= _MAX_WAITING:
            self.settle()

    def settle(self) -> None:
        """Divide the added terms into trigrams now, which a search would do first."""
        if not self._waiting:
            return
        self._found.clear()
        postings = self._postings
        for term in filter(comparable, self._waiting):
            number = len(self._terms)
            trigrams = _trigrams(term)
            self._terms.append(term)
            self._sizes.append(len(trigrams))
            for trigram in trigrams:
                numbers = postings.get(trigram)
                if numbers is None:
                    numbers = postings[trigram] = array("q")
                numbers.append(number)
        self._waiting.clear()

    def similar(self, terms: Sequence[str]) -> list[list[tuple[str, float]]]:
        """Return for each term the indexed terms that are similar to it, the most similar first.

        Each comes with its similarity in [0.5, 1]: Dice's coefficient of the bigrams.
        """
        self.settle()
        kept = self._found
        queries = [term for term in dict.fromkeys(terms) if comparable(term) and term not in kept]
        found = {term: kept[term] for term in terms if term in kept}
        if not queries:
            return [found.get(term, []) for term in terms]
        for query, candidates in zip(queries, self._candidates(queries), strict=True):
            bigrams = _bigrams(query)
            pairs = [
                (term, _similarity(query, term, bigrams)) for term in candidates if term != query
            ]
            similar = [pair for pair in pairs if pair[1] >= _MIN_SIMILARITY]
            found[query] = sorted(similar, key=lambda pair: (-pair[1], pair[0]))
        if len(kept) + len(queries) > _MAX_FOUND:
            kept.clear()
        kept.update((query, found[query]) for query in queries[:_MAX_FOUND])
        return [found.get(term, []) for term in terms]

    def _candidates(self, queries: Sequence[str]) -> list[list[str]]:
        """Return for each query term the 10 indexed terms whose trigrams overlap most with its own.

        Many queries are ranked in one pass, because an array operation costs about the same for one
        query as for several.
        """
        trigrams_of = list(map(_trigrams, queries))
        sizes, counted = list(map(len, trigrams_of)), self._counted(trigrams_of)
        found, start, n_sorted = list[list[str]](), 0, 0
        for end, trigrams in enumerate(counted):
            n_own = sum(len(self._postings[trigram]) for trigram in trigrams)
            if n_sorted and n_sorted + n_own > _SORTED_AT_ONCE:
                found += self._ranked(self._shared_trigrams(counted[start:end], sizes[start:end]))
                start, n_sorted = end, 0
            n_sorted += n_own
        return found + self._ranked(self._shared_trigrams(counted[start:], sizes[start:]))

    def _ranked(self, pairs: _SharedTrigrams) -> list[list[str]]:
        """Return for each query term the 10 terms whose trigrams overlap most with its own."""
        sizes = (
            np.frombuffer(self._sizes, np.int64)[pairs.terms] if len(pairs.terms) else pairs.terms
        )
        query_sizes = pairs.query_sizes[pairs.queries]
        overlap: FloatArray = 2 * pairs.shared / np.maximum(query_sizes + sizes, 1)
        # A term that contains the other shares all trigrams inside the shorter one.
        contains = pairs.shared >= np.minimum(query_sizes, sizes) - 2
        likely = (overlap >= _MIN_TRIGRAM_OVERLAP) | contains
        of_query, numbers, overlap = pairs.queries[likely], pairs.terms[likely], overlap[likely]
        order = np.lexsort((numbers, -overlap, of_query))
        bounds = np.searchsorted(of_query, np.arange(len(pairs.query_sizes) + 1))
        return [
            [
                self._terms[i]
                for i in numbers[order[start : min(end, start + _MAX_CANDIDATES)]].tolist()
            ]
            for start, end in pairwise(bounds.tolist())
        ]

    def _counted(self, trigrams_of: Sequence[set[str]]) -> list[list[str]]:
        """Return those of the trigrams of each query term that are counted.

        These are the trigrams of indexed terms, without those that too many of them contain, and
        without the most common ones if they are too many; see _COUNTED_PER_TERM.
        """
        limit, postings = max(_ALWAYS_COUNTED, int(_MAX_SHARE * len(self._terms))), self._postings
        found = [
            [one for one in trigrams & postings.keys() if len(postings[one]) <= limit]
            for trigrams in trigrams_of
        ]
        most = max(_LEAST_COUNTED, min(_MOST_COUNTED, _COUNTED_PER_TERM * len(self._terms)))
        if sum(len(postings[one]) for trigrams in found for one in trigrams) <= most:
            return found
        all_found = [(one, i) for i, trigrams in enumerate(found) for one in trigrams]
        counted, n_counted = [list[str]() for _ in found], 0
        for size, one, i in sorted((len(postings[one]), one, i) for one, i in all_found):
            n_counted += size
            if n_counted > most:
                break
            counted[i].append(one)
        return counted

    def _shared_trigrams(
        self, counted: Sequence[Sequence[str]], sizes: Sequence[int]
    ) -> _SharedTrigrams:
        """Count the trigrams that each query term shares with each indexed term.

        `counted` has the trigrams of each query term that are counted, `sizes` how many it has.
        """
        query_sizes, matches, n_matches = np.array(sizes, np.int64), array("q"), list[int]()
        for trigrams in counted:
            before = len(matches)
            for trigram in trigrams:
                matches.extend(self._postings[trigram])
            n_matches.append(len(matches) - before)
        if not len(matches):
            none = np.zeros(0, np.int64)
            return _SharedTrigrams(none, none, none, query_sizes)
        # One number for each pair, so that equal pairs are neighbours once sorted.
        of_query = np.repeat(np.arange(len(counted)), n_matches) * len(self._terms)
        codes = np.sort(np.array(matches, np.int64) + of_query)
        firsts = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
        query_index, terms = np.divmod(codes[firsts], len(self._terms))
        shared = np.diff(firsts, append=len(codes))
        return _SharedTrigrams(query_index, terms, shared, query_sizes)


def comparable(term: str) -> bool:
    """Return whether a term is compared with others: 4 to 40 letters or digits, and no number."""
    return _MIN_CHARS <= len(term) <= _MAX_CHARS and term.isalnum() and not term.isdigit()


def is_misspelt(term: str, other: str) -> bool:
    """Return whether one typing error makes a term of another one.

    An error adds, leaves out or replaces a letter, or exchanges two neighbours (Damerau, "A
    Technique for Computer Detection and Correction of Spelling Errors", 1964). The first letter is
    right, terms of fewer than 5 letters are too much alike, and another digit is another code.
    """
    n, longer = len(term), len(other) - len(term)
    is_likely = n >= _MIN_MISSPELT and -1 <= longer <= 1 and term[0] == other[0] and term != other
    if not is_likely or not (term + other).isalpha():
        return False
    i = next((i for i, pair in enumerate(zip(term, other, strict=False)) if pair[0] != pair[1]), n)
    if longer:
        return term[i + (longer < 0) :] == other[i + (longer > 0) :]
    is_exchanged = term[i : i + 2] == other[i : i + 2][::-1] and term[i + 2 :] == other[i + 2 :]
    return is_exchanged or term[i + 1 :] == other[i + 1 :]


def _bigrams(term: str) -> set[str]:
    padded = f"^{term}$"
    return {padded[i : i + 2] for i in range(len(padded) - 1)}


def _trigrams(term: str) -> set[str]:
    padded = f"^{term}$"
    return set(map("".join, zip(padded, padded[1:], padded[2:], strict=False)))


def _similarity(query: str, term: str, query_bigrams: set[str]) -> float:
    """Return Dice's coefficient of two terms, at least _CONTAINMENT when one contains the other.

    Codes with digits are similar only by containment, because another digit is another code.
    """
    dice = 0.0
    if (query + term).isalpha():
        bigrams = _bigrams(term)
        dice = 2 * len(query_bigrams & bigrams) / (len(query_bigrams) + len(bigrams))
    return max(dice, _CONTAINMENT) if query in term or term in query else dice
