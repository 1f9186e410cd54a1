"""A time limit for calls of a server that an overloaded event loop does not let expire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# The number of iterations of the event loop before a time limit may expire.
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
