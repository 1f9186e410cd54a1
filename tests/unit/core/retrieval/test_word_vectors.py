"""Word vectors: the vector of a text from a table of word pieces."""

from __future__ import annotations

import numpy as np
import pytest

from evoke_proxy.core.retrieval.word_vectors import WordVectors

ROWS = np.array([[100, 0], [0, 50], [-100, 0]], np.int8)
SCALES = np.array([0.01, 0.06, 0.01], np.float32)
TABLE = WordVectors(("east", "north", "west"), ROWS, SCALES)


def test_the_vector_of_a_text_is_the_normalised_sum_of_its_scaled_pieces() -> None:
    found = TABLE.vectors(["east", "North, east", "north north east"])
    assert found.dtype == np.float32
    for row, expected in zip(found, ([1, 0], [1, 3], [1, 6]), strict=True):
        assert np.allclose(row, np.array(expected) / np.linalg.norm(expected))


def test_a_text_without_known_pieces_or_with_sum_0_is_the_zero_vector() -> None:
    assert TABLE.vectors(["", "south", "east west"]).tolist() == [[0, 0]] * 3
    assert TABLE.vectors([]).shape == (0, 2)


def test_a_sum_within_its_rounding_errors_is_the_zero_vector() -> None:
    """0.1 + 0.2 - 0.3 in float32 is 0 or a rest of 1e-8, by the order of the additions."""
    rows = np.full((3, 2), [[100, 0]], np.int8)
    scales = np.array([0.1, 0.2, -0.3], np.float32)
    table = WordVectors(("one", "two", "three"), rows, scales)
    texts = ["one two three", "three two one", "two three one"]
    assert table.vectors(texts).tolist() == [[0, 0]] * 3


@pytest.mark.parametrize(
    ("pieces", "rows", "scales"),
    [(("a",), ROWS, SCALES), (("a", "b", "c"), ROWS, SCALES[:2]), (("a",), ROWS[0], SCALES[:1])],
)
def test_arrays_of_different_lengths_are_refused(
    pieces: tuple[str, ...], rows: np.ndarray, scales: np.ndarray
) -> None:
    with pytest.raises(ValueError, match="pieces, rows of shape"):
        WordVectors(pieces, rows, scales)
