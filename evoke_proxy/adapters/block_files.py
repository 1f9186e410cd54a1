"""Reads the heads of the block files in the disk tier of a patched llama-server.

The format is that of `patches/src/server-blocks-file.cpp`, version 3: a fixed head, numbers of the
block, its tenant, and its names with their sessions. llama-server verifies the checksums.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evoke_proxy.regular_files import open_regular

# Names of block files; other files in the folder are not llama-server's.
BLOCK_FILE = re.compile(r"evoke-[0-9a-f]{32}\.kvb")
_FIXED, _NUMBERS, _LENGTH = struct.Struct("<8sII4Q"), struct.Struct("<4Q2i"), struct.Struct("<Q")
_MAGIC, _VERSION, _ORDER = b"evokeKVB", 3, 0x01020304
# The names of a block are at the beginning of the head.
_MAX_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BlockFile:
    """Owner and names of one block file.

    Attributes:
        path: The file.
        tenant: The tenant whose text it has.
        names: The session of each of its names.
    """

    path: Path
    tenant: str
    names: dict[str, str]


def block_files(folder: Path) -> Iterator[BlockFile]:
    """Yield the readable block files of a folder; OSError when the folder cannot be read."""
    for path in sorted(folder.iterdir()):
        if BLOCK_FILE.fullmatch(path.name):
            try:
                yield read_head(path)
            except (OSError, ValueError):
                continue  # it was deleted meanwhile, is damaged, or of an earlier version


def read_head(path: Path) -> BlockFile:
    """Read owner and names of a block file; ValueError when it is none of this version."""
    with open_regular(path) as file:
        data = file.read(_MAX_HEAD_BYTES)
    try:
        return BlockFile(path, *parse_head(data))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def parse_head(data: bytes) -> tuple[str, dict[str, str]]:
    """Return tenant and names in the first bytes of a block file; ValueError for other data."""
    try:
        magic, version, order, n_head, *_ = _FIXED.unpack_from(data)
        if (magic, version, order) != (_MAGIC, _VERSION, _ORDER):
            raise ValueError(f"it is not a block file of version {_VERSION}")
        reader = _Reader(data[: min(len(data), n_head)], _FIXED.size + _NUMBERS.size)
        tenant = reader.text()
        return tenant, {reader.text(): reader.text() for _ in range(reader.number())}
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"it is damaged: {error}") from error


class _Reader:
    """Reads numbers and texts one after the other; struct.error when the data end early."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def number(self) -> int:
        (value,) = _LENGTH.unpack_from(self._data, self._at)
        self._at += _LENGTH.size
        return int(value)

    def text(self) -> str:
        n_bytes = self.number()
        if n_bytes > len(self._data) - self._at:
            raise struct.error("a text is longer than the head")
        self._at += n_bytes
        return self._data[self._at - n_bytes : self._at].decode()
