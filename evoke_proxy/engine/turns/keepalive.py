"""Signs of life for a client while a long call is made for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from evoke_proxy.engine.server.slot_queue import finished

T = TypeVar("T")


async def keep_alive(
    work: Coroutine[Any, Any, T], tell: Callable[[], Awaitable[None]] | None, every_s: float
) -> T:
    """The result of work during which `tell` is called every so many seconds.

    What `tell` raises, when the client is gone, ends the work. The work has ended in any case when
    this returns or raises. Without `tell` it is just awaited.
    """
    if tell is None:
        return await work
    task = asyncio.get_running_loop().create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=every_s))[0]:
            await tell()
    except BaseException:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await finished(task)
        raise
    return task.result()
