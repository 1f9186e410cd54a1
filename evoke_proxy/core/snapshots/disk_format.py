"""Encodes snapshots and records for the disk; a subclass encrypts them."""

from __future__ import annotations

import hashlib

_DIGEST_BYTES = 16


class DiskFormat:
    """Stores data unencrypted; a row gets a digest of its data and its associated data.

    Associated data (`aad`) identifies the owner of a row or file. It is not stored; decoding fails
    with other associated data.
    """

    # Identifies the key without revealing it; the index states with which key it was written. 0: no
    # encryption.
    key_id = 0
    # The `key_id` of the same key in the format of earlier versions, which is no longer read.
    former_key_id: int | None = None

    def encode_row(self, data: bytes, aad: bytes) -> bytes:
        """Return the bytes to store for a row."""
        return _digest(data, aad) + data

    def decode_row(self, stored: bytes, aad: bytes) -> bytes:
        """Return the data of a stored row; ValueError when data or `aad` were changed."""
        data = stored[_DIGEST_BYTES:]
        if stored[:_DIGEST_BYTES] != _digest(data, aad):
            raise ValueError("a row is not what was written")
        return data

    def encode_file(self, source: str, target: str, aad: bytes) -> bool:
        """Write the form of a file to store to `target`.

        Returns False, and writes nothing, when `source` itself is to be stored.
        """
        return False

    def decode_file(self, source: str, target: str, aad: bytes) -> bool:
        """Write the content of a stored file to `target`.

        Returns False, and writes nothing, when `source` itself has the content.
        """
        return False


def _digest(data: bytes, aad: bytes) -> bytes:
    size = len(aad).to_bytes(8, "big")
    return hashlib.sha256(size + aad + data).digest()[:_DIGEST_BYTES]
