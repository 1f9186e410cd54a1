"""A stream that begins before its answer: comments, while the request waits for its slot.

Once it has begun, its status is 200 for good: whatever fails after that is an event of the stream.
"""

from __future__ import annotations

from aiohttp import web
from multidict import CIMultiDict

from evoke_proxy.adapters.upstream import Reply
from evoke_proxy.errors import EvokeError, UpstreamError, UpstreamRejected
from evoke_proxy.web import dialects
from evoke_proxy.web.relay import Relayed

# The event stream format's comment: every client skips it, everything in between sees life.
_WAITING = b": waiting\n\n"


class BegunStream:
    """What a client was sent before there was an answer; `response` is None until then."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: Relayed | None = None

    async def wait(self) -> None:
        """Show the client that its request is alive; ConnectionResetError when it is gone."""
        if self.response is None:
            self.response = Relayed(200, "OK", _headers(self._request))
            await self.response.prepare(self._request)
        await self.response.write(_WAITING)

    async def fail(self, error: EvokeError | ConnectionResetError) -> web.StreamResponse:
        """End the stream with an error event in the client's dialect, if it is still there."""
        assert self.response is not None
        if isinstance(error, UpstreamError):
            self.response.broken = error
        try:
            if isinstance(error, EvokeError):
                await self.response.write(dialects.error_event(self._request.path, error))
        except ConnectionResetError:
            self.response.unheard = True
        self.response.unheard |= isinstance(error, ConnectionResetError)
        return self.response


async def check(reply: Reply) -> None:
    """Raise UpstreamRejected when an answer cannot continue an event stream."""
    kind = reply.headers.get("Content-Type", "")
    if reply.status != 200 or not kind.startswith("text/event-stream"):
        raise UpstreamRejected(reply.status, await reply.read())


def _headers(request: web.Request) -> CIMultiDict[str]:
    """As llama-server begins a stream; a browser reads no answer that does not name its origin."""
    headers = CIMultiDict({"Content-Type": "text/event-stream"})
    if "Origin" in request.headers:
        headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
    return headers
