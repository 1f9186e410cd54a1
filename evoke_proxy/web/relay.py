"""Relays bytes between the client and llama-server, unchanged in both directions."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import HttpVersion11, hdrs, web
from multidict import CIMultiDict

from evoke_proxy.adapters.llama.transport import BUFFERED_BYTES, PIECE_BYTES, Reply
from evoke_proxy.core.reply.observer import MAX_PARSED_BYTES, TAIL_BYTES
from evoke_proxy.core.reply.reply_edit import UsageEditor, with_accounting, with_accounting_in_tail
from evoke_proxy.engine.routing.proxy_gateway import RequestOpener
from evoke_proxy.errors import MethodRefused, RequestError, UpstreamError
from evoke_proxy.web.client_access import ACCESS
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD

_log = logging.getLogger(__name__)

# Headers about a single connection (RFC 9110 7.6.1): the proxy has one on each side.
_HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    " transfer-encoding upgrade".split()
)
# Host is that of the proxy; the proxy itself has answered Expect with 100 Continue.
_REQUEST_ONLY = frozenset(("host", "expect"))
_FRAMING = frozenset(("content-length", "content-encoding"))
# Headers that aiohttp adds to a response without them; the relay removes them again.
_ADDED_HEADERS = (hdrs.CONTENT_TYPE, hdrs.SERVER, hdrs.DATE)
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]{0,31}://[A-Za-z0-9.:\[\]_-]{1,255}")
_HEALTH_METHODS = ("GET", "HEAD", "OPTIONS")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Relayed(web.StreamResponse):
    """An answer of llama-server that is relayed to the client.

    Attributes:
        absent: Headers that the answer lacks and aiohttp would add.
        broken: The error that ended the answer upstream; None when it was complete.
        client_left: Whether the client disconnected before the end.
    """

    def __init__(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        super().__init__(status=status, reason=reason, headers=headers)
        self.absent = tuple(name for name in _ADDED_HEADERS if name not in headers)
        self.broken: UpstreamError | None = None
        self.client_left = False


async def remove_added_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Remove the headers that aiohttp added; a signal handler of `on_response_prepare`."""
    if isinstance(response, Relayed):
        for name in response.absent:
            response.headers.popall(name, None)


def request_headers(
    request: web.Request, dropped: frozenset[str] = frozenset()
) -> CIMultiDict[str]:
    """The client's headers to forward, without those about its connection and `dropped`."""
    kept = _without(request.headers.copy(), _HOP_BY_HOP | _REQUEST_ONLY | dropped)
    return request.app[ACCESS].forwarded(kept)


def end_to_end_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers of an answer, without those about its connection and its framing."""
    return _without(CIMultiDict(headers), _HOP_BY_HOP | _FRAMING)


def raw_target(request: web.Request) -> str:
    """Path and query exactly as the client spelled them.

    Raises RequestError when they do not begin with a slash, because appended to the address of the
    server they would name another server, and when the path has control characters.
    """
    if _CONTROL.search(request.path):
        raise RequestError("the path has control characters")
    spelled = request.raw_path
    target = spelled if spelled.startswith("/") else request.rel_url.raw_path_qs
    if not target.startswith("/"):
        raise RequestError("the request names no path")
    return target


async def passthrough(
    request: web.Request, upstream: RequestOpener, body: AsyncIterator[bytes] | None = None
) -> web.StreamResponse:
    """Forward a request, with the parts of its body if it has one, and relay the answer."""
    headers = request_headers(request)
    async with upstream.open(request.method, raw_target(request), headers, body) as reply:
        return await send(request, reply)


def origin_header(request: web.Request) -> dict[str, str]:
    """The Origin header of a request, when it is well-formed."""
    origin = request.headers.get("Origin", "")
    return {"Origin": origin} if _ORIGIN.fullmatch(origin) else {}


async def health(request: web.Request, upstream: RequestOpener) -> web.StreamResponse:
    """Answer with the health of llama-server, from a call of the proxy's own.

    The request needs no key, so only a well-formed origin is forwarded; without it no page could
    read the answer. Raises MethodRefused for methods other than GET, HEAD and OPTIONS.
    """
    if request.method not in _HEALTH_METHODS:
        raise MethodRefused(request.method, _HEALTH_METHODS)
    async with upstream.open(request.method, "/health", origin_header(request)) as reply:
        return await send(request, reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """What relaying an answer does besides copying its bytes."""

    # Gets each chunk before the client does.
    observe: Callable[[bytes], None] | None = None
    # Headers to add to the answer.
    headers: Mapping[str, str] = field(default_factory=dict)
    # Goes into the answer's `usage.evoke`, with the token accounting; None leaves the usage as is.
    usage_extra: Mapping[str, Any] | None = None
    # Edits the body of an error in JSON before it is sent; None leaves it as it is.
    edit_error: Callable[[bytes], bytes] | None = None
    # An event stream to the client that is open already, which the answer continues.
    stream: Relayed | None = None
    # Adds comments to an event stream while the prompt is decoded.
    add_comments: Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]] | None = None


_PLAIN = RelayOptions()


async def send(
    request: web.Request, reply: Reply, options: RelayOptions = _PLAIN
) -> web.StreamResponse:
    """Relay an answer chunk by chunk.

    When llama-server breaks off, the client's connection is closed so that the client detects an
    incomplete answer. Raises UpstreamError when it breaks off before anything is sent.
    """
    response = options.stream or _response_of(reply, options.headers)
    chunks = reply.chunks() if options.observe is None else _observed(reply, options.observe)
    try:
        if options.edit_error is not None and reply.status >= 400:
            chunks = await _with_edited_error(chunks, response, options.edit_error)
        elif options.usage_extra is not None:
            chunks = await _with_accounting(chunks, response, options.usage_extra)
        if options.add_comments is not None and _is_plain_event_stream(reply):
            chunks = options.add_comments(chunks)
        if options.stream is None:
            await response.prepare(request)
        guard = request.app[SLOW_CLIENT_GUARD]
        async for chunk in chunks:
            await guard.write(request, response, chunk)
    except ConnectionResetError:
        # The write fails before aiohttp cancels this handler.
        response.client_left = True
    except UpstreamError as error:
        if not response.prepared:
            raise
        _log.warning("answer to %r broke off: %s", request.path, error)
        response.broken = error
        if request.transport is not None:
            if request.version >= HttpVersion11:
                request.transport.close()
            else:  # in HTTP/1.0 a closed connection ends the answer, so it is reset
                request.transport.abort()
    return response


def _is_plain_event_stream(reply: Reply) -> bool:
    kind = reply.headers.get(hdrs.CONTENT_TYPE, "")
    return kind.startswith("text/event-stream") and hdrs.CONTENT_ENCODING not in reply.headers


def _response_of(reply: Reply, extra: Mapping[str, str]) -> Relayed:
    response = Relayed(reply.status, reply.reason, _without(reply.headers, _HOP_BY_HOP))
    response.headers.update(extra)
    return response


async def _observed(reply: Reply, observe: Callable[[bytes], None]) -> AsyncIterator[bytes]:
    async for chunk in reply.chunks():
        observe(chunk)
        yield chunk


async def _with_accounting(
    chunks: AsyncIterator[bytes], response: web.StreamResponse, extra: Mapping[str, Any]
) -> AsyncIterator[bytes]:
    """The chunks with the token accounting in their usage.

    An answer that is no event stream is read to its end before its first byte is sent. When it is
    larger than BUFFERED_BYTES, all but its end is sent before, without Content-Length.
    """
    if "Content-Encoding" in response.headers:
        return chunks
    if response.content_type == "text/event-stream":
        return _edited(chunks, extra)
    if response.content_type != "application/json":
        return chunks
    parts, size = list[bytes](), 0
    async for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size > BUFFERED_BYTES:
            response.content_length = None
            return _edited_at_end(parts, chunks, extra)
    tail = _pop_tail(parts)
    edit = with_accounting_in_tail if parts else with_accounting
    parts.append(edit(tail, extra))
    response.content_length = sum(map(len, parts))
    return _pieces(parts)


async def _edited_at_end(
    parts: list[bytes], more: AsyncIterator[bytes], extra: Mapping[str, Any]
) -> AsyncIterator[bytes]:
    """The parts and what follows them, with the token accounting in the usage at the end."""
    tail, size = deque[bytes](), 0
    async for chunk in _joined(parts, more):
        tail.append(chunk)
        size += len(chunk)
        while size - len(tail[0]) >= TAIL_BYTES:
            size -= len(tail[0])
            yield tail.popleft()
    yield with_accounting_in_tail(b"".join(tail), extra)


async def _joined(parts: list[bytes], more: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for part in _pieces(parts):
        yield part
    parts.clear()
    async for chunk in more:
        yield chunk


async def _with_edited_error(
    chunks: AsyncIterator[bytes], response: web.StreamResponse, edit: Callable[[bytes], bytes]
) -> AsyncIterator[bytes]:
    """The chunks of an error, edited; unchanged when it is encoded, not JSON, or large."""
    is_json = response.content_type == "application/json"
    length = response.content_length
    is_small = length is not None and length <= MAX_PARSED_BYTES
    if not is_json or not is_small or "Content-Encoding" in response.headers:
        return chunks
    body = edit(b"".join([chunk async for chunk in chunks]))
    response.content_length = len(body)
    return _pieces([body] if body else [])


def _pop_tail(parts: list[bytes]) -> bytes:
    """Take the last parts out, joined; all of them when they are not large."""
    taken, size = list[bytes](), 0
    is_small = sum(map(len, parts)) <= MAX_PARSED_BYTES
    while parts and (is_small or size < TAIL_BYTES):
        taken.append(parts.pop())
        size += len(taken[-1])
    return b"".join(reversed(taken))


async def _edited(chunks: AsyncIterator[bytes], extra: Mapping[str, Any]) -> AsyncIterator[bytes]:
    edit = UsageEditor(extra)
    async for chunk in chunks:
        # An empty chunk would be the end of the answer.
        if out := edit.feed(chunk):
            yield out
    if out := edit.close():
        yield out


async def _pieces(parts: list[bytes]) -> AsyncIterator[bytes]:
    """The parts in pieces, between which the event loop serves other requests.

    Without pieces, a fast client would get the whole body in one callback of the event loop.
    """
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            yield part[at : at + PIECE_BYTES]
            await asyncio.sleep(0)


def _without(headers: CIMultiDict[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    named = {part.strip().lower() for part in headers.get("Connection", "").split(",")}
    kept = ((k, v) for k, v in headers.items() if k.lower() not in dropped | named)
    return CIMultiDict(kept)
