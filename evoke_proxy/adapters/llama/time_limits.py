"""A time limit that does not expire because the event loop of this process is overloaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# A time limit is divided into this many steps, each of which starts after the previous one has run.
_STEPS = 20


@asynccontextmanager
async def timeout_without_lag(limit_s: float) -> AsyncIterator[None]:
    """Limit the time of a `with` block, without counting long delays of the event loop itself.

    Raises TimeoutError as asyncio.timeout does. Use it if an expired limit is taken as a failure of
    the other side: the limit of asyncio.timeout also expires when this process is overloaded. A
    delay of the event loop counts at most as one of the limit's steps.
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
