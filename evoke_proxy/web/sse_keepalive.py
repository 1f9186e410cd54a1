"""Sends comments to streaming clients while their request waits, or its prompt is decoded.

The first comment starts the stream with status 200. A later failure is sent as an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass

from aiohttp import web
from multidict import CIMultiDict

from evoke_proxy.engine.gateway import Exchange, RequestTrace
from evoke_proxy.engine.routing.proxy_gateway import RequestOpener
from evoke_proxy.engine.server.slot_queue import finished
from evoke_proxy.errors import EvokeError, UpstreamError, UpstreamRejected
from evoke_proxy.web import error_responses
from evoke_proxy.web.relay import Relayed, origin_header
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD

_CORS = frozenset(("access-control-allow-origin", "vary"))
_CORS_S = 2.0
# A comment of the event stream format: clients skip it, and it keeps connections alive.
_WAITING = b": waiting\n\n"


class KeepaliveStream:
    """Enters an exchange, and sends comments to a streaming client in the meantime.

    `response` is the stream; None until the first comment has started it. A comment is sent after
    each `interval_s` seconds of waiting.
    """

    def __init__(self, request: web.Request, upstream: RequestOpener, interval_s: float) -> None:
        self.response: Relayed | None = None
        self._request = request
        self._upstream = upstream
        self._interval_s = interval_s

    async def enter(
        self,
        stack: AsyncExitStack,
        opening: AbstractAsyncContextManager[Exchange],
        trace: RequestTrace,
    ) -> Exchange:
        """Enter an exchange on a stack, in a separate task.

        Raises what entering raises, and ConnectionResetError when the client has disconnected;
        entering was then cancelled, and has ended.
        """
        task = asyncio.get_running_loop().create_task(stack.enter_async_context(opening))
        task.add_done_callback(lambda _: trace.wait_changed.set())
        try:
            await self._comment_until(task, trace)
        except BaseException:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await finished(task)
            raise
        return task.result()

    async def _comment_until(self, task: asyncio.Task[Exchange], trace: RequestTrace) -> None:
        """Send a comment after each interval in which the request waits, until `task` is done."""
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        while not task.done():
            trace.wait_changed.clear()
            since = trace.waiting_since
            due_s = None
            if since is not None:
                due_s = max(since, sent_at) + self._interval_s - loop.time()
            if due_s is not None and due_s <= 0:
                await self._send_comment(trace)
                sent_at = loop.time()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(due_s):
                    await trace.wait_changed.wait()

    async def _send_comment(self, trace: RequestTrace) -> None:
        """Send a comment, and the head of the stream before the first one."""
        if self.response is None:
            headers = CIMultiDict({"Content-Type": "text/event-stream"})
            if origin := origin_header(self._request):
                headers.extend(await _cors_headers(self._upstream, self._request.path, origin))
            self.response = Relayed(200, "OK", headers)
            await self.response.prepare(self._request)
        guard = self._request.app[SLOW_CLIENT_GUARD]
        await guard.write(self._request, self.response, _comment(trace))

    async def fail(
        self, response: Relayed, error: EvokeError | ConnectionResetError
    ) -> web.StreamResponse:
        """End the stream with an error event in the client's dialect, if it is still there."""
        if isinstance(error, UpstreamError):
            response.broken = error
        try:
            if isinstance(error, EvokeError):
                event = error_responses.error_event(self._request.path, error)
                await self._request.app[SLOW_CLIENT_GUARD].write(self._request, response, event)
        except ConnectionResetError:
            response.client_left = True
        response.client_left |= isinstance(error, ConnectionResetError)
        return response


@dataclass(frozen=True, slots=True)
class PrefillComments:
    """Adds comments to an event stream of llama-server until its first event.

    Attributes:
        trace: has the progress of the prompt.
        interval_s: seconds between two comments.
    """

    trace: RequestTrace
    interval_s: float

    async def added(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The chunks, with comments before the first event; comments of llama-server stay."""
        loop = asyncio.get_running_loop()
        has_event = False
        while not has_event:
            task = loop.create_task(_next(chunks))
            try:
                while not (await asyncio.wait((task,), timeout=self.interval_s))[0]:
                    yield _comment(self.trace)
            finally:
                task.cancel()
            chunk = task.result()
            if chunk is None:
                return
            has_event = _has_event(chunk)
            yield chunk
        async for chunk in chunks:
            yield chunk


def _has_event(chunk: bytes) -> bool:
    """Whether a chunk contains more than whole comments: nothing may be inserted after it."""
    lines = chunk.split(b"\n")
    return bool(lines.pop()) or any(line and not line.startswith(b":") for line in lines)


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


def _comment(trace: RequestTrace) -> bytes:
    if trace.prefill is None:
        return _WAITING
    return b": decoding the prompt: %d of %d tokens\n\n" % trace.prefill


async def check(exchange: Exchange) -> None:
    """Raise UpstreamRejected when a reply cannot continue an event stream."""
    reply, edit = exchange.reply, exchange.edit_error
    kind = reply.headers.get("Content-Type", "")
    if reply.status != 200 or not kind.startswith("text/event-stream"):
        body = await reply.read()
        raise UpstreamRejected(reply.status, edit(body) if edit is not None else body)


async def _cors_headers(
    upstream: RequestOpener, path: str, origin: Mapping[str, str]
) -> Mapping[str, str]:
    """The CORS headers that llama-server sends to pages of an origin; empty when it sends none.

    A browser rejects a reply that does not allow its origin, and llama-server decides which origins
    are allowed (`--cors-origins`).
    """
    try:
        async with asyncio.timeout(_CORS_S):
            async with upstream.open("OPTIONS", path, origin) as reply:
                answered = reply.headers.items()
                return {name: value for name, value in answered if name.lower() in _CORS}
    except (EvokeError, TimeoutError):
        return {}
