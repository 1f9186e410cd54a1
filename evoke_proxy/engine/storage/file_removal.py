"""Moves and deletes files in a thread, because large files keep a disk busy for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_log = logging.getLogger(__name__)
# The most files that are removed repeatedly.
_MAX_REPEATED = 16


class FileRemover:
    """Removes files in the order of the `submit` calls; `close` ends its thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "file-removal")
        self._latest: Future[None] | None = None
        self._repeated: dict[str, None] = {}

    @property
    def is_busy(self) -> bool:
        """Whether files are being removed."""
        return self._latest is not None and not self._latest.done()

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

        self._latest = self._thread.submit(remove)

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

    def close(self) -> None:
        """Wait for all removals; no call may follow."""
        self._thread.shutdown()
