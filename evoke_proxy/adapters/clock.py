"""A clock for what is kept across processes: it tells the date, and nobody can set it back."""

from __future__ import annotations

import time


def uptime_s() -> float:
    """Seconds that go on evenly, also while the machine sleeps; only differences mean anything."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class SteadyClock:
    """Seconds since the epoch by the system's clock as it was when this one was made.

    Setting the system's clock afterwards changes nothing here: nothing gets older or younger at
    once, and what is used later has the later time.
    """

    def __init__(self) -> None:
        self._ahead_s = time.time() - uptime_s()

    def now(self) -> float:
        """Seconds since the epoch."""
        return uptime_s() + self._ahead_s

    def advance_to(self, seconds: float) -> None:
        """Go on from a time that was noted before this clock was made, unless it is later now.

        The system's clock may have been set back since, or have no battery.
        """
        self._ahead_s = max(self._ahead_s, seconds - uptime_s())
