"""Computes and compares the checksums of snapshot files.

A checksum finds damage, not forgery: that needs `snapshots.key_file`. It is the XXH3 of 128 bits,
which takes less time than reading the file. Two forms of earlier versions are still compared: the
SHA-256 of a file, and the SHA-256 of the SHA-256 digests of its parts of 8 MiB.

Everything is read in order. A disk that is read at several places takes longer, and so does one
that two processes read at the same time: `is_intact` can therefore follow another process.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import xxhash

from evoke_proxy.regular_files import open_regular

_XXH3, _BY_PARTS = "xxh3:", "parts:"
_PART_BYTES = 8 << 20
_PIECE_BYTES = 256 << 10
# How long to wait for the other process before the file is read without it, and between two looks.
_MAX_WAIT_S, _PAUSE_S = 0.05, 0.001
# Makes a read return only what is in the page cache; 0 where the system cannot do that.
_CACHED_ONLY: int = getattr(os, "RWF_NOWAIT", 0)


def checksum(path: Path, sync: bool = False) -> str:
    """Return the checksum of a file; `sync` writes the file to the disk. Raises OSError."""
    with open_regular(path) as file:
        digest = _digest(_XXH3, file.fileno(), follow=False)
        if sync:
            os.fsync(file.fileno())
    return digest


def is_intact(path: Path, stated: str, follow: bool = False) -> bool:
    """Return whether a file has the stated checksum, of this or an earlier version.

    With `follow`, another process reads the file now: this one reads what the other one has read,
    and reads the disk itself only when the other one makes no progress. Raises OSError.
    """
    form = next((form for form in (_XXH3, _BY_PARTS) if stated.startswith(form)), "")
    with open_regular(path) as file:
        return _digest(form, file.fileno(), follow) == stated


class _Digest(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class _ByParts:
    """The SHA-256 of the SHA-256 digests of the parts of a file."""

    def __init__(self) -> None:
        self._parts, self._part, self._left = hashlib.sha256(), hashlib.sha256(), _PART_BYTES

    def update(self, data: memoryview, /) -> None:
        while len(data):
            if not self._left:
                self._parts.update(self._part.digest())
                self._part, self._left = hashlib.sha256(), _PART_BYTES
            piece = data[: self._left]
            self._part.update(piece)
            self._left -= len(piece)
            data = data[len(piece) :]

    def hexdigest(self) -> str:
        if self._left < _PART_BYTES:
            self._parts.update(self._part.digest())
        return self._parts.hexdigest()


def _digest(form: str, handle: int, follow: bool) -> str:
    digests: dict[str, type[_Digest]] = {_XXH3: xxhash.xxh3_128, _BY_PARTS: _ByParts}
    digest = digests[form]() if form else hashlib.sha256()
    for piece in _cached_pieces(handle) if follow and _CACHED_ONLY else _pieces(handle, 0):
        digest.update(piece)
    return form + digest.hexdigest()


def _pieces(handle: int, position: int) -> Iterator[memoryview]:
    """Yield the content of a file from a position on; a piece is valid until the next one."""
    buffer = memoryview(bytearray(_PIECE_BYTES))
    while n_read := os.preadv(handle, [buffer], position):
        yield buffer[:n_read]
        position += n_read


def _cached_pieces(handle: int) -> Iterator[memoryview]:
    """As `_pieces` from 0, but wait until another process has read a piece."""
    buffer, position = memoryview(bytearray(_PIECE_BYTES)), 0
    # Reading ahead would compete with the other process.
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
    ends = time.monotonic() + _MAX_WAIT_S
    while time.monotonic() < ends:
        try:
            n_read = os.preadv(handle, [buffer], position, _CACHED_ONLY)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
            continue
        except OSError:  # the file system cannot say what is cached
            break
        if not n_read:  # the end; Linux 5.9 and 5.10 also say so before the end
            break
        yield buffer[:n_read]
        position += n_read
        ends = time.monotonic() + _MAX_WAIT_S
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_NORMAL)
    yield from _pieces(handle, position)
