"""Reads the rows of a slot from a slot file, position by position, and compares them bit by bit.

The format is that of `llama_state_seq_save_file` of llama.cpp, versions 3 and 4: magic, version,
tokens, the cells of one stream with their positions, in version 4 the sizes of the rotations of
keys and values, the keys of each layer, then the values of each layer, row by row. Values are
stored in rows only with flash attention. What follows is not read: context checkpoints."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAGIC, VERSIONS = 0x67677371, (3, 4)


def rows(path: Path) -> dict[int, bytes]:
    """Keys and values of all layers by position; ValueError on a file of another kind."""
    reader = _Reader(path.read_bytes())
    magic, version = reader.numbers("<II")
    if magic != MAGIC or version not in VERSIONS:
        raise ValueError(f"{path} is no slot file of version 3 or 4")
    reader.take(4 * reader.numbers("<I")[0])
    if reader.numbers("<I") != (1,):
        raise ValueError(f"{path} has rows of several streams")
    positions = []
    for _ in range(reader.numbers("<I")[0]):
        position, n_sequences = reader.numbers("<iI")
        reader.take(4 * n_sequences)
        positions.append(position)
    if not positions:
        return {}
    transposed, n_layers = reader.numbers("<II")
    if transposed:
        raise ValueError(f"{path} has its values by column: flash attention was off")
    if version > 3:
        reader.take(8)
    parts: list[list[bytes]] = [[] for _ in positions]
    for _ in range(2 * n_layers):
        _, size = reader.numbers("<iQ")
        data = reader.take(size * len(positions))
        for i, part in enumerate(parts):
            part.append(data[i * size : (i + 1) * size])
    return dict(zip(positions, map(b"".join, parts), strict=True))


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise ValueError("a slot file ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def numbers(self, format: str) -> tuple[int, ...]:
        return struct.unpack(format, self.take(struct.calcsize(format)))


@dataclass(slots=True)
class Witness:
    """Remembers every row as it was first decoded, and compares later copies with it."""

    first: dict[int, bytes] = field(default_factory=dict)
    before: frozenset[int] = frozenset()
    n_returned: int = 0
    unseen: int = 0
    differ: int = 0

    def look(self, now: Mapping[int, bytes], kept: int, until: int) -> frozenset[int]:
        """Compare the rows `now` in the slot after a turn; return the positions that returned.

        The turn decoded nothing in [0, kept), and its prompt ends at `until`. Rows that were absent
        after the previous turn have returned; they, and those that stayed, must equal the rows as
        first decoded. A row that was evicted in the turn that decoded it counts as `unseen` and is
        compared from its first return on.
        """
        for position in [at for at in self.first if at >= kept]:
            del self.first[position]
        back = frozenset(at for at in now if at < kept and at not in self.before)
        self.unseen += sum(at not in self.first for at in back)
        self.differ += sum(row != now.get(at, row) for at, row in self.first.items())
        self.n_returned += len(back)
        self.first |= {at: row for at, row in now.items() if at < until and at not in self.first}
        self.before = frozenset(now)
        return back
