"""The built-in word vectors, compared with the tokenizers library and with their encoder."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from embedder_texts import TEXTS
from onnxruntime import InferenceSession
from tokenizers import Tokenizer

from bench import record
from bench.evidence.conversations import conversations
from bench.model.vocab import NEW_QUESTIONS
from evoke_proxy.adapters.embedders.onnx_encoder import OnnxEncoder
from evoke_proxy.adapters.embedders.word_vectors import WordVectorEncoder
from evoke_proxy.core.retrieval.wordpiece import WordPieces
from evoke_proxy.models import word_vectors_file
from recipes.word_vectors.start import (
    DIMENSIONS,
    encoded,
    is_word_piece,
    rarity_weights,
    starting_rows,
    vocabulary,
)
from recipes.word_vectors.teacher import MAX_TOKENS, lesson
from recipes.word_vectors.train import make

UNKNOWN = "[UNK]"
Array = npt.NDArray[np.float32]


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


def test_the_table_finds_alike_what_the_encoder_finds_alike(minilm: OnnxEncoder) -> None:
    """Cosines of questions with questions, and of questions with statements.

    Without training the correlations are 0.48 and 0.55.
    """
    asked = sorted(NEW_QUESTIONS.values())
    said = sorted(f"My {attribute} is green." for attribute in NEW_QUESTIONS)
    pairs = np.triu_indices(len(asked), 1)
    alike, across = list[Array](), list[Array]()
    for encoder in (WordVectorEncoder(), minilm):
        questions, statements = encoder.documents(asked), encoder.documents(said)
        alike.append((questions @ questions.T)[pairs])
        across.append((questions @ statements.T).ravel())
    assert len(asked) > 30
    assert np.corrcoef(*alike)[0, 1] > 0.6
    assert np.corrcoef(*across)[0, 1] > 0.65


def test_the_training_begins_with_the_rows_of_the_encoder(
    minilm_directory: Path, minilm: OnnxEncoder, names: list[str]
) -> None:
    """Whitened, and weighted by rarity."""
    kept = [token for token, name in enumerate(names) if is_word_piece(name)]
    tokens = sorted(random.Random(5).sample(kept, 1000))
    of_pieces = encoded(minilm_directory, tokens, 2)
    rows = starting_rows(minilm_directory, tokens, 2) / rarity_weights(tokens, names)[:, None]
    assert rows.shape == (1000, DIMENSIONS)
    assert np.allclose(rows.T @ rows / len(rows), np.eye(DIMENSIONS), atol=1e-6)
    inputs = np.hstack([of_pieces, np.ones((1000, 1))])
    fit, *_ = np.linalg.lstsq(inputs, rows, rcond=None)
    assert np.abs(inputs @ fit - rows).max() < 1e-4
    assert rarity_weights([names.index("the")], names)[0] < 0.01
    assert rarity_weights([kept[-1]], names)[0] > 0.9


def test_the_row_of_a_piece_is_between_those_of_the_marks(
    minilm_directory: Path, names: list[str]
) -> None:
    session = InferenceSession(str(minilm_directory / "model.onnx"))
    for token in random.Random(6).sample(range(1000, len(names)), 5):
        ids = np.array([[names.index("[CLS]"), token, names.index("[SEP]")]])
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        rows = session.run(None, feed | {"token_type_ids": np.zeros_like(ids)})[0][0]
        assert np.abs(rows[1] - encoded(minilm_directory, [token], 1)[0]).max() < 1e-5
        assert min(np.abs(rows[1] - rows[at]).max() for at in (0, 2)) > 0.1


def test_the_teacher_has_the_vectors_of_the_encoder(
    minilm_directory: Path, minilm: OnnxEncoder, reference: Tokenizer
) -> None:
    texts = [text for text in TEXTS if text.strip() and "[CLS]" not in text]
    shares: list[float] = []
    taught = lesson(minilm_directory, texts, 2, shares.append)
    short = [i for i, ids in enumerate(taught.pieces) if len(ids) < MAX_TOKENS - 2]
    assert len(short) > 20 and shares == sorted(shares) and shares[-1] == 1
    expected = minilm.documents([texts[i] for i in short])
    assert np.abs(taught.vectors[short] - expected).max() < 1e-4
    for i in short:
        assert list(taught.pieces[i]) == reference.encode(texts[i], add_special_tokens=False).ids


def test_a_table_made_twice_is_the_same(
    minilm_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.word_vectors.train.is_word_piece", lambda name: name[:2] == "wa")
    monkeypatch.setattr("recipes.word_vectors.start.DIMENSIONS", 8)
    monkeypatch.setattr("recipes.word_vectors.train._BATCH", 8)
    groups = [["walls want water", "was it warm?"], ["wait for the war", "wages"]] * 8
    first, second = (make(minilm_directory, groups, threads=1) for _ in range(2))
    for name, array in first.items():
        assert np.array_equal(array, second[name]), name
    monkeypatch.setattr("recipes.word_vectors.train._RATE", 0.0)
    assert not np.array_equal(first["rows"], make(minilm_directory, groups, threads=1)["rows"])
