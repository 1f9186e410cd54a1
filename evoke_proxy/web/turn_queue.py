"""Bounds how many requests begin in one iteration of the event loop.

A client with hundreds of connections that sends its next request before it has read the last answer
would otherwise run hundreds of handlers before the other connections are served.
"""

from __future__ import annotations

import asyncio
from collections import deque

# A handler runs for about a millisecond before it first waits.
MOST_PER_ITERATION = 4
# After an iteration of more seconds than this, one request begins: what began before works on.
LONG_S = 0.002


class TurnQueue:
    """Lets requests begin in the order of their arrival, one client address after the other.

    A request waits only when others have begun in the same iteration of the event loop.
    """

    def __init__(self, most: int = MOST_PER_ITERATION) -> None:
        """Let `most` requests begin per iteration."""
        self._most = most
        self._started = 0
        self._is_scheduled = False
        self._scheduled_at = 0.0
        # By address, the one whose turn is next first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def wait(self, address: str) -> None:
        """Return when a request from this address may begin."""
        loop = asyncio.get_running_loop()
        self._schedule(loop)
        if self._started < self._most and not self._waiting:
            self._started += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(address, deque()).append(turn)
        await turn

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_scheduled:
            self._is_scheduled, self._scheduled_at = True, loop.time()
            loop.call_soon(self._next_iteration, loop)

    def _next_iteration(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled, self._started = False, 0
        most = self._most if loop.time() - self._scheduled_at < LONG_S else 1
        while self._waiting and self._started < most:
            address = next(iter(self._waiting))
            turns = self._waiting.pop(address)
            turn = turns.popleft()
            if turns:
                self._waiting[address] = turns
            if not turn.done():  # else the client has disconnected
                turn.set_result(None)
                self._started += 1
        if self._started:
            self._schedule(loop)
