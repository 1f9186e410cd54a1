"""Answers that many clients ask for at the same time, made once for all of them.

An answer is always begun after it was asked for, so nobody is given an old one; and of the time it
takes to make an answer, a multiple passes before the same is made again. The load is therefore the
same however many pages are open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

# An answer that takes 10 ms is made at most every 50 ms.
_PAUSE = 4.0
# No answer waits longer than this for its turn.
_MOST_PAUSE_S = 1.0
_KEYS = 64


@dataclass(slots=True)
class _Entry:
    """`next` is made from now on, or as soon as the one before is done and the pause is over."""

    next: asyncio.Task[bytes] | None = None
    lock: asyncio.Lock | None = None
    free_at: float = 0.0


class RequestCoalescer:
    """Makes each answer, named by a key, at most once at a time."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    async def get(self, key: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """What `make` returns, called after this; raises what it raises."""
        entry = self._entries.get(key)
        if entry is None:
            self._forget_idle()
            entry = self._entries[key] = _Entry(lock=asyncio.Lock())
        if entry.next is None:
            entry.next = asyncio.get_running_loop().create_task(self._made(entry, make))
            entry.next.add_done_callback(_seen)
        return await asyncio.shield(entry.next)

    async def _made(self, entry: _Entry, make: Callable[[], Awaitable[bytes]]) -> bytes:
        loop = asyncio.get_running_loop()
        assert entry.lock is not None
        async with entry.lock:
            pause = entry.free_at - loop.time()
            if pause > 0:
                await asyncio.sleep(pause)
            entry.next = None  # who asks from now on gets the one after this
            began = loop.time()
            try:
                return await make()
            finally:
                ended = loop.time()
                entry.free_at = ended + min(_MOST_PAUSE_S, _PAUSE * (ended - began))

    def _forget_idle(self) -> None:
        """Forget the keys that nobody asks for now, when there are many."""
        if len(self._entries) >= _KEYS:
            used = self._entries.items()
            self._entries = {k: e for k, e in used if e.next or (e.lock and e.lock.locked())}


def _seen(task: asyncio.Task[bytes]) -> None:
    """An error that nobody waits for any more is not logged as lost."""
    if not task.cancelled():
        task.exception()


COALESCER = web.AppKey("coalescing", RequestCoalescer)
