"""Clocks: times that are stored on disk and never go backwards, and time limits of calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# The event loop runs at least so many times before a time limit expires.
_STEPS = 20


@asynccontextmanager
async def timeout_without_lag(limit_s: float) -> AsyncIterator[None]:
    """Limit the time of a block, without the time in which the event loop was too busy to run it.

    Raises TimeoutError as asyncio.timeout does. Use it where an expired limit says something about
    the other side: an overloaded event loop lets the limit of asyncio.timeout expire as well.
    """
    loop = asyncio.get_running_loop()
    n_left = _STEPS
    timer: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as timeout:

        def step() -> None:
            nonlocal n_left, timer
            n_left -= 1
            if n_left < 0:
                timeout.reschedule(loop.time())
            else:
                timer = loop.call_later(limit_s / _STEPS, step)

        step()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


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
