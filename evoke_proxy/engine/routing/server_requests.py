"""The requests at the servers of a pool: counts them, and cancels those that only wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from evoke_proxy.engine.routing.pool_servers import PoolServers
from evoke_proxy.engine.server.slot_queue import finished
from evoke_proxy.errors import UpstreamUnavailable

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Opening:
    """A task that opens a request at a server, and whether it was cancelled for a failover."""

    task: asyncio.Task[Any]
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Cancel the task, without waiting for its end."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()


class ServerRequests:
    """Requests by the index of their server: all are counted, and those being opened are known."""

    def __init__(self, servers: PoolServers) -> None:
        self._servers = servers
        self._openings: list[list[_Opening]] = [[] for _ in range(len(servers))]

    @contextmanager
    def counted(self, at: int) -> Iterator[None]:
        """Count a request at a server within this context."""
        self._servers.pool.request_started(at)
        try:
            yield
        finally:
            self._servers.pool.request_ended(at)

    async def open(self, at: int, work: Coroutine[Any, Any, T]) -> T:
        """Run work that opens a request at a server, in a separate task; returns its result.

        Raises UpstreamUnavailable when `cancel_openings` is called meanwhile, so that a request
        does not wait forever for a server that hangs.
        """
        task = asyncio.get_running_loop().create_task(work)
        opening = _Opening(task)
        self._openings[at].append(opening)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await finished(task)
            raise
        finally:
            self._openings[at].remove(opening)
        if opening.is_cancelled and task.cancelled():
            url = self._servers[at].upstream.url
            raise UpstreamUnavailable(
                f"llama-server at {url} does not answer its health checks", url
            )
        return task.result()

    def cancel_openings(self, at: int) -> None:
        """Cancel the requests that are being opened at a server, so that they fail over."""
        for opening in list(self._openings[at]):
            opening.cancel()
