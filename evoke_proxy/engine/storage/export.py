"""Exports a conversation as a tar archive of a manifest and its snapshot files."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evoke_proxy.adapters.snapshot_files import SEALED
from evoke_proxy.core.snapshots.snapshots import Snapshot, snapshot_fields
from evoke_proxy.regular_files import open_regular

_PIECE_BYTES = 1 << 20


def archive(
    directory: Path, snapshots: Sequence[Snapshot], extra: Mapping[str, Any] | None = None
) -> Iterator[bytes]:
    """Yield a tar archive piece by piece; each piece is read from disk when it is requested.

    The manifest contains the tokens of each snapshot, and the members of `extra`. Raises OSError
    when a file is missing, cannot be read, or becomes shorter while it is read.
    """
    items = [snapshot_fields(item) | {"tokens": item.tokens.tolist()} for item in snapshots]
    manifest = {"version": 1, **(extra or {}), "snapshots": items}
    yield from _entry("manifest.json", json.dumps(manifest).encode())
    for item in snapshots:
        yield from _file(directory / (item.id + SEALED))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _entry(name: str, content: bytes) -> Iterator[bytes]:
    """An entry whose content is in memory."""
    yield _header(name, len(content))
    yield content + _padding(len(content))


def _file(path: Path) -> Iterator[bytes]:
    """An entry with the content of a file."""
    with open_regular(path) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        yield _header(path.name, size)
        left = size
        while left and (piece := file.read(min(_PIECE_BYTES, left))):
            left -= len(piece)
            yield piece
        if left:
            raise OSError(f"{path.name} became shorter while it was read")
        yield _padding(size)


def _header(name: str, size: int) -> bytes:
    """The header of an entry. `TarFile` is not used, because it writes to a file object."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o600
    return entry.tobuf()


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)
