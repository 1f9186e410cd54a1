"""Bytes between the client and llama-server, unchanged in both directions."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from aiohttp import HttpVersion11, hdrs, web
from multidict import CIMultiDict

from evoke_proxy.adapters.llama.transport import PIECE_BYTES, Reply
from evoke_proxy.core.reply.observer import MAX_PARSED_BYTES, TAIL_BYTES
from evoke_proxy.core.reply.usage_edit import UsageEditor, with_accounting, with_accounting_in_tail
from evoke_proxy.engine.front import Way
from evoke_proxy.errors import MethodRefused, RequestError, UpstreamError
from evoke_proxy.web.client_access import ACCESS
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD

_log = logging.getLogger(__name__)

# RFC 9110 7.6.1: these speak about one connection, and each side of us has its own.
_HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    " transfer-encoding upgrade".split()
)
# Host is the upstream's; Expect was already answered by our own 100 Continue.
_REQUEST_ONLY = frozenset(("host", "expect"))
_FRAMING = frozenset(("content-length", "content-encoding"))
# aiohttp fills these in when absent; a faithful relay takes them out again.
_FILLED_IN = (hdrs.CONTENT_TYPE, hdrs.SERVER, hdrs.DATE)
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]{0,31}://[A-Za-z0-9.:\[\]_-]{1,255}")
_HEALTH_METHODS = ("GET", "HEAD", "OPTIONS")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Relayed(web.StreamResponse):
    """An answer of llama-server on its way to the client.

    `broken` says why it broke off upstream, `client_left` that the client was gone before its end.
    """

    def __init__(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        super().__init__(status=status, reason=reason, headers=headers)
        self.absent = tuple(name for name in _FILLED_IN if name not in headers)
        self.broken: UpstreamError | None = None
        self.client_left = False


async def remove_added_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Take out the headers aiohttp added; a signal handler of `on_response_prepare`."""
    if isinstance(response, Relayed):
        for name in response.absent:
            response.headers.popall(name, None)


def request_headers(
    request: web.Request, dropped: frozenset[str] = frozenset()
) -> CIMultiDict[str]:
    """The client's headers without those that end at this hop."""
    kept = _without(request.headers.copy(), _HOP_BY_HOP | _REQUEST_ONLY | dropped)
    return request.app[ACCESS].forwarded(kept)


def end_to_end_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers of an answer that are not about its connection or its framing."""
    return _without(CIMultiDict(headers), _HOP_BY_HOP | _FRAMING)


def raw_target(request: web.Request) -> str:
    """Path and query exactly as the client spelled them.

    RequestError when they do not begin with a slash: put behind the server's address, they would
    name another one. And when the path has control characters: no path of llama-server's has.
    """
    if _CONTROL.search(request.path):
        raise RequestError("the path has control characters")
    spelled = request.raw_path
    target = spelled if spelled.startswith("/") else request.rel_url.raw_path_qs
    if not target.startswith("/"):
        raise RequestError("the request names no path")
    return target


async def passthrough(
    request: web.Request, upstream: Way, body: bytes | AsyncIterator[bytes] | None = None
) -> web.StreamResponse:
    """Forward any request with this body, or these parts of one, and stream the answer down."""
    headers = request_headers(request)
    async with upstream.open(request.method, raw_target(request), headers, body) as reply:
        return await send(request, reply)


def origin_header(request: web.Request) -> dict[str, str]:
    """The Origin header of a request, if it is one that a browser sends."""
    origin = request.headers.get("Origin", "")
    return {"Origin": origin} if _ORIGIN.fullmatch(origin) else {}


async def health(request: web.Request, upstream: Way) -> web.StreamResponse:
    """Answer with the health of llama-server, by a call of our own.

    Nothing of the client's request is forwarded, since it needs no key, but a well-formed origin:
    without it no page could read the answer. Raises MethodRefused for methods but GET, HEAD and
    OPTIONS.
    """
    if request.method not in _HEALTH_METHODS:
        raise MethodRefused(request.method, _HEALTH_METHODS)
    async with upstream.open(request.method, "/health", origin_header(request)) as reply:
        return await send(request, reply)


async def send(
    request: web.Request,
    reply: Reply,
    observe: Callable[[bytes], None] | None = None,
    extra: Mapping[str, str] | None = None,
    outcome: Mapping[str, Any] | None = None,
    begun: Relayed | None = None,
) -> web.StreamResponse:
    """Relay an answer chunk by chunk; `observe` sees a copy before the client does.

    Given an `outcome`, the answer's usage gets it, with the books of the turn. `begun` is an event
    stream that the client was sent already, and that this one continues.
    When llama-server breaks off, the client's connection is cut too: a clean end would be a lie.
    Raises UpstreamError when it does before anything of the answer is sent.
    """
    response = begun or _opened(reply, extra or {})
    chunks = reply.chunks() if observe is None else _observed(reply, observe)
    try:
        if outcome is not None:
            chunks = await _with_books(chunks, response, outcome)
        if begun is None:
            await response.prepare(request)
        patience = request.app[SLOW_CLIENT_GUARD]
        async for chunk in chunks:
            await patience.write(request, response, chunk)
    except ConnectionResetError:
        # Seen by the write before aiohttp could cancel us.
        response.client_left = True
    except UpstreamError as error:
        if not response.prepared:
            raise
        _log.warning("answer to %r broke off: %s", request.path, error)
        response.broken = error
        if request.transport is not None:
            if request.version >= HttpVersion11:
                request.transport.close()
            else:  # there the end of the connection is the end of the answer
                request.transport.abort()
    return response


def _opened(reply: Reply, extra: Mapping[str, str]) -> Relayed:
    response = Relayed(reply.status, reply.reason, _without(reply.headers, _HOP_BY_HOP))
    response.headers.update(extra)
    return response


async def _observed(reply: Reply, observe: Callable[[bytes], None]) -> AsyncIterator[bytes]:
    async for chunk in reply.chunks():
        observe(chunk)
        yield chunk


async def _with_books(
    chunks: AsyncIterator[bytes], response: web.StreamResponse, outcome: Mapping[str, Any]
) -> AsyncIterator[bytes]:
    """The chunks with the books of the turn in their usage; a whole answer is read to its end."""
    if "Content-Encoding" in response.headers:
        return chunks
    if response.content_type == "text/event-stream":
        return _edited(chunks, outcome)
    if response.content_type != "application/json":
        return chunks
    parts = [chunk async for chunk in chunks]
    tail = _tail_of(parts)
    edit = with_accounting_in_tail if parts else with_accounting
    parts.append(edit(tail, outcome))
    response.content_length = sum(map(len, parts))
    return _each(parts)


def _tail_of(parts: list[bytes]) -> bytes:
    """All the parts as one when they are not large, else the last ones; they are taken out."""
    taken, size = list[bytes](), 0
    whole = sum(map(len, parts)) <= MAX_PARSED_BYTES
    while parts and (whole or size < TAIL_BYTES):
        taken.append(parts.pop())
        size += len(taken[-1])
    return b"".join(reversed(taken))


async def _edited(chunks: AsyncIterator[bytes], outcome: Mapping[str, Any]) -> AsyncIterator[bytes]:
    edit = UsageEditor(outcome)
    async for chunk in chunks:
        # An empty chunk would be the end of the answer.
        if out := edit.feed(chunk):
            yield out
    if out := edit.close():
        yield out


async def _each(parts: list[bytes]) -> AsyncIterator[bytes]:
    """The parts in pieces, between which the event loop serves other requests.

    A client that reads as fast as this writes would otherwise get all of it in one callback.
    """
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            yield part[at : at + PIECE_BYTES]
            await asyncio.sleep(0)


def _without(headers: CIMultiDict[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    named = {part.strip().lower() for part in headers.get("Connection", "").split(",")}
    kept = ((k, v) for k, v in headers.items() if k.lower() not in dropped | named)
    return CIMultiDict(kept)
