"""llama-server over HTTP: opens requests, relays bodies, asks our block calls.

The only place where errors of aiohttp become errors of ours.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import aiohttp
import orjson
from aiohttp import StreamReader
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from multidict import CIMultiDict
from yarl import URL

from evoke_proxy.config import UpstreamConfig
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.prompt.rendering_limit import RenderingLimit
from evoke_proxy.core.request.json_pieces import parse_in_pieces
from evoke_proxy.core.request.request_head import check_head, malformed_header
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.errors import (
    PlanRefused,
    RequestError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamRejected,
    UpstreamTimeout,
    UpstreamUnavailable,
)

# Anything aiohttp would add by itself is a header the client did not send.
_NEVER_ADDED = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
# Below llama-server's own 5 s, so that a request is not written into a connection being closed.
_KEEPALIVE_S = 2.0
# Where the other end's host has vanished its kernel answers no more: noticed after 10 + 4 * 5 s. No
# TCP_USER_TIMEOUT: it ends connections to a program that is there and does not read, too.
_NOTICED = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_LINE_BYTES = 64 * 1024
PIECE_BYTES = 256 * 1024
# A longer answer is parsed in a thread, in pieces.
_PARSED_AT_ONCE_BYTES = 256 * 1024
# The largest answer to a call of our own: a rendering of some million tokens fits.
ANSWER_BYTES = 256 * 1024 * 1024
LATEST = "latest"
_AUTHENTICATION = ("Authorization", "X-Api-Key")
# What is sent: whole, in parts that are sent one after the other, or as it comes from a client.
Parts: TypeAlias = tuple[bytes | memoryview, ...]
Body: TypeAlias = bytes | Parts | AsyncIterable[bytes]
# Seconds that `call` has waited in the current task, by name, where somebody wants to know.
AWAITED: ContextVar[dict[str, float] | None] = ContextVar("AWAITED", default=None)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer whose head has arrived; the body is read with `chunks`."""

    status: int
    reason: str
    headers: CIMultiDict[str]
    url: str
    _response: aiohttp.ClientResponse
    _pause_s: float | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, undecoded. Raises UpstreamError when it breaks off, or when
        nothing arrives for longer than `upstream.read_timeout_s`."""
        while True:
            with _mapped(self.url):
                async with asyncio.timeout(self._pause_s):
                    chunk = await self._response.content.readany()
            if not chunk:
                return
            yield chunk

    async def read(self, check: Callable[[bytes], None] | None = None) -> bytes:
        """The whole body. Raises UpstreamProtocolError when it is longer than ANSWER_BYTES, and
        what `check` raises, which is called with each piece of it."""
        limit = ANSWER_BYTES
        chunks: list[bytes] = []
        size = 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > limit:
                raise UpstreamProtocolError(f"llama-server answered over {limit} bytes", self.url)
            if check is not None:
                check(chunk)
            chunks.append(chunk)
        return b"".join(chunks)


class _ResponseHandler(ResponseHandler):
    """What llama-server does with its connections, and aiohttp does not expect.

    After a streamed answer it closes without saying so: a request written into such a connection
    would be lost, and a POST must not be sent twice. Its router ends some 204 like a chunked body,
    which aiohttp takes for nonsense: whatever follows the head of a 204 is cut off.
    After an error (status 400 and above) it may take what is left of the request for another one:
    that connection is closed and never used again. So is one on which a head that has begun is not
    complete in `head_timeout_s`; before its first byte there is no limit, since prefill is slow.
    A long body that it refuses, for lack of a key, it answers early, and closes the connection:
    what it has said is read before the failed write counts.
    """

    # Whether nothing of an answer has arrived, whether its head is not complete.
    _head_expected = False
    _head_open = False
    _head_due: asyncio.TimerHandle | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, head_timeout_s: float) -> None:
        super().__init__(loop)
        self._head_timeout_s = head_timeout_s

    def set_response_params(self, **options: Any) -> None:
        self._head_expected = self._head_open = True
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        if self._head_expected and data.startswith(b"HTTP/1.1 204 "):
            head, end, _ = data.partition(b"\r\n\r\n")
            data = head + end
            self.force_close()
        self._head_expected = False
        super().data_received(data)
        if self._head_open and self._head_due is None and self.transport is not None:
            self._head_due = self._loop.call_later(self._head_timeout_s, self._head_too_late)

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        message = data[0]
        if message.code >= 200:
            self._head_ends()
        if message.chunked or message.code >= 400:
            self.force_close()
        super().feed_data(data, size)

    def connection_lost(self, exc: BaseException | None) -> None:
        if exc is not None:
            self._read_rest()
        self._head_ends()
        super().connection_lost(exc)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        if isinstance(exc, OSError):
            self._read_rest()
        super().set_exception(exc, *cause)

    def _read_rest(self) -> None:
        """Take what has arrived before the connection broke, and asyncio has not read."""
        transport = self.transport
        if not self._head_expected or transport is None or not transport.is_closing():
            return
        if transport.get_extra_info("ssl_object") is not None:
            return
        socket_of = transport.get_extra_info("socket")
        with suppress(OSError):
            while self._head_open and (data := os.read(socket_of.fileno(), PIECE_BYTES)):
                self.data_received(data)

    def _head_ends(self) -> None:
        self._head_open = False
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _head_too_late(self) -> None:
        self.set_exception(aiohttp.SocketTimeoutError("the head of the answer does not end"))
        if self.transport is not None:
            self.transport.abort()


class _ClientBody:
    """A body that is read from a client while it is sent to llama-server.

    `failure` is what went wrong on the client's side: that is no failure of llama-server.
    """

    def __init__(self, pieces: AsyncIterable[bytes]) -> None:
        self._pieces = pieces
        self.failure: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces:
                yield piece
        except Exception as error:
            self.failure = error
            raise


def _noticing(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that fails when nobody is there any more: how long an answer takes never tells."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _NOTICED.items():
        if hasattr(socket, name):  # Linux has all of them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


class LlamaClient:
    """One llama-server; use as an async context manager."""

    def __init__(self, config: UpstreamConfig) -> None:
        self.config = config
        self.url = config.url.rstrip("/")
        # Whether a scrape of its metrics was seen to wake it; see engine/operator/exposition.py.
        self.wakes_for_metrics = False
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> LlamaClient:
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=_noticing
        )
        # There is no public place for it; a test on a 204 tells when this one moves.
        factory: Any = partial(
            _ResponseHandler, asyncio.get_running_loop(), self.config.read_timeout_s
        )
        connector._factory = factory
        self._client = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.config.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_NEVER_ADDED,
            max_line_size=_LINE_BYTES,
            max_field_size=_LINE_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()

    @asynccontextmanager
    async def open(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body | None = None,
    ) -> AsyncIterator[Reply]:
        """Send a request, give its answer; leaving early closes the connection, which cancels it.

        `target` is the raw path with query. Waits for the head without limit: prefill is slow.
        Raises RequestError, and sends nothing, when llama-server could not parse the head; also
        when the body breaks off on the client's side.
        """
        assert self._client is not None, "used outside its context"
        url = URL(self.url + target, encoded=True)
        sent = CIMultiDict(headers)
        streamed: _ClientBody | None = None
        data: AsyncIterable[bytes | memoryview] | None = None
        if isinstance(body, bytes | tuple):
            parts = (body,) if isinstance(body, bytes) else body
            sent["Content-Length"], data = str(sum(map(len, parts))), _pieces(parts)
        elif body is not None:
            data = streamed = _ClientBody(body)
        chunked = data is not None and "Content-Length" not in sent
        check_head(method, target, sent, chunked)
        try:
            with _mapped(self.url):
                response = await self._client.request(
                    method, url, headers=sent, data=data, allow_redirects=False
                )
        except UpstreamError as error:
            failure = streamed.failure if streamed is not None else None
            if isinstance(failure, ConnectionError):
                raise ConnectionResetError("the client is gone") from error
            if isinstance(failure, RequestError):
                raise failure from error
            if failure is not None:
                raise RequestError("the request body broke off, or is malformed") from error
            raise
        try:
            status, reason = response.status, response.reason or ""
            answered = _decoded(response)
            malformed = malformed_header(answered) or malformed_header({"reason": reason})
            if malformed is not None:
                message = f"llama-server at {self.url} sent control characters in {malformed!r}"
                raise UpstreamProtocolError(message, self.url)
            # A GET that is answered with events may have nothing to tell for hours.
            listens = method == "GET" and response.content_type == "text/event-stream"
            pause_s = None if listens else self.config.read_timeout_s
            yield Reply(status, reason, answered, self.url, response, pause_s)
        finally:
            response.close()

    async def call(
        self,
        method: str,
        target: str,
        body: object = None,
        client: Mapping[str, str] | None = None,
        name: str = "other",
        patient: bool = False,
        check: Callable[[bytes], None] | None = None,
    ) -> dict[str, Any]:
        """One JSON call of our own; a body of bytes, or a tuple of them, is sent as it is.

        Carries the credentials of `client`, its headers, when none are configured. Raises
        UpstreamRejected on a status >= 400, UpstreamTimeout after `call_timeout_s`, of a `patient`
        call after `long_call_timeout_s`, UpstreamProtocolError when it is not a JSON object.
        AWAITED counts its time under `name`. `check` is called with each piece of an answer that is
        no error, and ends the call with what it raises.
        """
        as_is = body is None or isinstance(body, bytes | tuple)
        data: Any = body if as_is else orjson.dumps(body)
        limit_s = self.config.long_call_timeout_s if patient else self.config.call_timeout_s
        with _mapped(self.url):
            async with asyncio.timeout(limit_s):
                with _timed(name):
                    headers = self.own_headers(client)
                    async with self.open(method, target, headers, data) as reply:
                        raw = await reply.read(check if reply.status < 400 else None)
        if len(raw) > _PARSED_AT_ONCE_BYTES:
            return await asyncio.to_thread(_checked, target, reply.status, raw)
        return _checked(target, reply.status, raw)

    async def info(self, client: Mapping[str, str] | None = None) -> ServerInfo:
        """What the server is and can do. Raises UpstreamError when it does not say."""
        return ServerInfo.parse(await self.call("GET", "/props", client=client))

    async def render(
        self,
        dialect: str,
        body: bytes,
        client: Mapping[str, str],
        known: Rendered | None = None,
        n_ctx: int | None = None,
    ) -> Rendered:
        """The tokens llama-server would decode for a request, and where its slots stand; of one
        that goes on from what is `known` it need only say how.

        Raises PromptTooLong, and reads no further, once the answer has more than `n_ctx` tokens.
        """
        edges = orjson.dumps(known.edges if known is not None else ())
        # Spliced, not parsed: the server must see the same spelling that is forwarded later.
        asked = b'{"compact":true,"dialect":%b,"known":%b,"body":' % (orjson.dumps(dialect), edges)
        question = (asked, body, b"}")
        check = RenderingLimit(n_ctx).feed if n_ctx is not None else None
        answer = await self.call("POST", "/evoke/render", question, client, "render", check=check)
        return Rendered.parse(answer, known)

    async def load(self, client: Mapping[str, str] | None) -> None:
        """Have its model loaded; the only one of a llama-server is."""

    async def run(
        self, slot: int, action: str, body: Mapping[str, Any], client: Mapping[str, str]
    ) -> dict[str, Any]:
        """One block call on a slot. PlanRefused when it is refused: nothing changed then."""
        try:
            return await self.call("POST", f"/slots/{slot}?action={action}", body, client, action)
        except UpstreamRejected as error:
            raise PlanRefused.of(error) from error

    async def slot(
        self, slot: int, tenant: str, client: Mapping[str, str], since: str = ""
    ) -> dict[str, Any]:
        """One slot now, with every saved block of a tenant, whatever slot it is from; with `since`
        a `version` of an earlier answer, those that changed since then, with LATEST none."""
        target = f"/slots/{slot}/blocks?tenant={tenant}" + (f"&since={since}" if since else "")
        return await self.call("GET", target, None, client)

    def own_headers(self, client: Mapping[str, str] | None = None) -> dict[str, str]:
        """Headers of a call of ours, with the configured key or else the client's credentials."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.config.api_key:
            return headers | {"Authorization": f"Bearer {self.config.api_key}"}
        given = client or {}
        return headers | {name: given[name] for name in _AUTHENTICATION if name in given}


async def _pieces(parts: Parts) -> AsyncIterator[bytes | memoryview]:
    """A body in pieces: written in one go, a large one would hold up every other stream."""
    if sum(map(len, parts)) <= PIECE_BYTES:
        yield b"".join(parts)
        return
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _decoded(response: aiohttp.ClientResponse) -> CIMultiDict[str]:
    pairs = response.raw_headers
    return CIMultiDict(
        (name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in pairs
    )


def _checked(target: str, status: int, raw: bytes) -> dict[str, Any]:
    try:
        answer = (
            parse_in_pieces(raw, orjson.loads)
            if len(raw) > _PARSED_AT_ONCE_BYTES
            else orjson.loads(raw)
        )
    except (orjson.JSONDecodeError, RequestError) as error:
        if status >= 400:
            raise UpstreamRejected(status, raw) from error
        raise UpstreamProtocolError(f"llama-server answered {target} with no JSON") from error
    if status >= 400:
        raise UpstreamRejected(status, raw)
    if not isinstance(answer, dict):
        raise UpstreamProtocolError(f"llama-server answered {target} with no JSON object")
    return answer


@contextmanager
def _timed(name: str) -> Iterator[None]:
    seconds, began = AWAITED.get(), time.perf_counter()
    try:
        yield
    finally:
        if seconds is not None:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began


@contextmanager
def _mapped(url: str) -> Iterator[None]:
    try:
        yield
    except (TimeoutError, aiohttp.ServerTimeoutError) as error:
        raise UpstreamTimeout(
            f"llama-server at {url} did not answer in time: see its log, or raise the timeout",
            url,
            reached=not isinstance(error, aiohttp.ConnectionTimeoutError),
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise UpstreamUnavailable(
            f"llama-server at {url} cannot be reached ({error.strerror or error.os_error}):"
            " start it, or point --upstream at the right address",
            url,
            reached=False,
            public="llama-server cannot be reached: start it, or point --upstream at the right"
            " address",
        ) from error
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise UpstreamUnavailable(
            f"llama-server at {url} closed the connection; it may have crashed: see its log", url
        ) from error
    except aiohttp.ClientPayloadError as error:
        raise UpstreamUnavailable(f"llama-server at {url} broke off in its answer", url) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise UpstreamProtocolError(f"llama-server at {url}: {error}", url) from error
