"""How what is kept on disk of conversations is written: in which form."""

from __future__ import annotations

import hashlib

_DIGEST = 16


class Plain:
    """As it is; rows carry a digest of themselves and of what they are about."""

    # Tells keys apart, without telling anything of one; an index says with which it was written.
    mark = 0

    def close(self, data: bytes, about: bytes) -> bytes:
        """Data as a row has it; `about` is what else the row says that must not change."""
        return _digest(data, about) + data

    def open(self, closed: bytes, about: bytes) -> bytes:
        """The data again; ValueError when it, or what it is about, is not what it was."""
        data = closed[_DIGEST:]
        if closed[:_DIGEST] != _digest(data, about):
            raise ValueError("a row is not what was written")
        return data

    def size(self, n_bytes: int) -> int:
        """How long a file of so many bytes gets."""
        return n_bytes

    def write(self, source: str, target: str, about: bytes) -> bool:
        """Make the file that is kept of one; False when that is the file itself."""
        return False

    def read(self, source: str, target: str, about: bytes) -> bool:
        """Make the one again from what is kept; False when that is it itself."""
        return False


def _digest(data: bytes, about: bytes) -> bytes:
    size = len(about).to_bytes(8, "big")
    return hashlib.sha256(size + about + data).digest()[:_DIGEST]
