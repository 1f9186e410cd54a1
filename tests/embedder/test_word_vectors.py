"""The built-in word vectors: their pieces against the package tokenizers, their rows against the
encoder that they were made from."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from embedder_texts import TEXTS
from tokenizers import Tokenizer

from bench import evidence, retrieval_texts
from bench.word_vectors import encoded, is_word_piece, make, rarity_weights, vocabulary
from evoke_proxy.core.retrieval.wordpiece import WordPieces
from evoke_proxy.models import word_vectors_file

UNKNOWN = "[UNK]"


@pytest.fixture(scope="module")
def reference(minilm_directory: Path) -> Tokenizer:
    """The tokenizer of the encoder; marks such as [CLS] in a text are text."""
    tokenizer = Tokenizer.from_file(str(minilm_directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.fixture(scope="module")
def names(minilm_directory: Path) -> list[str]:
    return vocabulary(minilm_directory)


def differing(reference: Tokenizer, names: list[str], texts: list[str]) -> list[str]:
    """The texts that are cut in another way than by the library."""
    ours = WordPieces(names)
    theirs = reference.encode_batch(texts, add_special_tokens=False)
    return [
        text
        for text, encoding in zip(texts, theirs, strict=True)
        if [names[i] for i in ours.ids(text)] != [t for t in encoding.tokens if t != UNKNOWN]
    ]


def test_pieces_of_prose_code_and_other_scripts(reference: Tokenizer, names: list[str]) -> None:
    texts = [text for text in TEXTS if text.isprintable() or text.isascii()]
    texts += [text for talk in evidence.conversations() for text in talk.texts]
    texts += [fact.fact for fact in retrieval_texts.FACTS]
    texts += [path.read_text("utf-8") for path in Path(evidence.__file__).parent.glob("*.py")]
    assert len(texts) > 500
    assert differing(reference, names, texts) == []


def test_pieces_of_random_unicode(reference: Tokenizer, names: list[str]) -> None:
    """Characters that are younger than the library's tables, of Unicode 8, are left out."""
    chance, texts = random.Random(17), []
    ranges = ((0x20, 0x7F), (0xA0, 0x530), (0x590, 0x5F5), (0x3040, 0x3100), (0x4E00, 0x9FA6),
              (0xAC00, 0xD7A4), (0x2000, 0x2070), (0x1F300, 0x1F580))  # fmt: skip
    for _ in range(3000):
        low, high = chance.choice(ranges)
        text = "".join(
            chr(chance.randrange(low, high) if chance.random() < 0.6 else chance.randrange(9, 127))
            for _ in range(chance.randrange(1, 40))
        )
        texts.append("".join(c for c in text if unicodedata.ucd_3_2_0.category(c) != "Cn"))
    assert differing(reference, names, texts) == []


def test_pieces_of_each_character(reference: Tokenizer, names: list[str]) -> None:
    """Of the first plane; what differs is younger than Unicode 8, or changed its category since."""
    texts = [f"a{chr(code)}b" for code in range(0x10000) if not 0xD800 <= code < 0xE000]
    found = {text[1] for text in differing(reference, names, texts)}
    known = {c for c in found if unicodedata.ucd_3_2_0.category(c) != "Cn"}
    assert {c for c in known if unicodedata.category(c) == unicodedata.ucd_3_2_0.category(c)} == (
        set()
    )
    assert len(known) <= 4 and len(found) <= 400


def test_long_words_end_in_time_and_alike(reference: Tokenizer, names: list[str]) -> None:
    chance = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    texts = ["".join(chance.choices(letters, k=size)) for size in range(1, 130)]
    texts += [letter * size for letter in "ax7" for size in (99, 100, 101, 1000)]
    assert differing(reference, names, texts) == []


def test_the_table_has_the_pieces_of_the_vocabulary(names: list[str]) -> None:
    with np.load(word_vectors_file()) as table:
        pieces = table["pieces"].tobytes().decode("utf-8").split("\n")
    assert pieces == [name for name in names if is_word_piece(name)]


def test_the_rows_are_those_of_the_encoder(minilm_directory: Path, names: list[str]) -> None:
    """Each row is a linear map of the encoder's, weighted: on 2,000 tokens the rest is rounding.

    `python -m bench.word_vectors` makes all of it; the map of all tokens is not known here.
    """
    kept = [token for token, name in enumerate(names) if is_word_piece(name)]
    chosen = sorted(random.Random(5).sample(range(len(kept)), 2000))
    tokens = [kept[i] for i in chosen]
    with np.load(word_vectors_file()) as table:
        scales = table["scales"][chosen, None].astype(np.float64)
        rows = table["rows"][chosen] * scales
    weights = rarity_weights(tokens, names)[:, None]
    inputs = np.hstack([encoded(minilm_directory, tokens, 2), np.ones((len(tokens), 1))])
    unweighted, error = rows / weights, scales / weights
    fit, *_ = np.linalg.lstsq(inputs / error, unweighted / error, rcond=None)
    rest = (unweighted - inputs @ fit) / error
    assert np.abs(rest).max() < 1.0  # of a step of int8; half of one is rounding


def test_a_small_table_is_made_twice_alike(
    minilm_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.word_vectors.is_word_piece", lambda name: name[:2] == "wa")
    monkeypatch.setattr("bench.word_vectors.DIMENSIONS", 8)
    first, again = make(minilm_directory), make(minilm_directory, threads=2)
    for name, array in first.items():
        assert np.array_equal(array, again[name]), name
