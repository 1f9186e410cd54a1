"""Requests of clients under way: none begin once the proxy is stopping, those that run may end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from evoke_proxy.errors import Draining


class ActiveRequests:
    """Counts them; `stopping` says whether new ones are refused."""

    def __init__(self, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping
        self._under_way = 0
        self._none = asyncio.Event()
        self._none.set()

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._under_way

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around one request; raises Draining when it is not to begin."""
        if self._stopping():
            raise Draining
        self._under_way += 1
        self._none.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._none.set()

    async def ended(self, limit_s: float) -> int:
        """Wait until none is left, so many seconds at most; how many are left then."""
        try:
            async with asyncio.timeout(limit_s):
                await self._none.wait()
        except TimeoutError:
            pass
        return self._under_way


ACTIVE_REQUESTS: web.AppKey[ActiveRequests] = web.AppKey("ACTIVE_REQUESTS", ActiveRequests)
