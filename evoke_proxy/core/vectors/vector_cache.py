"""Vectors by key, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict

from evoke_proxy.core.vectors.encoding import Vectors

# Key, dictionary entry and array header of one vector, beside its numbers.
_ENTRY_BYTES = 320


class VectorCache:
    """Vectors [d] by key, at most so many bytes; the longest unused goes first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._size = 0
        self._vectors: OrderedDict[bytes, Vectors] = OrderedDict()

    def __len__(self) -> int:
        return len(self._vectors)

    def __contains__(self, key: bytes) -> bool:
        return key in self._vectors

    @property
    def size(self) -> int:
        """Bytes held now."""
        return self._size

    def get(self, key: bytes) -> Vectors | None:
        """The vector, now the latest used; None when it is not here."""
        found = self._vectors.get(key)
        if found is not None:
            self._vectors.move_to_end(key)
        return found

    def put(self, key: bytes, vector: Vectors) -> None:
        """Keep a copy that nobody can write to, and forget old ones as far as needed."""
        old = self._vectors.pop(key, None)
        self._size -= 0 if old is None else old.nbytes + _ENTRY_BYTES
        # A copy: a row of a matrix would keep the whole matrix.
        kept = vector.copy()
        kept.setflags(write=False)
        self._vectors[key] = kept
        self._size += kept.nbytes + _ENTRY_BYTES
        while self._size > self._limit:
            _, gone = self._vectors.popitem(last=False)
            self._size -= gone.nbytes + _ENTRY_BYTES
