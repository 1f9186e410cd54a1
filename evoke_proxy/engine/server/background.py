"""Runs background tasks, which outlive their request; their failures are only logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from evoke_proxy.errors import EvokeError

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """A set of tasks, as an async context manager; leaving it waits for all of them."""

    def __init__(self, on_failure: Callable[[EvokeError], None] | None = None) -> None:
        """`on_failure` is called with each EvokeError that ends a task, after it is logged."""
        self._on_failure = on_failure
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether any task is not done."""
        return bool(self._running)

    async def __aenter__(self) -> BackgroundTasks:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.__aexit__(None, None, None)

    def run(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Start a task; `what` names it in the log.

        Raises RuntimeError when the context was left; the caller then closes `work`.
        """
        logged = self._logged(work, what)
        try:
            task = self._tasks.create_task(logged)
        except RuntimeError:
            logged.close()  # avoids a warning: it never starts
            raise
        self._running.add(task)
        task.add_done_callback(lambda task: self._done(task, work))
        return task

    async def ended(self, but: Collection[asyncio.Task[None]]) -> None:
        """Wait for the running tasks except `but`, and for the tasks that these have started."""
        for _ in range(2):
            if waited_for := self._running.difference(but):
                await asyncio.wait(waited_for)

    def _done(self, task: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
        work.close()  # avoids a warning when the task was cancelled before it started
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
