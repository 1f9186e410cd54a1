"""Disconnects clients that send their body or read their answer too slowly.

A slow client occupies a connection, and often a slot, that others need. Idle connections and slow
request heads are closed by aiohttp's own server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import LimitsConfig

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SlowClientGuard:
    """Writes answers to clients and times their bodies; disconnects slow clients."""

    def __init__(self, limits: LimitsConfig, metrics: Metrics) -> None:
        self._limits = limits
        self._dropped = metrics.clients_dropped

    async def write(self, request: web.Request, response: web.StreamResponse, chunk: bytes) -> None:
        """Write a part of an answer.

        Raises ConnectionResetError when the client does not read within `limits.idle_timeout_s`.
        """
        try:
            async with asyncio.timeout(self._limits.idle_timeout_s):
                await response.write(chunk)
        except TimeoutError as error:
            self.drop_slow_reader(request)
            raise ConnectionResetError("the client does not read its answer") from error

    def time_body(self, request: web.Request) -> Callable[[], None]:
        """Disconnect the client unless its body arrives within `limits.body_timeout_s`.

        The time starts again when the proxy does not read, because llama-server reads too slowly.
        Returns a function that ends the timing.
        """
        timer = _BodyTimer(request, self._limits.body_timeout_s, self._drop)
        timer.start()
        return timer.cancel

    def drop_slow_reader(self, request: web.Request) -> None:
        """Disconnect a client that does not read its answer."""
        self._drop(request, "slow_reader")

    def _drop(self, request: web.Request, reason: str) -> None:
        transport = request.transport
        # A connection that is closing was counted already, or was closed by the client.
        if isinstance(transport, asyncio.WriteTransport) and not transport.is_closing():
            self._dropped.labels(reason=reason).inc()
            transport.abort()


class _BodyTimer:
    """Times the arrival of one request's body.

    A cancelled timer refers to no request: in a reference cycle the request would keep its body
    until the next garbage collection.
    """

    def __init__(
        self, request: web.Request, timeout_s: float, drop: Callable[[web.Request, str], None]
    ) -> None:
        self._request: web.Request | None = request
        self._timeout_s = timeout_s
        self._drop = drop
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer, or start it again."""
        if self._request is not None and not self._request.content.is_eof():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s, self._expire)

    def cancel(self) -> None:
        """End the timing."""
        self._request = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        request = self._request
        if request is None or request.content.is_eof():
            return
        transport = request.transport
        if transport is None or transport.is_closing():
            return
        if isinstance(transport, asyncio.ReadTransport) and not transport.is_reading():
            self.start()
        else:
            self._drop(request, "slow_body")


SLOW_CLIENT_GUARD = web.AppKey("slow_client_guard", SlowClientGuard)


@web.middleware
async def body_deadline(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that times the body of each request."""
    cancel = request.app[SLOW_CLIENT_GUARD].time_body(request)
    try:
        return await handler(request)
    finally:
        cancel()
