"""Arrays of growing conversations: each turn writes only the rows that it adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]

_MIN_SPARE_ROWS = 1024


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory with spare rows at its end; the first `used` rows never change."""

    rows: Rows
    used: int


@dataclass(frozen=True, slots=True, eq=False)
class AppendOnlyArray:
    """Read-only rows in a buffer that is shared with longer arrays of the same prefix."""

    rows: Rows
    _buffer: _Buffer

    @classmethod
    def of(cls, rows: Rows) -> AppendOnlyArray:
        """Wrap these rows, and make them read-only."""
        rows.flags.writeable = False
        return cls(rows, _Buffer(rows, len(rows)))

    def extended(self, n: int, more: Rows) -> AppendOnlyArray:
        """Join the first `n` rows and `more`.

        The result shares the memory of this array unless other rows follow the first `n` there.
        """
        buffer, end = self._buffer, n + len(more)
        overlap_end = min(buffer.used, end)
        same = n >= buffer.used or np.array_equal(
            buffer.rows[n:overlap_end], more[: overlap_end - n]
        )
        if not same or n > buffer.used or end > len(buffer.rows):
            return self._copied(self.rows[:n], more)
        if end > overlap_end:
            buffer.rows[overlap_end:end] = more[overlap_end - n :]
            buffer.used = end
        return self._view(buffer, end)

    @classmethod
    def _copied(cls, rows: Rows, more: Rows) -> AppendOnlyArray:
        end = len(rows) + len(more)
        memory = np.empty(2 * end + _MIN_SPARE_ROWS, rows.dtype)
        memory[: len(rows)], memory[len(rows) : end] = rows, more
        return cls._view(_Buffer(memory, end), end)

    @classmethod
    def _view(cls, buffer: _Buffer, end: int) -> AppendOnlyArray:
        rows = buffer.rows[:end]
        rows.flags.writeable = False
        return cls(rows, buffer)


def same_memory(one: Rows, other: Rows) -> bool:
    """Whether two read-only arrays begin at the same address.

    The shorter one is then a prefix of the longer one.
    """
    if one.base is None or one.base is not other.base or one.flags.writeable:
        return False
    return bool(one.__array_interface__["data"][0] == other.__array_interface__["data"][0])
