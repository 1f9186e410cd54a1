"""Vectors of texts from a table of word pieces."""

from __future__ import annotations

import numpy as np
import pytest

from evoke_proxy.core.retrieval.word_vectors import WordVectors

ROWS = np.array([[100, 0], [0, 50], [-100, 0]], np.int8)
SCALES = np.array([0.01, 0.06, 0.01], np.float32)
TABLE = WordVectors(("east", "north", "west"), ROWS, SCALES)


def test_a_text_is_the_scaled_sum_of_its_pieces() -> None:
    found = TABLE.vectors(["east", "North, east", "north north east"])
    assert found.dtype == np.float32
    for row, wanted in zip(found, ([1, 0], [1, 3], [1, 6]), strict=True):
        assert np.allclose(row, np.array(wanted) / np.linalg.norm(wanted))


def test_texts_without_a_direction_are_zeros() -> None:
    assert TABLE.vectors(["", "south", "east west"]).tolist() == [[0, 0]] * 3
    assert TABLE.vectors([]).shape == (0, 2)


@pytest.mark.parametrize(
    ("pieces", "rows", "scales"),
    [(("a",), ROWS, SCALES), (("a", "b", "c"), ROWS, SCALES[:2]), (("a",), ROWS[0], SCALES[:1])],
)
def test_arrays_that_do_not_belong_together_are_refused(
    pieces: tuple[str, ...], rows: np.ndarray, scales: np.ndarray
) -> None:
    with pytest.raises(ValueError, match="pieces, rows of shape"):
        WordVectors(pieces, rows, scales)
