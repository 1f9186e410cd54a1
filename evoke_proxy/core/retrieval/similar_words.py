"""Words of similar meaning, from a table: "wine" and "grape", "boss" and "supervisor"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.retrieval.encoding import SimilarWords

_LARGEST = 255
"""What a similarity of 1 is in the table."""


class SimilarWordTable(SimilarWords):
    """For each word of a table the similar ones, each with its similarity in (0, 1].

    The most similar one comes first. Other forms of the word, and function words, are not among
    them. May be used by several threads at a time.
    """

    def __init__(
        self,
        words: Sequence[str],
        counts: npt.NDArray[np.uint8],
        others: npt.NDArray[np.uint16],
        similarities: npt.NDArray[np.uint8],
    ) -> None:
        """Take for each of `words` the number [n] of its similar words.

        `others` [p] has the indexes in `words` of those of the first word, then of the second, and
        so on, and `similarities` [p] 255 times their similarity. ValueError when these do not
        belong together.
        """
        ends = np.cumsum(counts, dtype=np.int64)
        n_pairs = int(ends[-1]) if len(ends) else 0
        if not (len(words) == len(counts) and n_pairs == len(others) == len(similarities)):
            raise ValueError(
                f"{len(words)} words and {len(counts)} counts, of {n_pairs} pairs; {len(others)}"
                f" words and {len(similarities)} similarities of pairs"
            )
        if n_pairs and int(others.max()) >= len(words):
            raise ValueError(f"a similar word has the index {others.max()}, of {len(words)} words")
        self._words = words
        self._numbers = {word: number for number, word in enumerate(words)}
        self._ends = ends
        self._counts = counts
        self._others = others
        self._similarities = similarities

    def __getitem__(self, word: str) -> Sequence[tuple[str, float]]:
        number = self._numbers[word]
        end = int(self._ends[number])
        pairs = slice(end - int(self._counts[number]), end)
        others, similarities = self._others[pairs].tolist(), self._similarities[pairs].tolist()
        return [
            (self._words[other], similarity / _LARGEST)
            for other, similarity in zip(others, similarities, strict=True)
        ]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)
