"""The built-in word vectors, compared with the tokenizers library and with their encoder."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from embedder_texts import TEXTS
from tokenizers import Tokenizer

from bench import record
from bench.evidence.conversations import conversations
from bench.model.vocab import NEW_QUESTIONS
from evoke_proxy.core.retrieval.wordpiece import WordPieces
from evoke_proxy.models import word_vectors_file
from recipes.word_vectors import encoded, is_word_piece, make, rarity_weights, vocabulary

UNKNOWN = "[UNK]"


@pytest.fixture(scope="module")
def reference(minilm_directory: Path) -> Tokenizer:
    """The encoder's tokenizer; special tokens such as [CLS] in a text are encoded as text."""
    tokenizer = Tokenizer.from_file(str(minilm_directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.fixture(scope="module")
def names(minilm_directory: Path) -> list[str]:
    return vocabulary(minilm_directory)


def differing(reference: Tokenizer, names: list[str], texts: list[str]) -> list[str]:
    """The texts that our word pieces split differently from the library."""
    pieces = WordPieces(names)
    encodings = reference.encode_batch(texts, add_special_tokens=False)
    return [
        text
        for text, encoding in zip(texts, encodings, strict=True)
        if [names[i] for i in pieces.ids(text)] != [t for t in encoding.tokens if t != UNKNOWN]
    ]


def test_prose_code_and_other_scripts_split_like_the_library(
    reference: Tokenizer, names: list[str]
) -> None:
    texts = [text for text in TEXTS if text.isprintable() or text.isascii()]
    texts += [text for each in conversations() for text in each.texts]
    texts += NEW_QUESTIONS.values()
    texts += [path.read_text("utf-8") for path in Path(record.__file__).parent.glob("*.py")]
    assert len(texts) > 500
    assert differing(reference, names, texts) == []


def test_random_unicode_splits_like_the_library(reference: Tokenizer, names: list[str]) -> None:
    """Characters newer than Unicode 8, the version of the library's tables, are left out."""
    rng, texts = random.Random(17), []
    ranges = ((0x20, 0x7F), (0xA0, 0x530), (0x590, 0x5F5), (0x3040, 0x3100), (0x4E00, 0x9FA6),
              (0xAC00, 0xD7A4), (0x2000, 0x2070), (0x1F300, 0x1F580))  # fmt: skip
    for _ in range(3000):
        low, high = rng.choice(ranges)
        text = "".join(
            chr(rng.randrange(low, high) if rng.random() < 0.6 else rng.randrange(9, 127))
            for _ in range(rng.randrange(1, 40))
        )
        texts.append("".join(c for c in text if unicodedata.ucd_3_2_0.category(c) != "Cn"))
    assert differing(reference, names, texts) == []


def test_each_character_splits_like_the_library(reference: Tokenizer, names: list[str]) -> None:
    """Of the first plane, except those newer than Unicode 8 or with a changed category."""
    texts = [f"a{chr(code)}b" for code in range(0x10000) if not 0xD800 <= code < 0xE000]
    found = {text[1] for text in differing(reference, names, texts)}
    assigned = {c for c in found if unicodedata.ucd_3_2_0.category(c) != "Cn"}
    assert {
        c for c in assigned if unicodedata.category(c) == unicodedata.ucd_3_2_0.category(c)
    } == (set())
    assert len(assigned) <= 4 and len(found) <= 400


def test_long_words_split_like_the_library(reference: Tokenizer, names: list[str]) -> None:
    rng = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    texts = ["".join(rng.choices(letters, k=size)) for size in range(1, 130)]
    texts += [letter * size for letter in "ax7" for size in (99, 100, 101, 1000)]
    assert differing(reference, names, texts) == []


def test_the_table_has_the_pieces_of_the_vocabulary(names: list[str]) -> None:
    with np.load(word_vectors_file()) as table:
        pieces = table["pieces"].tobytes().decode("utf-8").split("\n")
    assert pieces == [name for name in names if is_word_piece(name)]


def test_the_rows_are_those_of_the_encoder(minilm_directory: Path, names: list[str]) -> None:
    """Each row is a weighted linear map of the encoder's; the residual is rounding to int8.

    The map is fitted to 2,000 tokens; `python -m recipes.word_vectors` makes the whole table.
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
    residual = (unweighted - inputs @ fit) / error
    assert np.abs(residual).max() < 1.0  # of a step of int8; half of one is rounding


def test_a_table_made_twice_has_the_same_bytes(
    minilm_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.word_vectors.is_word_piece", lambda name: name[:2] == "wa")
    monkeypatch.setattr("recipes.word_vectors.DIMENSIONS", 8)
    first, second = make(minilm_directory), make(minilm_directory, threads=2)
    for name, array in first.items():
        assert np.array_equal(array, second[name]), name
