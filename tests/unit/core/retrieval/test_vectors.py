"""Vectors of documents: comparisons with their means."""

from __future__ import annotations

import numpy as np

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
