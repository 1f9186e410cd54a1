"""Runs the calls of one index in a thread, one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.errors import SnapshotUnusable

_log = logging.getLogger(__name__)
T = TypeVar("T")


class IndexThread:
    """Makes changes in the order of the calls; failures are counted and logged."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, "index")
        self._latest: Future[Any] | None = None
        # Whether the latest change has failed.
        self._is_failing = False

    @property
    def is_busy(self) -> bool:
        """Whether a call is running or queued."""
        return self._latest is not None and not self._latest.done()

    def close(self) -> None:
        """Wait for all calls; no call may follow."""
        self._thread.shutdown()

    def submit(self, work: Callable[..., T], *args: Any, reads: bool = False) -> Future[T]:
        """Queue a call and return its result as a future; set `reads` when it changes nothing.

        A SnapshotUnusable that the call raises is counted as a failure.
        """

        def run() -> T:
            try:
                result = work(*args)
            except SnapshotUnusable as error:
                self._count_failure(error)
                raise
            self._is_failing &= reads
            return result

        self._latest = self._thread.submit(run)
        return self._latest

    async def run(self, work: Callable[..., T], *args: Any, reads: bool = False) -> T:
        """Queue a call and wait for it; it runs even when the caller is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self.submit(work, *args, reads=reads)))

    def enqueue(self, work: Callable[[], None]) -> None:
        """Queue a change; a failure is only counted and logged."""
        self.submit(work).add_done_callback(_log_unexpected)

    def _count_failure(self, error: SnapshotUnusable) -> None:
        """Count a failed change, and log the first of consecutive failures as a warning."""
        self._metrics.index_failures.inc()
        level = logging.DEBUG if self._is_failing else logging.WARNING
        _log.log(level, "the index of snapshots and records cannot be written: %s", error)
        self._is_failing = True


def _log_unexpected(work: Future[None]) -> None:
    """Log an unexpected failure; failures of the disk were logged when they were counted."""
    error = work.exception()
    if error is not None and not isinstance(error, SnapshotUnusable):
        _log.error("a change of the index failed", exc_info=error)
