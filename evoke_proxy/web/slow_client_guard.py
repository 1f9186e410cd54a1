"""How long a slow client is waited for: it holds a connection, maybe a slot, that others want.

Idle connections, and heads that take too long, are closed by the server that aiohttp brings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import LimitsConfig

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SlowClientGuard:
    """Cuts clients off that send their request, or read their answer, too slowly."""

    def __init__(self, limits: LimitsConfig, metrics: Metrics) -> None:
        self._limits = limits
        self._dropped = metrics.clients_dropped

    async def write(self, request: web.Request, response: web.StreamResponse, chunk: bytes) -> None:
        """Give a part of an answer to a client; ConnectionResetError when it does not read on."""
        try:
            async with asyncio.timeout(self._limits.write_timeout_s):
                await response.write(chunk)
        except TimeoutError as error:
            self.too_slow(request)
            raise ConnectionResetError("the client does not read its answer") from error

    def body_due(self, request: web.Request) -> Callable[[], None]:
        """The client is cut off unless its body has arrived, or what this gives been called, in
        time. While we read nothing from it, since llama-server does not, it has its time anew."""
        due = _BodyDue(request, self._limits.body_timeout_s, self._drop)
        due.wait()
        return due.cancel

    def too_slow(self, request: web.Request) -> None:
        """Cut off a client that does not read its answer."""
        self._drop(request, "slow_reader")

    def _drop(self, request: web.Request, reason: str) -> None:
        transport = request.transport  # one that is being closed was counted already, or has left
        if isinstance(transport, asyncio.WriteTransport) and not transport.is_closing():
            self._dropped.labels(reason=reason).inc()
            transport.abort()


class _BodyDue:
    """The timer of one request's body.

    Cancelled, it refers to nothing: a request that its own timer refers to would keep its body
    until garbage is collected.
    """

    def __init__(
        self, request: web.Request, timeout_s: float, drop: Callable[[web.Request, str], None]
    ) -> None:
        self._request: web.Request | None = request
        self._timeout_s = timeout_s
        self._drop = drop
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """Give the body its time, anew."""
        if self._request is not None and not self._request.content.is_eof():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s, self._late)

    def cancel(self) -> None:
        """The body is not due any more."""
        self._request = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        request = self._request
        if request is None or request.content.is_eof():
            return
        transport = request.transport
        if transport is None or transport.is_closing():
            return
        if isinstance(transport, asyncio.ReadTransport) and not transport.is_reading():
            self.wait()
        else:
            self._drop(request, "slow_body")


SLOW_CLIENT_GUARD = web.AppKey("patience", SlowClientGuard)


@web.middleware
async def body_deadline(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The body of every request is due."""
    arrived = request.app[SLOW_CLIENT_GUARD].body_due(request)
    try:
        return await handler(request)
    finally:
        arrived()
