"""Bytes between the client and llama-server, unchanged in both directions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from aiohttp import hdrs, web
from multidict import CIMultiDict

from evoke_proxy.adapters.upstream import Reply, Upstream
from evoke_proxy.errors import UpstreamError

_log = logging.getLogger(__name__)

# RFC 9110 7.6.1: these speak about one connection, and each side of us has its own.
_HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    " transfer-encoding upgrade".split()
)
# Host is the upstream's; Expect was already answered by our own 100 Continue.
_REQUEST_ONLY = frozenset(("host", "expect"))
# aiohttp fills these in when absent; a faithful relay takes them out again.
_FILLED_IN = (hdrs.CONTENT_TYPE, hdrs.SERVER, hdrs.DATE)


class Relayed(web.StreamResponse):
    """An answer of llama-server on its way to the client.

    `broken` says why it broke off upstream, `unheard` that the client was gone before its end.
    """

    def __init__(self, reply: Reply, extra: Mapping[str, str]) -> None:
        headers = _without(reply.headers, _HOP_BY_HOP)
        super().__init__(status=reply.status, reason=reply.reason, headers=headers)
        self.absent = tuple(name for name in _FILLED_IN if name not in headers)
        self.headers.update(extra)
        self.broken: UpstreamError | None = None
        self.unheard = False


async def drop_filled_in(_: web.Request, response: web.StreamResponse) -> None:
    """Take out the headers aiohttp added; a signal handler of `on_response_prepare`."""
    if isinstance(response, Relayed):
        for name in response.absent:
            response.headers.popall(name, None)


def request_headers(
    request: web.Request, dropped: frozenset[str] = frozenset()
) -> CIMultiDict[str]:
    """The client's headers without those that end at this hop."""
    return _without(request.headers.copy(), _HOP_BY_HOP | _REQUEST_ONLY | dropped)


def raw_target(request: web.Request) -> str:
    """Path and query exactly as the client spelled them."""
    spelled = request.raw_path
    return spelled if spelled.startswith("/") else request.rel_url.raw_path_qs


async def passthrough(request: web.Request, upstream: Upstream) -> web.StreamResponse:
    """Forward any request, streaming its body up and the answer down."""
    body = request.content if request.can_read_body else None
    headers = request_headers(request)
    async with upstream.open(request.method, raw_target(request), headers, body) as reply:
        return await send(request, reply)


async def send(
    request: web.Request,
    reply: Reply,
    observe: Callable[[bytes], None] | None = None,
    extra: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    """Relay an answer chunk by chunk; `observe` sees a copy before the client does.

    When llama-server breaks off, the client's connection is cut too: a clean end would be a lie.
    """
    response = Relayed(reply, extra or {})
    try:
        await response.prepare(request)
        async for chunk in reply.chunks():
            if observe is not None:
                observe(chunk)
            await response.write(chunk)
    except ConnectionResetError:
        # Seen by the write before aiohttp could cancel us.
        response.unheard = True
    except UpstreamError as error:
        _log.warning("answer to %s broke off: %s", request.path, error)
        response.broken = error
        if request.transport is not None:
            request.transport.close()
    return response


def _without(headers: CIMultiDict[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    named = {part.strip().lower() for part in headers.get("Connection", "").split(",")}
    kept = ((k, v) for k, v in headers.items() if k.lower() not in dropped | named)
    return CIMultiDict(kept)
