"""Makes the vector of a text from a table that has one vector for each word piece.

This is a static embedding: no network runs, a text is the sum of the vectors of its pieces, scaled
to unit length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.wordpiece import WordPieces

_EPSILON = float(np.finfo(np.float32).eps)
"""Relative rounding error of one operation."""
_LARGEST = 128.0
"""Largest magnitude of a value of `rows`, which are int8."""
_TEXTS_AT_ONCE = 64
"""Texts whose rows are copied at once."""


class WordVectors:
    """Vectors of word pieces; may be used by several threads at a time.

    Attributes:
        dimensions: The length d of its vectors.
    """

    def __init__(
        self, pieces: Sequence[str], rows: npt.NDArray[np.int8], scales: npt.NDArray[np.float32]
    ) -> None:
        """Take `rows` [n, d] and `scales` [n]: the vector of `pieces[i]` is scales[i] * rows[i].

        Raises ValueError when the three do not belong together.
        """
        if rows.ndim != 2 or not len(pieces) == len(rows) == len(scales):
            raise ValueError(
                f"{len(pieces)} pieces, rows of shape {rows.shape}, {len(scales)} scales"
            )
        self._pieces = WordPieces(pieces)
        self._rows = rows
        self._scales = scales
        self.dimensions = int(rows.shape[1])

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Return the unit vectors [n, d] of n texts; zeros for a text without a known piece.

        A sum no longer than its rounding errors is zero as well: pieces that cancel each other out
        leave a rest that depends on the processor's order of additions.
        """
        sums = np.zeros((len(texts), self.dimensions), np.float32)
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            self._add_up(
                texts[start : start + _TEXTS_AT_ONCE], sums[start : start + _TEXTS_AT_ONCE]
            )
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        sums /= np.maximum(lengths, 1e-12)
        return sums

    def _add_up(self, texts: Sequence[str], sums: Vectors) -> None:
        """Write the sum of the vectors of each text's pieces into the rows of `sums`."""
        ids_of_texts = [self._pieces.ids(text) for text in texts]
        ids = list(chain.from_iterable(ids_of_texts))
        if not ids:
            return
        scales, rows = self._scales[ids], self._rows[ids].astype(np.float32)
        at, bounds = 0, np.zeros(len(texts))
        for i, of_text in enumerate(ids_of_texts):
            end = at + len(of_text)
            if of_text:
                np.matmul(scales[at:end], rows[at:end], out=sums[i])
                bounds[i] = len(of_text) * np.abs(scales[at:end]).sum()
            at = end
        # n eps times the sum of the magnitudes bounds the error of a sum of n products.
        sums[np.abs(sums).max(axis=1) <= _EPSILON * _LARGEST * bounds] = 0
