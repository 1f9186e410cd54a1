"""Moves and deletes files in a thread: large files keep a disk busy for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_log = logging.getLogger(__name__)
# Files that are removed repeatedly, the latest ones.
_MAX_REPEATED = 16


class FileRemover:
    """Removes files in the order in which they are given; `close` ends its thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "file-removal")
        self._latest: Future[None] | None = None
        self._repeated: dict[str, None] = {}

    @property
    def is_busy(self) -> bool:
        """Whether files are being removed."""
        return self._latest is not None and not self._latest.done()

    def submit(self, work: Callable[[str], None], name: str, repeat: bool = False) -> None:
        """Call `work` with the name of a file; what cannot be removed is found at the next start.

        With `repeat`, `repeat_all` calls it once more: the file may still be written.
        """
        if repeat:
            self._repeated.pop(name, None)
            self._repeated[name] = None
            self._repeated = dict.fromkeys(list(self._repeated)[-_MAX_REPEATED:])

        def remove() -> None:
            try:
                work(name)
            except OSError as error:
                _log.warning("%s is not removed: %s", name, error.strerror)

        self._latest = self._thread.submit(remove)

    def repeat_all(self, work: Callable[[str], None]) -> None:
        """Remove the files that may have been written since they were removed."""
        for name in self._repeated:
            self.submit(work, name)

    def wait(self) -> None:
        """Block until all files are removed that were given before."""
        if self._latest is not None:  # they are removed one after the other
            self._latest.result()

    async def wait_async(self) -> None:
        """As `wait`, for the event loop."""
        if self._latest is not None:
            # A caller that is cancelled does not take the removal out of the queue.
            await asyncio.shield(asyncio.wrap_future(self._latest))

    def close(self) -> None:
        """Wait for all removals; no call may follow."""
        self._thread.shutdown()
