"""Vectors by key, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from evoke_proxy.core.retrieval.encoding import Vectors

# Key, dictionary entry and array header of one vector, beside its numbers.
_ENTRY_BYTES = 320


class VectorCache:
    """Vectors [d] by key, at most so many bytes.

    `share_of` tells whose a key is. The longest unused of whoever has most goes first.
    """

    def __init__(
        self, limit_bytes: int, share_of: Callable[[bytes], bytes] = lambda _: b""
    ) -> None:
        self._limit = limit_bytes
        self._share_of = share_of
        self._size = 0
        self._sizes: dict[bytes, int] = {}
        self._shares: dict[bytes, OrderedDict[bytes, Vectors]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._shares.values()))

    def __contains__(self, key: bytes) -> bool:
        return key in self._shares.get(self._share_of(key), ())

    @property
    def size(self) -> int:
        """Bytes held now."""
        return self._size

    def get(self, key: bytes) -> Vectors | None:
        """The vector, now the latest used; None when it is not here."""
        theirs = self._shares.get(self._share_of(key))
        found = theirs.get(key) if theirs is not None else None
        if theirs is not None and found is not None:
            theirs.move_to_end(key)
        return found

    def put(self, key: bytes, vector: Vectors) -> None:
        """Keep a copy that nobody can write to, and forget old ones as far as needed."""
        share = self._share_of(key)
        theirs = self._shares.setdefault(share, OrderedDict())
        old = theirs.pop(key, None)
        if old is not None:
            self._count(share, -old.nbytes - _ENTRY_BYTES)
        # A copy: a row of a matrix would keep the whole matrix.
        kept = vector.copy()
        kept.setflags(write=False)
        theirs[key] = kept
        self._count(share, kept.nbytes + _ENTRY_BYTES)
        while self._size > self._limit:
            largest = max(self._sizes, key=lambda name: self._sizes[name])
            _, gone = self._shares[largest].popitem(last=False)
            self._count(largest, -gone.nbytes - _ENTRY_BYTES)
            if not self._shares[largest]:
                del self._shares[largest], self._sizes[largest]

    def _count(self, share: bytes, n_bytes: int) -> None:
        self._size += n_bytes
        self._sizes[share] = self._sizes.get(share, 0) + n_bytes
