"""Coalesces equal requests: one answer is computed for all clients that wait for it.

A request never gets an answer whose computation began before the request. After a computation,
the same answer is not computed again before a multiple of the time of the computation has passed.
The load therefore does not grow with the number of open admin pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

# The pause, as a multiple of the time that the answer took: 10 ms of work every 50 ms.
_PAUSE = 4.0
# The longest pause between two computations of an answer.
_MOST_PAUSE_S = 1.0
_KEYS = 64


@dataclass(slots=True)
class _Entry:
    """The state of one key."""

    # The computation that new requests join; None once it has begun.
    next: asyncio.Task[bytes] | None = None
    # Held while an answer is computed.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Event loop time at which the next computation may begin.
    free_at: float = 0.0


class RequestCoalescer:
    """Computes the answer of each key at most once at a time."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    async def get(self, key: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """The result of a call of `make` that begins after this call; raises what `make` raises."""
        entry = self._entries.get(key)
        if entry is None:
            self._forget_idle()
            entry = self._entries[key] = _Entry()
        if entry.next is None:
            entry.next = asyncio.get_running_loop().create_task(self._compute(entry, make))
            entry.next.add_done_callback(_consume_error)
        return await asyncio.shield(entry.next)

    async def _compute(self, entry: _Entry, make: Callable[[], Awaitable[bytes]]) -> bytes:
        loop = asyncio.get_running_loop()
        async with entry.lock:
            pause = entry.free_at - loop.time()
            if pause > 0:
                await asyncio.sleep(pause)
            entry.next = None  # later requests join the next computation
            began = loop.time()
            try:
                return await make()
            finally:
                ended = loop.time()
                entry.free_at = ended + min(_MOST_PAUSE_S, _PAUSE * (ended - began))

    def _forget_idle(self) -> None:
        """Remove the keys without a computation, when there are many keys."""
        if len(self._entries) >= _KEYS:
            used = self._entries.items()
            self._entries = {k: e for k, e in used if e.next or e.lock.locked()}


def _consume_error(task: asyncio.Task[bytes]) -> None:
    """Retrieve the error of a task, so that asyncio does not log it when no client waits for it."""
    if not task.cancelled():
        task.exception()


COALESCER = web.AppKey("coalescing", RequestCoalescer)
