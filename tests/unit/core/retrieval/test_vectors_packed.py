"""Encoding vectors for records: they are decoded bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from evoke_proxy.core.retrieval.vectors import decode_vectors, encode_vectors

VECTORS = [
    ("s/0-4-a", np.arange(6, dtype=np.float32).reshape(2, 3) / 7),
    ("s/4-9-\u00e9", np.full((1, 3), -1e-30, np.float32)),
]


def test_vectors_are_decoded_bit_for_bit_and_only_for_the_same_encoder() -> None:
    data = encode_vectors(b"\n1", VECTORS)
    found = decode_vectors(data, b"\n1")
    assert list(found) == [label for label, _ in VECTORS]
    for label, vectors in VECTORS:
        assert found[label].dtype == np.float32 and np.array_equal(found[label], vectors)
    assert decode_vectors(data, b"\n2") == {} == decode_vectors(encode_vectors(b"\n1", []), b"\n1")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"[1, 2", b'["", [["a", 2, 3]]]\n1234', b'["", [1]]\n', b"5\n", b"\xff\n"]
)
def test_malformed_data_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_vectors(data, b"")
