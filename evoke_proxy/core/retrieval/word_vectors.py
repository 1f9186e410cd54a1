"""Makes the vector of a text from a table that has one vector for each word piece.

This is a static embedding as model2vec makes it: no network runs, a text is the sum of the vectors
of its pieces, scaled to unit length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.wordpiece import WordPieces


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
        """Return the unit vectors [n, d] of n texts; zeros for a text without a known piece."""
        found = np.zeros((len(texts), self.dimensions), np.float32)
        for row, text in zip(found, texts, strict=True):
            ids = self._pieces.ids(text)
            if ids:
                np.matmul(self._scales[ids], self._rows[ids].astype(np.float32), out=row)
        lengths = np.linalg.norm(found, axis=1, keepdims=True)
        found /= np.maximum(lengths, 1e-12)
        return found
