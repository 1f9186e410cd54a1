"""Reads slot files of llama-server, and adds a row that models with sliding windows need.

For a layer that sees the last w tokens, a file of n tokens has the rows from n - w on. The next
token sees the rows from n - w + 1 on. But llama-server continues a restored slot only when its
lowest position is below n - w (`pos_min_thold` in tools/server/server-context.cpp), and otherwise
decodes the whole prompt again. One row is missing, at n - w - 1. No token will see it, so its
content does not matter: `missing` copies another row.

The format is that of llama_kv_cache::state_write, K rows and V rows by layer, in a file of
llama_state_seq_save_file. Two versions of it are read (LLAMA_STATE_SEQ_VERSION in include/llama.h):

* 3, of 0c1e57098 and other releases of that time;
* 4, of b11549: each stream states the sizes of the rotations of its keys and values before its
  rows, and llama-server appends the slot's context checkpoints to the file (save_slot_checkpoints
  in tools/server/server-context.cpp). A restored slot then continues from the last checkpoint that
  the prompt shares, which is some tokens before its end; with the missing row, from its end.

A file of another version, or with other contents, is left unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Reads `n_bytes` of a file at an offset; fewer at its end.
Read = Callable[[int, int], bytes]
_HEAD = struct.Struct("<III")
_MAGIC = 0x67677371
# The supported versions; from the second on, streams state the rotations of their rows.
_VERSIONS, _ROTATIONS_SINCE = (3, 4), 4
# llama-server appends checkpoints to the state: a head, then for each checkpoint its number of
# tokens, its lowest and highest position, and three states, each after its length.
_APPENDIX, _APPENDIX_MAGIC, _APPENDIX_VERSION = struct.Struct("<III"), 0x504B4353, 1
_CHECKPOINT = struct.Struct("<qii")
_UNKNOWN = "the file has a cache whose cells are not in a known form"
# Names of the values of enum ggml_type that a cache may have.
_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0"}
_TYPES |= {20: "iq4_nl", 30: "bf16"}
_BEGIN, _END = [("position", "<i4"), ("n_seq", "<u4")], [("seq", "<i4")]
_CELLS = (np.dtype(_BEGIN + _END), np.dtype([*_BEGIN, ("ext", "V12"), *_END]))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one tensor: `count` runs, each with one row of each cell."""

    # ggml's number of the type.
    type: int
    # Offset of the first run in the file.
    at: int
    # Bytes of one row.
    size: int
    count: int = 1
    # Bytes from the start of one run to the next.
    stride: int = 0

    @property
    def starts(self) -> list[int]:
        """Offset of each run."""
        return [self.at + i * self.stride for i in range(self.count)]


@dataclass(frozen=True, slots=True)
class Cache:
    """The rows of one sequence in one of the caches of a slot."""

    # Offset at which the number of cells is written.
    at: int
    n_cells: int = 0
    # Lowest position; None without cells.
    lowest: int | None = None
    rows: tuple[Rows, ...] = ()
    # ggml's numbers of the types of keys and values; None without rows.
    types: tuple[int, int] | None = None
    # Values are laid out by column, as without flash attention.
    transposed: bool = False
    # Bytes that describe one cell.
    cell_bytes: int = 0

    @property
    def type_names(self) -> tuple[str, str] | None:
        """Names of the types as options `-ctk` and `-ctv` take them; None without rows."""
        if self.types is None:
            return None
        keys, values = (_TYPES.get(number, f"type {number}") for number in self.types)
        return keys, values


@dataclass(frozen=True, slots=True)
class Insertion:
    """Bytes to insert at an offset of a file."""

    at: int
    put: bytes
    # The bytes replace existing ones instead.
    over: bool = False


def caches(read: Read, size: int) -> tuple[Cache, ...]:
    """Return the caches in a file of `size` bytes; none when the file has any other content."""
    read_caches = list(_caches(_Cursor(read, size)))
    return (
        tuple(cache for cache in read_caches if cache is not None)
        if None not in read_caches
        else ()
    )


def has_checkpoints(read: Read, size: int) -> bool:
    """Return whether a slot that is restored from such a file goes back to a context checkpoint.

    llama-server appends checkpoints to files of this version, and the file has states of recurrent
    layers. Without these it may cut the rows instead, although windows lack the earlier ones.
    False for a file of an unknown form.
    """
    cursor = _Cursor(read, size)
    try:
        version = _begin(cursor)
        return any(list(_sections(cursor, version))) and version >= _ROTATIONS_SINCE
    except ValueError:
        return False


def frame(read: Read, size: int) -> list[tuple[int, int]]:
    """Return the offsets [start, end) of all bytes of a file that are not rows, in order.

    These are the tokens, the cells, and the sizes by which llama-server reads the file to its end;
    it copies rows, states of recurrent layers and checkpoints without looking at them. Empty for a
    file of an unknown form.
    """
    cursor, ranges, position = _Cursor(read, size), list[tuple[int, int]](), 0
    try:
        for _ in _sections(cursor, _begin(cursor)):
            pass
    except ValueError:
        return []
    for start, end in sorted(cursor.rows):
        ranges.append((position, start))
        position = end
    return [*ranges, (position, size)]


def _sections(cursor: _Cursor, version: int) -> Iterator[bool]:
    """Skip what follows the tokens; yields for each part whether it is that of recurrent layers.

    ValueError for data of an unknown form.
    """
    while not cursor.at_end and not _skip_checkpoints(cursor, version):
        is_cache = _skips(cursor, lambda: _cache(cursor, version)) or _skips(
            cursor, lambda: _cache(cursor, version, with_values=False)
        )
        if not is_cache:
            _skip_recurrent(cursor)
        yield not is_cache


def _skips(cursor: _Cursor, read: Callable[[], object]) -> bool:
    """Whether this can be read here; otherwise the cursor stays."""
    at, n_rows = cursor.at, len(cursor.rows)
    try:
        read()
    except ValueError:
        cursor.at = at
        del cursor.rows[n_rows:]
        return False
    return True


def _skip_recurrent(cursor: _Cursor) -> None:
    """Skip the states of recurrent layers; ValueError for data that is none.

    The format is that of llama_memory_recurrent::state_write: cells, the number of layers, and one
    or two states of each recurrent layer.
    """
    n_cells = cursor.number()
    cells = np.frombuffer(cursor.take(8 * n_cells), "<u4").reshape(-1, 2)
    is_transposed, n_layers = cursor.number(), cursor.number()
    if not n_cells or cells[:, 1].any() or is_transposed:
        raise ValueError(_UNKNOWN)
    for _ in range(2 * n_layers):
        if cursor.at_end or cursor.peek() == _APPENDIX_MAGIC:
            break
        if cursor.peek() not in _TYPES:
            raise ValueError(_UNKNOWN)
        _rows(cursor, n_cells)


def first_cache(read: Read, size: int) -> Cache | None:
    """Return the first cache with rows, whatever follows it in the file; None without one."""
    read_caches = _caches(_Cursor(read, size))
    return next((cache for cache in read_caches if cache is None or cache.types), None)


def _caches(cursor: _Cursor) -> Iterator[Cache | None]:
    """Yield the caches in order; None, as the last value, for data that is not a cache."""
    try:
        version = _begin(cursor)
        while not cursor.at_end and not _skip_checkpoints(cursor, version):
            yield _cache(cursor, version)
    except ValueError:
        yield None


def _begin(cursor: _Cursor) -> int:
    """Skip the head and the tokens, and return the version; ValueError for another file."""
    magic, version, n_tokens = _HEAD.unpack(cursor.take(_HEAD.size))
    if magic != _MAGIC or version not in _VERSIONS:
        raise ValueError("another file")
    cursor.skip(4 * n_tokens)
    return int(version)


def _skip_checkpoints(cursor: _Cursor, version: int) -> bool:
    """Whether checkpoints begin here; they must be complete and end the file."""
    if version < _ROTATIONS_SINCE or cursor.peek() != _APPENDIX_MAGIC:
        return False
    _, appendix_version, count = _APPENDIX.unpack(cursor.take(_APPENDIX.size))
    if appendix_version != _APPENDIX_VERSION:
        raise ValueError("checkpoints of another version")
    for _ in range(count):
        cursor.skip(_CHECKPOINT.size)
        for _ in range(3):
            cursor.skip_rows(cursor.number("<Q"))
    if not cursor.at_end:
        raise ValueError("more than checkpoints")
    return True


def has_windows(caches: Sequence[Cache]) -> bool:
    """Return whether some layers keep only a window; these have a separate cache."""
    return len(caches) > 1


def in_window(caches: Sequence[Cache]) -> bool:
    """Return whether the complete text lies within its windows, so that a restore is useless."""
    return has_windows(caches) and caches[-1].lowest == 0


def missing(caches: Sequence[Cache], read: Read) -> list[Insertion]:
    """Return the insertions that complete a file with these caches; empty when it is complete."""
    last = caches[-1] if has_windows(caches) else None
    if last is None or not last.lowest:
        return []
    cells = last.at + 4
    first = read(cells, last.cell_bytes)
    more = [
        Insertion(last.at, struct.pack("<I", last.n_cells + 1), over=True),
        Insertion(cells, struct.pack("<i", last.lowest - 1) + first[4:]),
    ]
    for rows in last.rows:
        more += [Insertion(start, read(start, rows.size)) for start in rows.starts]
    return more


class _Cursor:
    """Reads a file from its start on; ValueError at its end."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size = read, size
        self.at = 0
        # Offsets [start, end) of the rows that were skipped.
        self.rows: list[tuple[int, int]] = []

    @property
    def at_end(self) -> bool:
        """Whether the cursor is at the end."""
        return self.at >= self._size

    def take(self, n_bytes: int) -> bytes:
        at = self.at
        self.skip(n_bytes)  # raises before memory is allocated for more than there is
        return self._read(at, n_bytes)

    def skip(self, n_bytes: int) -> None:
        self.at += n_bytes
        if self.at > self._size:
            raise ValueError(_UNKNOWN)

    def skip_rows(self, n_bytes: int) -> None:
        """Skip bytes that llama-server copies without looking at them."""
        at = self.at
        self.skip(n_bytes)
        self.rows.append((at, self.at))

    def peek(self) -> int | None:
        """The next number, without moving the cursor; None at the end."""
        at = self.at
        try:
            return self.number()
        except ValueError:
            return None
        finally:
            self.at = at

    def number(self, form: str = "<I") -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])


def _cache(cursor: _Cursor, version: int, with_values: bool = True) -> Cache:
    """The cache that begins here; one of its streams at most has cells.

    Latent attention has a cache without values.
    """
    n_streams = cursor.number()
    if not 1 <= n_streams <= 256:
        raise ValueError(_UNKNOWN)
    streams = [_stream(cursor, version, with_values) for _ in range(n_streams)]
    filled = [cache for cache in streams if cache.n_cells]
    if len(filled) > 1:
        raise ValueError(_UNKNOWN)
    return filled[0] if filled else streams[0]


def _stream(cursor: _Cursor, version: int, with_values: bool) -> Cache:
    """Read the cache of one stream; ValueError for data that is not one."""
    at, n_cells = cursor.at, cursor.number()
    if not n_cells:
        return Cache(at)
    cells = _cells(cursor, n_cells)
    transposed, n_layers = cursor.number(), cursor.number()
    if version >= _ROTATIONS_SINCE:
        cursor.skip(8)  # the sizes of the rotations of keys and values
    keys = [_rows(cursor, n_cells) for _ in range(n_layers)]
    turned = _columns if transposed else _rows
    values = [turned(cursor, n_cells) for _ in range(n_layers if with_values else 0)]
    types = (keys[0].type, values[0].type) if keys and values else None
    lowest = int(cells["position"].min())
    rows = (*keys, *values)
    return Cache(at, n_cells, lowest, rows, types, bool(transposed), cells.itemsize)


def _cells(cursor: _Cursor, n_cells: int) -> np.ndarray[Any, Any]:
    """Positions and sequences of cells; with M-RoPE they have image coordinates, too."""
    at = cursor.at
    for kind in _CELLS:
        cursor.at = at
        cells = np.frombuffer(cursor.take(kind.itemsize * n_cells), kind)
        if (cells["n_seq"] == 1).all() and (cells["position"] >= 0).all():
            return cells
    raise ValueError(_UNKNOWN)


def _rows(cursor: _Cursor, n_cells: int) -> Rows:
    type, size = cursor.number(), cursor.number("<Q")
    rows = Rows(type, cursor.at, size)
    cursor.skip_rows(size * n_cells)
    return rows


def _columns(cursor: _Cursor, n_cells: int) -> Rows:
    type, size, count = cursor.number(), cursor.number(), cursor.number()
    if not size:  # otherwise a file could state any number of columns
        raise ValueError(_UNKNOWN)
    rows = Rows(type, cursor.at, size, count, size * n_cells)
    cursor.skip_rows(size * n_cells * count)
    return rows
