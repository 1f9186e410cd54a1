"""Arrays that go on: of a long conversation only what a turn adds is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]

_LEAST_ROOM = 1024


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory with room at its end; its first `used` rows never change any more."""

    rows: Rows
    used: int


@dataclass(frozen=True, slots=True, eq=False)
class Grown:
    """Rows, read only, that others may share the beginning of."""

    rows: Rows
    _buffer: _Buffer

    @classmethod
    def of(cls, rows: Rows) -> Grown:
        """These rows, which nobody may write to any more."""
        rows.flags.writeable = False
        return cls(rows, _Buffer(rows, len(rows)))

    def followed(self, n: int, more: Rows) -> Grown:
        """The first `n` of these rows, and then others: in the same memory where nobody has gone on
        otherwise from there."""
        buffer, end = self._buffer, n + len(more)
        there = min(buffer.used, end)
        same = n >= buffer.used or np.array_equal(buffer.rows[n:there], more[: there - n])
        if not same or n > buffer.used or end > len(buffer.rows):
            return self._copied(self.rows[:n], more)
        if end > there:
            buffer.rows[there:end] = more[there - n :]
            buffer.used = end
        return self._view(buffer, end)

    @classmethod
    def _copied(cls, rows: Rows, more: Rows) -> Grown:
        end = len(rows) + len(more)
        memory = np.empty(2 * end + _LEAST_ROOM, rows.dtype)
        memory[: len(rows)], memory[len(rows) : end] = rows, more
        return cls._view(_Buffer(memory, end), end)

    @classmethod
    def _view(cls, buffer: _Buffer, end: int) -> Grown:
        rows = buffer.rows[:end]
        rows.flags.writeable = False
        return cls(rows, buffer)


def same_memory(one: Rows, other: Rows) -> bool:
    """Whether two arrays begin at the same place of memory that nobody writes to: then the shorter
    is a beginning of the longer."""
    if one.base is None or one.base is not other.base or one.flags.writeable:
        return False
    return bool(one.__array_interface__["data"][0] == other.__array_interface__["data"][0])
