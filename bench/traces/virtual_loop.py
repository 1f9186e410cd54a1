"""An event loop with virtual time: sleeping takes no real time, computing no virtual time.

Work for threads runs at once in the loop, so that the order of events never depends on the speed of
this machine."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when no callback is ready."""

    _clock = 0.0

    def time(self) -> float:
        return self._clock

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
            heapq.heappop(timers)._scheduled = False
        if not self._ready and timers:  # type: ignore[attr-defined]
            self._clock = max(self._clock, timers[0].when())
        super()._run_once()  # type: ignore[misc]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, in virtual time; `work` must not wait for sockets."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)
