"""Counts the requests that run, and refuses new ones while the proxy stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from evoke_proxy.errors import Draining


class ActiveRequests:
    """Counts running requests; `is_stopping` tells whether new ones are refused."""

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self._is_stopping = is_stopping
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()
        self._idle_since = time.monotonic()

    @property
    def idle_s(self) -> float:
        """For how many seconds no request has run; 0 while one does."""
        return 0.0 if self._count else time.monotonic() - self._idle_since

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count one request within the block; raises Draining while the proxy stops."""
        if self._is_stopping():
            raise Draining
        self._count += 1
        self._none.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._none.set()
                self._idle_since = time.monotonic()

    async def wait_until_idle(self, limit_s: float) -> int:
        """Wait until no request runs, for `limit_s` seconds at most; returns how many still do."""
        try:
            async with asyncio.timeout(limit_s):
                await self._none.wait()
        except TimeoutError:
            pass
        return self._count


ACTIVE_REQUESTS: web.AppKey[ActiveRequests] = web.AppKey("ACTIVE_REQUESTS", ActiveRequests)
