"""Work that goes on when its request is over; whatever fails in it is logged, and only that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from evoke_proxy.errors import EvokeError

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Use as an async context manager; leaving it waits for all of them.

    `on_failure` gets each of our own errors that ends a task, after it is logged.
    """

    def __init__(self, on_failure: Callable[[EvokeError], None] | None = None) -> None:
        self._on_failure = on_failure
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether any of it is not done."""
        return bool(self._running)

    async def __aenter__(self) -> BackgroundTasks:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.__aexit__(None, None, None)

    def run(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Begin it; `what` names it in the log."""
        task = self._tasks.create_task(self._logged(work, what))
        self._running.add(task)
        task.add_done_callback(lambda task: self._done(task, work))
        return task

    async def ended(self, but: Collection[asyncio.Task[None]]) -> None:
        """Wait for what is under way now, and for what that begins before it ends, `but` for
        these."""
        for _ in range(2):
            if waited_for := self._running.difference(but):
                await asyncio.wait(waited_for)

    def _done(self, task: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
        work.close()  # one that was cancelled before it began complains otherwise
        self._running.discard(task)

    async def _logged(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await work
        except EvokeError as error:
            _log.warning("%s failed: %s", what, error)
            if self._on_failure is not None:
                self._on_failure(error)
        except Exception:
            _log.exception("%s failed", what)
