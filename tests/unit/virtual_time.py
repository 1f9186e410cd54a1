"""An event loop with virtual time: sleeping takes no real time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when no callback is ready."""

    _clock = 0.0

    def time(self) -> float:
        return self._clock

    def _run_once(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        due = [timer.when() for timer in timers if not timer.cancelled()]
        if not self._ready and due:  # type: ignore[attr-defined]
            self._clock = max(self._clock, min(due))
        super()._run_once()  # type: ignore[misc]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, in virtual time; `work` must not wait for sockets or threads."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)
