"""The file that llama-server writes of one slot, as far as sliding windows make it useless.

Of a layer that sees the last w tokens the file of n tokens has the rows from n - w on. What goes on
from there sees those from n - w + 1 on. But llama-server goes on from a restored slot only when the
lowest position there is below n - w (`pos_min_thold` in tools/server/server-context.cpp), and else
decodes the whole prompt again. One more row, at n - w - 1, is all that is missing, and no token
will ever see it: what it holds does not matter. `missing` makes it of another row.

The format is that of llama_kv_cache::state_write, K rows and V rows by layer, in a file of
llama_state_seq_save_file. What is not of it to the last byte is left as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# So many bytes of a file from a place on; fewer where it ends.
Read = Callable[[int, int], bytes]
_HEAD = struct.Struct("<III")
_MAGIC = 0x67677371
_CELL = np.dtype([("position", "<i4"), ("n_seq", "<u4"), ("seq", "<i4")])


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` runs of rows of `size` bytes, `stride` bytes apart; each run has one of each cell."""

    at: int
    size: int
    count: int = 1
    stride: int = 0

    @property
    def starts(self) -> Iterator[int]:
        """Where each of the runs begins."""
        return iter(range(self.at, self.at + self.count * max(1, self.stride), max(1, self.stride)))


@dataclass(frozen=True, slots=True)
class Cache:
    """The rows of one sequence in one of the caches of a slot: `at` is where their number is
    written, `lowest` the first of their positions, None when there are none."""

    at: int
    n_cells: int = 0
    lowest: int | None = None
    rows: tuple[Rows, ...] = ()


@dataclass(frozen=True, slots=True)
class Insertion:
    """Bytes that come before those at a place, or `over` them."""

    at: int
    put: bytes
    over: bool = False


def caches(read: Read, size: int) -> tuple[Cache, ...]:
    """The caches in a file of `size` bytes, in their order; none when anything else is in it."""
    cursor = _Cursor(read, size)
    try:
        magic, _, n_tokens = _HEAD.unpack(cursor.take(_HEAD.size))
        if magic != _MAGIC:
            return ()
        cursor.skip(4 * n_tokens)
        found = []
        while cursor.at < size:
            found.append(_cache(cursor))
        return tuple(found)
    except ValueError:
        return ()


def has_windows(found: Sequence[Cache]) -> bool:
    """Whether some layers keep less than all: they have a cache of their own."""
    return len(found) > 1


def in_window(found: Sequence[Cache]) -> bool:
    """Whether all of the text is still in its windows: nothing helps a restore of that."""
    return has_windows(found) and found[-1].lowest == 0


def missing(found: Sequence[Cache], read: Read) -> list[Insertion]:
    """What a file of these caches lacks for its windows, by place; empty when nothing."""
    last = found[-1] if has_windows(found) else Cache(0)
    if not last.lowest:
        return []
    cells = last.at + 4
    first = np.frombuffer(read(cells, _CELL.itemsize), _CELL).copy()
    first["position"] = last.lowest - 1
    more = [
        Insertion(last.at, struct.pack("<I", last.n_cells + 1), over=True),
        Insertion(cells, first.tobytes()),
    ]
    for rows in last.rows:
        more += [Insertion(start, read(start, rows.size)) for start in rows.starts]
    return more


class _Cursor:
    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size = read, size
        self.at = 0

    def take(self, n_bytes: int) -> bytes:
        data = self._read(self.at, n_bytes)
        self.skip(n_bytes)
        return data

    def skip(self, n_bytes: int) -> None:
        self.at += n_bytes
        if self.at > self._size:
            raise ValueError("no caches of rows")

    def number(self, form: str = "<I") -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])


def _cache(cursor: _Cursor) -> Cache:
    """The one that begins here: of its streams one at most has cells of a sequence."""
    n_streams = cursor.number()
    if not 1 <= n_streams <= 256:
        raise ValueError("no caches of rows")
    found = [_stream(cursor) for _ in range(n_streams)]
    held = [cache for cache in found if cache.n_cells]
    if len(held) > 1:
        raise ValueError("no caches of rows")
    return held[0] if held else found[0]


def _stream(cursor: _Cursor) -> Cache:
    at, n_cells = cursor.at, cursor.number()
    if not n_cells:
        return Cache(at)
    cells = np.frombuffer(cursor.take(_CELL.itemsize * n_cells), _CELL)
    if (cells["n_seq"] != 1).any() or (cells["position"] < 0).any():
        raise ValueError("no caches of rows")
    transposed, n_layers = cursor.number(), cursor.number()
    rows = [_rows(cursor, n_cells) for _ in range(n_layers)]
    turned = _columns if transposed else _rows
    rows += [turned(cursor, n_cells) for _ in range(n_layers)]
    return Cache(at, n_cells, int(cells["position"].min()), tuple(rows))


def _rows(cursor: _Cursor, n_cells: int) -> Rows:
    cursor.number()  # of which type
    size = cursor.number("<Q")
    rows = Rows(cursor.at, size)
    cursor.skip(size * n_cells)
    return rows


def _columns(cursor: _Cursor, n_cells: int) -> Rows:
    cursor.number()
    size, count = cursor.number(), cursor.number()
    rows = Rows(cursor.at, size, count, size * n_cells)
    cursor.skip(size * n_cells * count)
    return rows
