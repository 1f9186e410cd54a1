"""The encoder with the bundled table of word vectors."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from evoke_proxy.adapters.embedders.word_vectors import (
    WordVectorEncoder,
    _read,
    _similar_words_in,
)
from evoke_proxy.errors import ConfigError
from evoke_proxy.models import similar_words_file, word_vectors_file

# 64 word pieces.
TEXT = (
    "the service wrote its log into a file and the pool of workers waited for the next request to"
    " come in before it went on with the other part of the work that was left over, and on the way"
    " back the keeper of the lighthouse compared the weather of the evening with that of the sea in"
    " the morning of the day"
)
MIB = 1 << 20


@pytest.fixture(scope="module")
def table() -> WordVectorEncoder:
    return WordVectorEncoder()


def test_vectors_have_unit_length_and_256_dimensions(table: WordVectorEncoder) -> None:
    vectors = table.documents(["a red car", "9f1c2e34", "\u6771\u4eac"])
    assert vectors.shape == (3, table.dimensions) == (3, 256) and vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_queries_and_documents_are_encoded_alike(table: WordVectorEncoder) -> None:
    assert (table.queries(["why?"]) == table.documents(["why?"])).all()


def test_a_paraphrase_is_the_nearest_vector(table: WordVectorEncoder) -> None:
    queries = ("Which car do I drive?", "When does my plane leave?", "Who is her physician?")
    documents = (
        "He bought an automobile.",
        "The flight to Lisbon is at seven.",
        "Doctor Okafor treats Maria.",
        "Copies go to volume vault-3.",
    )
    similarity = table.queries(queries) @ table.documents(documents).T
    assert similarity.argmax(1).tolist() == [0, 1, 2]


def test_the_table_takes_at_most_8_mib() -> None:
    assert word_vectors_file().stat().st_size <= 8 * MIB


def test_64_tokens_take_microseconds(table: WordVectorEncoder) -> None:
    """200 on a quiet machine (bench/results/embedding_built_in.json); a busy one may take more."""
    assert len(table._table._pieces.ids(TEXT)) == 64
    seconds = []
    for _ in range(200):
        start = time.thread_time()
        table.queries([TEXT])
        seconds.append(time.thread_time() - start)
    assert sorted(seconds)[len(seconds) // 2] < 1e-3


def test_the_fingerprint_changes_with_the_table(table: WordVectorEncoder, tmp_path: Path) -> None:
    assert WordVectorEncoder().fingerprint == table.fingerprint and len(table.fingerprint) == 32
    other = tmp_path / "other.npz"
    rows = np.ones((1, 256), np.int8)
    np.savez(other, pieces=np.frombuffer(b"a", np.uint8), rows=rows, scales=np.ones(1, np.float32))
    assert WordVectorEncoder(other).fingerprint != table.fingerprint


@pytest.mark.parametrize("content", [None, b"", b"no archive", b"PK\x03\x04 cut"])
def test_a_damaged_table_is_a_configuration_error(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "table.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="install evoke-proxy again"):
        WordVectorEncoder(path)


def test_a_damaged_table_of_similar_words_is_a_configuration_error(tmp_path: Path) -> None:
    path, whole = tmp_path / "similar.npz", similar_words_file().read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ConfigError, match=r"similar\.npz.*install evoke-proxy again"):
        WordVectorEncoder(similar=path)


def test_no_flipped_bit_of_the_similar_words_raises_another_error(tmp_path: Path) -> None:
    """An unpacker has errors of its own; what it does not read may be flipped."""
    path, whole, n_refused = tmp_path / "similar.npz", similar_words_file().read_bytes(), 0
    places = range(60, len(whole), 20_011)
    for at in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        try:
            _read(path, _similar_words_in)
        except ConfigError:
            n_refused += 1
    assert n_refused > len(places) / 2
