"""Vectors of blocks as they are written down, so that nothing has to be embedded twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import numpy as np

from evoke_proxy.core.retrieval.encoding import Vectors


def packed(mark: bytes, vectors: Iterable[tuple[str, Vectors]]) -> bytes:
    """Vectors [k, d] by label, float32; `mark` says which encoder has made them."""
    given = list(vectors)
    head = [mark.hex(), [[label, *found.shape] for label, found in given]]
    numbers = [found.astype("<f4").tobytes() for _, found in given]
    return b"\n".join([json.dumps(head).encode(), b"".join(numbers)])


def unpacked(data: bytes, mark: bytes) -> Mapping[str, Vectors]:
    """What `packed` has made; nothing where another encoder has. ValueError when it is no such."""
    head, _, numbers = data.partition(b"\n")
    try:
        made_by, shapes = json.loads(head)
        if made_by != mark.hex():
            return {}
        values, at, found = np.frombuffer(numbers, "<f4"), 0, {}
        for label, count, size in shapes:
            found[label] = values[at : at + count * size].reshape(count, size).astype(np.float32)
            at += count * size
    except TypeError as error:
        raise ValueError("vectors are not as they were written") from error
    return found
