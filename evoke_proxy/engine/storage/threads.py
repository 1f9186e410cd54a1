"""Runs work on the disk in one thread each: changes of the index, and removals of files."""

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
# The most files that are removed repeatedly.
_MAX_REPEATED = 16


class OrderedThread:
    """A thread that runs calls in the order in which they are queued."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._latest: Future[Any] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call is running or queued."""
        return self._latest is not None and not self._latest.done()

    def close(self) -> None:
        """Wait for all calls; no call may follow."""
        self._thread.shutdown()

    def _queue(self, work: Callable[[], T]) -> Future[T]:
        future = self._thread.submit(work)
        self._latest = future
        return future


class IndexThread(OrderedThread):
    """Makes changes of one index; failures are counted and logged."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__("index")
        self._metrics = metrics
        # Whether the latest change has failed.
        self._is_failing = False

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

        return self._queue(run)

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


class FileRemover(OrderedThread):
    """Removes files, of which large ones keep a disk busy for long."""

    def __init__(self) -> None:
        super().__init__("file-removal")
        self._repeated: dict[str, None] = {}

    def submit(self, work: Callable[[str], None], name: str, repeat: bool = False) -> None:
        """Call `work`, which removes a file, with the name of the file.

        A file that cannot be removed is removed at the next start of the proxy. With `repeat`,
        `repeat_all` removes it again, because llama-server may still write it.
        """
        if repeat:
            self._repeated.pop(name, None)
            self._repeated[name] = None
            self._repeated = dict.fromkeys(list(self._repeated)[-_MAX_REPEATED:])

        def remove() -> None:
            try:
                work(name)
            except OSError as error:
                _log.warning("cannot remove %s: %s", name, error.strerror)

        self._queue(remove)

    def repeat_all(self, work: Callable[[str], None]) -> None:
        """Remove again the files that were submitted with `repeat`."""
        for name in self._repeated:
            self.submit(work, name)

    def wait(self) -> None:
        """Block until all files that were submitted before are removed."""
        if self._latest is not None:  # they are removed one after the other
            self._latest.result()

    async def wait_async(self) -> None:
        """As `wait`, for the event loop."""
        if self._latest is not None:
            # Shielded, so that cancelling the caller does not cancel the removal.
            await asyncio.shield(asyncio.wrap_future(self._latest))
