"""Reads the heads of the block files in the disk tier of a patched llama-server, and changes names.

The format is that of `patches/src/server-blocks-file.cpp`, version 3: a fixed head, numbers of the
block, its tenant, and its names with their sessions; further lists up to a multiple of 64 bytes,
and the rows. llama-server verifies the checksums.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from evoke_proxy.core.prompt.layout import wire_name
from evoke_proxy.regular_files import open_regular

# Names of block files; other files in the folder are not llama-server's.
BLOCK_FILE = re.compile(r"evoke-[0-9a-f]{32}\.kvb")
_FIXED, _NUMBERS, _LENGTH = struct.Struct("<8sII4Q"), struct.Struct("<4Q2i"), struct.Struct("<Q")
_MAGIC, _VERSION, _ORDER = b"evokeKVB", 3, 0x01020304
# The names of a block are at the beginning of the head. A head has at most as many bytes as
# llama-server reads.
_MAX_NAMES_BYTES = 1 << 20
_MAX_HEAD_BYTES = 64 << 20
_ALIGNMENT = 64
# The checksum of the head is the last number of the fixed head; it is computed with 0 there.
_SUM_AT = _FIXED.size - _LENGTH.size
_MASK = (1 << 64) - 1
_PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
)


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
        data = file.read(_MAX_NAMES_BYTES)
    try:
        return BlockFile(path, *parse_head(data))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def parse_head(data: bytes) -> tuple[str, dict[str, str]]:
    """Return tenant and names in the first bytes of a block file; ValueError for other data."""
    tenant, names, _ = _parsed(data)
    return tenant, names


def read_own_head(file: BinaryIO, session: str) -> tuple[bytes, int]:
    """Return the head of a block file with the names of one session only, and where its rows begin.

    `file` is at its start. Names of other sessions of the tenant are left out; without any the head
    is that of the file. A name begins with the id of its session, see `layout.wire_name`. Raises
    ValueError for a file of another form.
    """
    start = file.read(_FIXED.size)
    try:
        _, _, _, n_head, *_ = _FIXED.unpack(start)
        if not _FIXED.size <= n_head <= _MAX_HEAD_BYTES:
            raise ValueError(f"its head has {n_head} bytes")
        data = start + file.read(n_head - _FIXED.size)
        if len(data) < n_head:
            raise ValueError("its head ends early")
        tenant, names, end = _parsed(data)
    except struct.error as error:
        raise ValueError(f"it is damaged: {error}") from error
    prefix = f"{wire_name(session)}/"
    own = {name: session for name in names if name.startswith(prefix)}
    if own == names:
        return data, n_head
    texts = [text for pair in own.items() for text in pair]
    head = data[_FIXED.size : _FIXED.size + _NUMBERS.size] + _text(tenant)
    head += _LENGTH.pack(len(own)) + b"".join(map(_text, texts)) + data[end:]
    return _sealed(start, head), n_head


def _parsed(data: bytes) -> tuple[str, dict[str, str], int]:
    """Return tenant, names, and where these end; ValueError for other data."""
    try:
        magic, version, order, n_head, *_ = _FIXED.unpack_from(data)
        if (magic, version, order) != (_MAGIC, _VERSION, _ORDER):
            raise ValueError(f"it is not a block file of version {_VERSION}")
        reader = _Reader(data[: min(len(data), n_head)], _FIXED.size + _NUMBERS.size)
        tenant = reader.text()
        names = {reader.text(): reader.text() for _ in range(reader.number())}
        return tenant, names, reader.position
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"it is damaged: {error}") from error


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def _sealed(start: bytes, head: bytes) -> bytes:
    """Return a head after the fixed head `start`, with its size and its checksum."""
    head += bytes(-(len(start) + len(head)) % _ALIGNMENT)
    magic, version, order, _, n_data, sum_data, _ = _FIXED.unpack(start)
    fields = magic, version, order, len(start) + len(head), n_data, sum_data
    unsummed = _FIXED.pack(*fields, 0) + head
    return unsummed[:_SUM_AT] + _LENGTH.pack(checksum(unsummed)) + head


def checksum(data: bytes) -> int:
    """Return the checksum of a head, whose length is a multiple of 64 bytes: XXH64 with the seed 0.

    See github.com/Cyan4973/xxHash, doc/xxhash_spec.md.
    """
    p1, p2, p3, p4 = _PRIMES
    sums = [(p1 + p2) & _MASK, p2, 0, -p1 & _MASK]
    for lanes in struct.iter_unpack("<4Q", data):
        for i, lane in enumerate(lanes):
            sums[i] = _rotated((sums[i] + lane * p2) & _MASK, 31) * p1 & _MASK
    value = sum(map(_rotated, sums, (1, 7, 12, 18))) & _MASK
    for total in sums:
        value = ((value ^ _rotated(total * p2 & _MASK, 31) * p1 & _MASK) * p1 + p4) & _MASK
    value = (value + len(data)) & _MASK
    value = (value ^ value >> 33) * p2 & _MASK
    value = (value ^ value >> 29) * p3 & _MASK
    return value ^ value >> 32


def _rotated(value: int, n_bits: int) -> int:
    return (value << n_bits | value >> (64 - n_bits)) & _MASK


class _Reader:
    """Reads numbers and texts one after the other; struct.error when the data end early.

    Attributes:
        position: Where the next one begins.
    """

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self.position = data, position

    def number(self) -> int:
        (value,) = _LENGTH.unpack_from(self._data, self.position)
        self.position += _LENGTH.size
        return int(value)

    def text(self) -> str:
        n_bytes = self.number()
        if n_bytes > len(self._data) - self.position:
            raise struct.error("a text is longer than the head")
        self.position += n_bytes
        return self._data[self.position - n_bytes : self.position].decode()
