"""The table of similar words: how it is made, and that the package's is that of its vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evoke_proxy.adapters.embedders.word_vectors import WordVectorEncoder
from evoke_proxy.core.retrieval.similar_words import SimilarWordTable
from evoke_proxy.core.retrieval.stemming import stem
from evoke_proxy.models import similar_words_file, word_vectors_file
from recipes.word_vectors.similar import (
    MAX_SIMILAR,
    MIN_SIMILARITY,
    is_compared,
    main,
    tables,
)


def table(words: list[str], vectors: list[list[float]]) -> SimilarWordTable:
    arrays = tables(words, np.array(vectors, np.float32))
    return SimilarWordTable(
        arrays["words"].tobytes().decode().split("\n"),
        arrays["counts"], arrays["others"], arrays["similarities"],
    )  # fmt: skip


def test_close_words_are_similar_but_not_the_forms_of_one() -> None:
    found = table(["dog", "dogs", "puppy", "car"], [[3, 0], [1, 0.1], [0.8, 0.6], [0, -2]])
    assert found["dog"] == [("puppy", pytest.approx(0.8, abs=0.002))]
    assert [word for word, _ in found["puppy"]] == ["dogs", "dog"]
    assert found["car"] == []


def test_of_many_similar_words_the_most_similar_ones_are_kept() -> None:
    angles = np.linspace(0, 1, MAX_SIMILAR + 45)
    names = [f"{a}{b}x" for a in "bcdfghjklmnpqrtvwxz" for b in "bcdfghjklmnpqrtvwxz"]
    words = names[: len(angles)]
    found = table(words, [[np.cos(angle), np.sin(angle)] for angle in angles])
    assert [word for word, _ in found[words[0]]] == words[1 : MAX_SIMILAR + 1]


@pytest.mark.parametrize("piece", ["the", "where", "ab", "##ing", "2004", "caf\u00e9", "x1y"])
def test_function_words_and_parts_of_words_are_not_compared(piece: str) -> None:
    assert is_compared("wine") and not is_compared(piece)


def test_the_packages_table_is_that_of_its_word_vectors() -> None:
    """Of some words; a cosine is rounded to a 255th, and may be rounded otherwise elsewhere."""
    encoder = WordVectorEncoder()
    found, words = encoder.similar_words, list(encoder.similar_words)
    assert len(words) > 20_000 and all(map(is_compared, words))
    asked = ["wine", "boss", "allergic", "drive", "sister"]
    cosines = encoder.documents(asked) @ encoder.documents(words).T
    stems = np.array([stem(word) for word in words])
    for word, row in zip(asked, cosines, strict=True):
        similar = dict(found[word])
        stored = np.array([similar.get(other, 0.0) for other in words])
        is_clear = (stems != stem(word)) & (np.abs(row - MIN_SIMILARITY) > 0.002)
        assert ((stored > 0) == (row > MIN_SIMILARITY))[is_clear].all()
        assert np.abs(stored - row)[stored > 0].max() < 0.004


def test_similar_words_are_of_one_subject() -> None:
    found = WordVectorEncoder().similar_words
    for word, other in {"wine": "grape", "boss": "supervisor", "allergic": "pollen"}.items():
        assert other in dict(found[word])
        assert word not in dict(found["car"])


def test_the_table_takes_little_room() -> None:
    assert similar_words_file().stat().st_size < 3 << 19


def test_a_table_is_written_and_read_again(tmp_path: Path) -> None:
    vectors, file = tmp_path / "vectors.npz", tmp_path / "new" / "similar.npz"
    pieces = np.frombuffer(b"wine\ngrape\n##es\ncar", np.uint8)
    rows = np.array([[100, 0], [80, 60], [90, 10], [0, 90]], np.int8)
    np.savez(vectors, pieces=pieces, rows=rows, scales=np.ones(4, np.float32))
    assert main([str(file), "--table", str(vectors)]) == 0
    found = WordVectorEncoder(word_vectors_file(), file).similar_words
    assert {word: [other for other, _ in found[word]] for word in found} == {
        "wine": ["grape"],
        "grape": ["wine", "car"],
        "car": ["grape"],
    }


def test_a_missing_table_of_vectors_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "x.npz"), "--table", str(tmp_path / "none.npz")]) == 1
    assert "none.npz does not exist" in capsys.readouterr().err
