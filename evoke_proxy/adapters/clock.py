"""Clocks that never go backwards, for times that are stored on disk."""

from __future__ import annotations

import time


def uptime_s() -> float:
    """Seconds of a monotonic clock that includes suspend; only differences are meaningful."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class SteadyClock:
    """Gives seconds since the Unix epoch, independent of later changes of the system clock.

    The system clock is read once, by the constructor. After that the time never goes backwards.
    """

    def __init__(self) -> None:
        self._ahead_s = time.time() - uptime_s()

    def now(self) -> float:
        """Return the seconds since the Unix epoch."""
        return uptime_s() + self._ahead_s

    def advance_to(self, seconds: float) -> None:
        """Move the clock forward to `seconds` if it is behind; an earlier process stored that time.

        It is behind if the system clock was set back since, or lost its time without power.
        """
        self._ahead_s = max(self._ahead_s, seconds - uptime_s())
