"""Runs the proxy in an event loop that serves few connections at a time.

asyncio handles every connection that has bytes to read before it looks at timers and at finished
work again. With hundreds of busy connections that takes tens of milliseconds. Here it handles a few
of them, then looks, then handles the next few.
"""

from __future__ import annotations

import asyncio
import selectors
from bisect import bisect_right
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
# Connections that are handled before timers are looked at.
_EVENTS_PER_STEP = 16
_Ready = list[tuple[selectors.SelectorKey, int]]


class FairSelector(selectors.DefaultSelector):
    """Returns a few of the ready files at a time, each in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self._latest_fd = -1

    def select(self, timeout: float | None = None) -> _Ready:
        """At most `_EVENTS_PER_STEP` ready files; the next calls return the others."""
        ready = super().select(timeout)
        if len(ready) <= _EVENTS_PER_STEP:
            return ready
        ready.sort(key=_descriptor)
        begin = bisect_right(ready, self._latest_fd, key=_descriptor)
        chosen = (ready[begin:] + ready[:begin])[:_EVENTS_PER_STEP]
        self._latest_fd = _descriptor(chosen[-1])
        return chosen


def _descriptor(ready: tuple[selectors.SelectorKey, int]) -> int:
    return ready[0].fd


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop with a FairSelector."""
    return asyncio.SelectorEventLoop(FairSelector())


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run the proxy until it ends, as `asyncio.run` does; returns the result of `main`."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
