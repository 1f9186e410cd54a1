"""Clocks for times that are stored on disk: they never go backwards."""

from __future__ import annotations

import time


def uptime_s() -> float:
    """Seconds of a monotonic clock that includes suspend; only differences are meaningful."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class SteadyClock:
    """Seconds since the epoch, independent of later changes of the system clock.

    The system clock is read once, when this one is made. A later event always has the later time.
    """

    def __init__(self) -> None:
        self._ahead_s = time.time() - uptime_s()

    def now(self) -> float:
        """Seconds since the epoch."""
        return uptime_s() + self._ahead_s

    def advance_to(self, seconds: float) -> None:
        """Move the clock forward to a time that an earlier process stored, if it is behind it.

        The system clock may have been set back since, or have lost its battery.
        """
        self._ahead_s = max(self._ahead_s, seconds - uptime_s())
