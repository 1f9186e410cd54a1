"""Files moved and deleted behind our back, one after the other: large ones take a disk long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_log = logging.getLogger(__name__)
# Files that are swept again and again, the latest ones.
_AGAIN = 16


class FileRemover:
    """A thread of its own, until `close`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "vault")
        self._latest: Future[None] | None = None
        self._again: dict[str, None] = {}

    @property
    def busy(self) -> bool:
        """Whether files are on their way out."""
        return self._latest is not None and not self._latest.done()

    def sweep(self, work: Callable[[str], None], name: str, again: bool = False) -> None:
        """Have a file moved or deleted; what cannot be is found at the next start. `again` when
        it may still be written."""
        if again:
            self._again.pop(name, None)
            self._again[name] = None
            self._again = dict.fromkeys(list(self._again)[-_AGAIN:])

        def swept() -> None:
            try:
                work(name)
            except OSError as error:
                _log.warning("%s stays where it is: %s", name, error.strerror)

        self._latest = self._thread.submit(swept)

    def sweep_again(self, work: Callable[[str], None]) -> None:
        """Those that may have been written meanwhile."""
        for name in self._again:
            self.sweep(work, name)

    def wait(self) -> None:
        """Until all of that is done."""
        if self._latest is not None:  # they go one after the other
            self._latest.result()

    async def swept(self) -> None:
        """The same, without blocking."""
        if self._latest is not None:
            # Whoever stops waiting does not take it out of the queue.
            await asyncio.shield(asyncio.wrap_future(self._latest))

    def close(self) -> None:
        """All of that is done, and no call comes after this."""
        self._thread.shutdown()
