"""A conversation as one tar: a manifest of what is known of it, and the files of its snapshots."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evoke_proxy.adapters.snapshot_files import WHOLE
from evoke_proxy.config.regular_files import open_regular
from evoke_proxy.core.snapshots.snapshots import Snapshot, described

_PIECE = 1 << 20


def archive(
    directory: Path, snapshots: Sequence[Snapshot], about: Mapping[str, Any] | None = None
) -> Iterator[bytes]:
    """Its bytes, piece by piece, read from disk as they are asked for; it holds all that was said.

    `about` goes into the manifest. Raises OSError when a file is gone or cannot be read.
    """
    listed = [described(item) | {"tokens": item.tokens.tolist()} for item in snapshots]
    manifest = {"version": 1, **(about or {}), "snapshots": listed}
    yield from _entry("manifest.json", json.dumps(manifest).encode())
    for item in snapshots:
        yield from _file(item.id + WHOLE, directory / (item.id + WHOLE))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _entry(name: str, content: bytes) -> Iterator[bytes]:
    yield _head(name, len(content))
    yield content + _padding(len(content))


def _file(name: str, path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        size = path.stat().st_size
        yield _head(name, size)
        left = size
        while left and (piece := file.read(min(_PIECE, left))):
            left -= len(piece)
            yield piece
        if left:
            raise OSError(f"{name} became shorter while it was read")
        yield _padding(size)


def _head(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o600
    return entry.tobuf()


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)
