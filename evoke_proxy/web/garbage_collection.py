"""Defers full garbage collections until no request runs.

A full collection stops the process; with a thousand sessions it takes 70 ms. Younger generations
are collected as usual. Sessions are freed by their reference counts, so only old objects in
reference cycles wait: what was in use while a younger generation was collected. Free pages of the
heap, which malloc keeps below others in use, go back to the system only while no request runs.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from evoke_proxy.adapters.allocator import return_free_pages

# New objects between two collections of the first generation. A turn of a long conversation makes
# thousands of objects and hardly any cycles: with Python's default of 700, collections take a
# twentieth of its time.
NEW_OBJECTS = 4_000
# The highest threshold, which turns off Python's own full collections.
_NEVER = 2**31 - 1
_INTERVAL_S = 5.0
# Collections of the second generation since the last full one. From `_WORTH_IT` on, a full
# collection runs when no request has run for an interval; from `_OVERDUE` on, in any case. At a low
# load they are few: then so many seconds since the last full one, in which there was one of them.
_WORTH_IT, _OVERDUE = 1000, 10_000
_WORTH_IT_S, _OVERDUE_S = 60.0, 3600.0
# Seconds between two returns of free pages. Each stops the process: up to 23 ms with 50 MB free,
# tenths of a second with hundreds of MB in small pieces.
_TRIM_INTERVAL_S = 60.0
# Collections of the first generation between two of the second, which then take at most 3 ms.
_FIRST_FOR_SECOND = 2


class DeferredCollection:
    """Runs full collections while the proxy is idle; start and stop it in the event loop."""

    def __init__(self, idle_s: Callable[[], float]) -> None:
        """`idle_s` tells for how many seconds no request has run."""
        self._idle_s = idle_s
        self._timer: asyncio.TimerHandle | None = None
        self._collected_at = self._trimmed_at = 0.0
        self._before = gc.get_threshold()

    def start(self) -> None:
        """Turn the interpreter's own full collections off.

        The objects that exist now (modules, and the sessions loaded at start) are never collected.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS, _FIRST_FOR_SECOND, _NEVER)
        self._collected_at = self._trimmed_at = asyncio.get_running_loop().time()
        self._schedule()

    def stop(self) -> None:
        """Let the interpreter run full collections again."""
        gc.set_threshold(*self._before)
        gc.unfreeze()
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._check)

    def _check(self) -> None:
        now, count = asyncio.get_running_loop().time(), gc.get_count()[2]
        age_s = now - self._collected_at if count else 0.0
        is_overdue = count >= _OVERDUE or age_s >= _OVERDUE_S
        is_worth_it = count >= _WORTH_IT or age_s >= _WORTH_IT_S
        idle_s = self._idle_s()
        is_idle = idle_s >= _INTERVAL_S
        if is_overdue or (is_worth_it and is_idle):
            gc.collect()
            self._collected_at = now
        untrimmed_s = now - self._trimmed_at
        if is_idle and untrimmed_s >= _TRIM_INTERVAL_S and untrimmed_s > idle_s:
            return_free_pages()  # requests have run since the last time
            self._trimmed_at = now
        self._schedule()
