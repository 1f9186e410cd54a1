"""Tables of words of similar meaning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evoke_proxy.core.retrieval.similar_words import SimilarWordTable

WORDS = ["boss", "supervisor", "wine"]


def table(**changed: Any) -> SimilarWordTable:
    arrays: dict[str, Any] = {
        "words": WORDS,
        "counts": np.array([1, 2, 0], np.uint8),
        "others": np.array([1, 0, 2], np.uint16),
        "similarities": np.array([153, 153, 102], np.uint8),
    }
    return SimilarWordTable(**{**arrays, **changed})


def test_each_word_has_its_similar_words() -> None:
    found = table()
    assert found["boss"] == [("supervisor", 0.6)]
    assert found["supervisor"] == [("boss", 0.6), ("wine", 0.4)]
    assert found["wine"] == []
    assert list(found) == WORDS and len(found) == 3


def test_an_unknown_word_has_none() -> None:
    assert table().get("chief") is None
    with pytest.raises(KeyError):
        table()["chief"]


def test_more_pairs_than_a_byte_counts_are_found() -> None:
    words = [f"w{n}" for n in range(600)]
    found = SimilarWordTable(
        words,
        np.full(600, 255, np.uint8),
        np.tile(np.arange(255, dtype=np.uint16), 600),
        np.full(600 * 255, 255, np.uint8),
    )
    assert found["w599"][254] == ("w254", 1.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"words": WORDS[:2]},
        {"counts": np.array([1, 2, 1], np.uint8)},
        {"similarities": np.array([153], np.uint8)},
        {"others": np.array([1, 0, 3], np.uint16)},
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="words"):
        table(**changed)
