"""A stream that begins before its answer: comments, while the request waits for its slot.

Once it has begun, its status is 200 for good: whatever fails after that is an event of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import web
from multidict import CIMultiDict

from evoke_proxy.adapters.llama.transport import Reply
from evoke_proxy.engine.front import Way
from evoke_proxy.errors import EvokeError, UpstreamError, UpstreamRejected
from evoke_proxy.web import error_responses
from evoke_proxy.web.relay import Relayed, origin_header
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD

_CORS = frozenset(("access-control-allow-origin", "vary"))
_CORS_S = 2.0
# The event stream format's comment: every client skips it, everything in between sees life.
_WAITING = b": waiting\n\n"


class BegunStream:
    """What a client was sent before there was an answer; `response` is None until then."""

    def __init__(self, request: web.Request, upstream: Way) -> None:
        self._request = request
        self._upstream = upstream
        self.response: Relayed | None = None

    async def wait(self) -> None:
        """Show the client that its request is alive; ConnectionResetError when it is gone."""
        patience = self._request.app[SLOW_CLIENT_GUARD]
        if self.response is None:
            headers = CIMultiDict({"Content-Type": "text/event-stream"})
            if origin := origin_header(self._request):
                headers.extend(await _cors_headers(self._upstream, self._request.path, origin))
            self.response = Relayed(200, "OK", headers)
            await self.response.prepare(self._request)
        await patience.write(self._request, self.response, _WAITING)

    async def fail(self, error: EvokeError | ConnectionResetError) -> web.StreamResponse:
        """End the stream with an error event in the client's dialect, if it is still there."""
        assert self.response is not None
        if isinstance(error, UpstreamError):
            self.response.broken = error
        try:
            if isinstance(error, EvokeError):
                event = error_responses.error_event(self._request.path, error)
                await self._request.app[SLOW_CLIENT_GUARD].write(
                    self._request, self.response, event
                )
        except ConnectionResetError:
            self.response.client_left = True
        self.response.client_left |= isinstance(error, ConnectionResetError)
        return self.response


async def check(reply: Reply) -> None:
    """Raise UpstreamRejected when an answer cannot continue an event stream."""
    kind = reply.headers.get("Content-Type", "")
    if reply.status != 200 or not kind.startswith("text/event-stream"):
        raise UpstreamRejected(reply.status, await reply.read())


async def _cors_headers(upstream: Way, path: str, origin: Mapping[str, str]) -> Mapping[str, str]:
    """The CORS headers that llama-server sends to pages of this origin; none when it does not say.

    A browser reads no answer that does not allow its origin, and which are allowed is a setting of
    llama-server (`--cors-origins`).
    """
    try:
        async with asyncio.timeout(_CORS_S):
            async with upstream.open("OPTIONS", path, origin) as reply:
                answered = reply.headers.items()
                return {name: value for name, value in answered if name.lower() in _CORS}
    except (EvokeError, TimeoutError):
        return {}
