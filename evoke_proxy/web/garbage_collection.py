"""Full garbage collections wait until no request runs: they stop the whole process.

With a thousand sessions one takes 70 ms. Young objects are collected as usual, and sessions are
freed when they are forgotten, without any collection: only objects that refer to each other and
have lived for long wait for it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

# New objects between two collections of the first generation. A turn of a long conversation makes
# thousands of objects and nearly no cycles: Python's default of 700 costs a twentieth of its time.
NEW_OBJECTS = 8_000
# Python's own threshold of full collections, as high as it goes.
_NEVER = 2**31 - 1
_INTERVAL_S = 5.0
# Collections of the second generation since the last full one. From the first number on a full
# collection runs when no request has run for two intervals; from the second on it runs in any case.
_WORTH_IT, _OVERDUE = 500, 5000
# Collections of the first generation before one of the second, which then takes 5 ms at most.
_FIRST_FOR_SECOND = 2


class DeferredCollection:
    """Collects garbage when `is_idle`; `start` and `stop` are called in the event loop."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        self._timer: asyncio.TimerHandle | None = None
        self._before = gc.get_threshold()
        self._was_idle = False

    def start(self) -> None:
        """From now on the interpreter makes no full collection by itself, and looks no more at
        what is there already: modules, and the sessions that were recalled."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS, _FIRST_FOR_SECOND, _NEVER)
        self._wait()

    def stop(self) -> None:
        """The interpreter collects by itself again."""
        gc.set_threshold(*self._before)
        gc.unfreeze()
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._look)

    def _look(self) -> None:
        count, was_idle, self._was_idle = gc.get_count()[2], self._was_idle, self._is_idle()
        if count >= _OVERDUE or (count >= _WORTH_IT and was_idle and self._was_idle):
            gc.collect()
        self._wait()
