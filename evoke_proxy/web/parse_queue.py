"""Shares the time for parsing what clients send among them.

Bytes differ a thousandfold in what they cost: a chunk of one byte costs as much as one of 64 KiB. A
client that sends such chunks on a few connections would otherwise take all time of the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# Seconds of one iteration of the event loop in which queued bytes are parsed. Each step gives a
# handler work as well, and what others need waits for several iterations.
MOST_S = 0.0001


class ParseQueue:
    """Runs steps of parsing, one client address after the other, for a part of each iteration."""

    def __init__(self, most_s: float = MOST_S) -> None:
        """Begin steps during `most_s` seconds of an iteration of the event loop, at least one."""
        self._most_s = most_s
        self._is_scheduled = False
        # By address, the one whose turn is next first.
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    def add(self, address: str, step: Callable[[], None]) -> None:
        """Run `step` in a later iteration, after earlier ones from the same address."""
        self._waiting.setdefault(address, deque()).append(step)
        self._schedule(asyncio.get_running_loop())

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled = False
        end = loop.time() + self._most_s
        try:
            while self._waiting:
                address = next(iter(self._waiting))
                steps = self._waiting.pop(address)
                step = steps.popleft()
                if steps:
                    self._waiting[address] = steps
                step()  # may add the next one
                if loop.time() >= end:
                    break
        finally:
            if self._waiting:
                self._schedule(loop)
