"""Vectors of documents: comparisons with their means."""

from __future__ import annotations

import numpy as np
import pytest

from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.vectors import DocumentVectors


def _unit(rows: int, seed: int) -> Vectors:
    values = np.random.default_rng(seed).normal(size=(rows, 32)).astype(np.float32)
    unit: Vectors = values / np.linalg.norm(values, axis=1, keepdims=True)
    return unit


def _documents(count: int) -> DocumentVectors:
    documents, rows = DocumentVectors(), _unit(4 * count, 1)
    for number in range(count):
        documents.put(number, rows[4 * number : 4 * number + 4])
    return documents


def test_expected_vectors_are_compared_as_others_are() -> None:
    expecting, other = _documents(2000), _documents(2000)
    vectors, topic = list(_unit(3, 2)), _unit(1, 3)[0]
    expecting.expect([*vectors, topic, np.zeros(8, np.float32)])
    first, found = expecting.topic_cosines(topic, 2000), expecting.cosines(vectors, 2000)
    assert first is not None and np.array_equal(first, other.topic_cosines(topic, 2000))  # type: ignore[arg-type]
    assert found is not None and np.array_equal(found, other.cosines(vectors, 2000))  # type: ignore[arg-type]


def test_a_comparison_is_made_again_after_a_document_was_added() -> None:
    documents, topic = _documents(9), _unit(1, 3)[0]
    documents.expect([topic])
    assert documents.topic_cosines(topic, 9) is not None
    documents.put(9, topic[None])
    found = documents.topic_cosines(topic, 10)
    assert found is not None and abs(found[9] - 1.0) < 1e-6


@pytest.mark.parametrize("count", [70, 200, 2100])  # with all chunks, and with means first
def test_documents_that_were_compared_early_have_the_same_cosines(count: int) -> None:
    early, other, added = _documents(count), _documents(count), _unit(3, 5)
    clauses, whole, topic = list(_unit(3, 2)), _unit(1, 3)[0], _unit(1, 11)[0]
    early.compare([clauses, [whole], []], topic)
    for documents in (early, other):
        documents.put(count, added)
    for vectors in (clauses, [whole], list(_unit(2, 7))):
        found, expected = (one.cosines(vectors, count + 1) for one in (early, other))
        assert found is not None and np.array_equal(found, expected)  # type: ignore[arg-type]
    first, second = (one.topic_cosines(topic, count + 1) for one in (early, other))
    assert first is not None and np.array_equal(first, second)  # type: ignore[arg-type]
    of_topic = early._early.with_means[-1]
    assert of_topic[0] is topic and len(of_topic[1]) == count // 256 * 256
    compared = early._early.with_means if count == 2100 else early._early.with_rows
    assert len(compared[0][1]) == (count if count == 2100 else 4 * count) // 256 * 256


def test_vectors_of_another_encoder_discard_what_was_compared_early() -> None:
    documents, vector = _documents(100), _unit(1, 2)[0]
    documents.compare([[vector]])
    documents.put(100, np.ones((1, 8), np.float32))
    assert documents.cosines([vector], 101) is None
    documents.compare([[vector]])
    found = documents.cosines([np.ones(8, np.float32)], 101)
    assert found is not None and found[0, 100] == 8


def test_likeness_is_the_cosine_with_the_examples_without_what_all_have_in_common() -> None:
    vectors = _unit(9, 4) + np.float32(0.3)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    documents = DocumentVectors()
    for number in (5, 0, 7, 2, 8, 3):
        documents.put(number, vectors[number : number + 1])
    of = np.array([0, 2, 3, 4, 5, 7])  # 4 has no vector; 8 was removed from the session
    exact = vectors.astype(np.float64)
    centred = exact - exact[[0, 2, 3, 5, 7]].mean(axis=0)
    centred /= np.linalg.norm(centred, axis=1, keepdims=True)
    example = 2.0 * centred[3] + 1.0 * centred[7]
    expected = centred[of] @ example / np.linalg.norm(example)
    expected[3] = 0.0
    found = documents.likeness({3: 2.0, 4: 5.0, 7: 1.0}, of)
    assert found is not None and np.allclose(found, expected, atol=1e-5)


def test_without_examples_or_vectors_there_is_no_likeness() -> None:
    documents = _documents(3)
    assert documents.likeness({}, np.arange(3)) is None
    assert documents.likeness({9: 1.0}, np.arange(3)) is None
    assert documents.likeness({1: 1.0}, np.array([7, 8])) is None
    assert documents.likeness({1: 1.0}, np.zeros(0, np.int64)) is None
    assert DocumentVectors().likeness({1: 1.0}, np.arange(3)) is None


@pytest.mark.parametrize("count", [4, 7, 257])
def test_documents_that_are_all_the_same_are_not_alike(count: int) -> None:
    documents, same = DocumentVectors(), _unit(1, 5)
    for number in range(count):
        documents.put(number, same)
    assert documents.likeness({1: 1.0}, np.arange(count)) is None
    documents.put(count, _unit(1, 6))
    found = documents.likeness({count: 1.0}, np.arange(count + 1))
    assert found is not None and found[count] > 0.99
    assert count < 200 or not found[:count].any()  # as the mean


def test_documents_without_a_direction_count_as_without_vectors() -> None:
    """Such as a text without a known word."""
    documents, rows = DocumentVectors(), _unit(6, 5)
    for number, row in enumerate(rows):
        documents.put(number, row[None])
    expected = documents.likeness({1: 2.0, 2: 1.0}, np.arange(6))
    documents.put(6, np.zeros((1, 32), np.float32))
    found = documents.likeness({1: 2.0, 6: 5.0, 2: 1.0}, np.arange(7))
    assert found is not None and expected is not None
    assert np.allclose(found[:6], expected) and found[6] == 0.0
    assert documents.likeness({6: 1.0}, np.arange(7)) is None
    documents.put(7, np.full((1, 32), np.nan, np.float32))
    assert documents.likeness({1: 2.0, 2: 1.0}, np.arange(8)) is None
