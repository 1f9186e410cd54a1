"""HTTP connections to llama-server: sends one request, and streams its reply.

Only this module turns errors of aiohttp into errors of this project.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import aiohttp
from aiohttp import StreamReader
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from multidict import CIMultiDict
from yarl import URL

from evoke_proxy.adapters.llama.time_limits import timeout_without_lag
from evoke_proxy.config import UpstreamConfig
from evoke_proxy.core.request.request_head import check_head, malformed_header
from evoke_proxy.errors import (
    RequestError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamTimeout,
    UpstreamUnavailable,
)

# With these methods, older versions of cpp-httplib do not read the body of a request, and then take
# it for the next request on the connection.
_UNREAD_BODY = frozenset(("GET", "HEAD", "OPTIONS"))
# Headers that aiohttp would add to a request if the client has not sent them.
_AUTOMATIC_HEADERS = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
# Less than llama-server's 5 s, so that no request is written into a connection it is closing.
_IDLE_CONNECTION_S = 2.0
# A host that has vanished is detected after 10 + 4 * 5 s. TCP_USER_TIMEOUT is not set: it would
# also close connections to a server that runs and does not read.
_TCP_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_MAX_LINE_BYTES = 64 * 1024
PIECE_BYTES: Final = 256 * 1024
# The largest reply to a call of the proxy. A rendering of a few million tokens fits.
ANSWER_BYTES = 256 * 1024 * 1024
# The most bytes of a reply that `Reply.buffered` reads before they are sent to the client.
BUFFERED_BYTES: Final = 8 * 1024 * 1024
BodyParts: TypeAlias = tuple[bytes | memoryview, ...]
# A request body: bytes, parts that are sent one after the other, or a stream from a client.
Body: TypeAlias = bytes | BodyParts | AsyncIterable[bytes]
# What to do about a server that refuses connections.
_WHEN_AWAY = (
    "start it (`evoke-proxy up` does that itself), or point --upstream at the right address"
)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply whose head has arrived.

    Attributes:
        status: HTTP status.
        reason: reason phrase of the status line.
        headers: headers as received; bytes that are not UTF-8 are surrogates (PEP 383).
        url: base URL of the llama-server that replies.
    """

    status: int
    reason: str
    headers: CIMultiDict[str]
    url: str
    _response: aiohttp.ClientResponse
    _read_timeout_s: float | None = None
    # The part of the body that was read already; `chunks` yields it first.
    _body: tuple[bytes, ...] = ()

    async def buffered(self) -> Reply:
        """Read the body, or BUFFERED_BYTES of it, and return a reply whose `chunks` yield all of
        it.

        Raises UpstreamError when the body breaks off in what is read.
        """
        parts, size = list[bytes](), 0
        async for chunk in self.chunks():
            parts.append(chunk)
            size += len(chunk)
            if size > BUFFERED_BYTES:
                break
        return replace(self, _body=tuple(parts))

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, compressed if the server has compressed it.

        Raises UpstreamError when the body breaks off, or when nothing arrives for
        `upstream.read_timeout_s`.
        """
        for chunk in self._body:
            yield chunk
        while True:
            with mapped_errors(self.url):
                async with asyncio.timeout(self._read_timeout_s):
                    chunk = await self._response.content.readany()
            if not chunk:
                return
            yield chunk

    async def read(self, check: Callable[[bytes], None] | None = None) -> bytes:
        """Read the whole body; `check` is called with each piece and may raise.

        Raises UpstreamProtocolError when the body is longer than ANSWER_BYTES.
        """
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
    """A connection of aiohttp that handles four peculiarities of llama-server.

    * llama-server closes the connection after a streamed reply, but does not announce that with
      `Connection: close`. A request sent on such a connection is lost, and a POST must not be sent
      twice. So the connection is not reused.
    * Its router ends some 204 replies like a chunked body, which aiohttp rejects. So all bytes
      after the head of a 204 are dropped.
    * After an error (status 400 and above) it may take the rest of the request for a new request.
      So the connection is not reused.
    * It may refuse a long request body before it has arrived completely: it replies and closes the
      connection. So a reply that has arrived is read before a failed write is reported.

    The head of a reply must be complete `head_timeout_s` after its first byte. The wait for the
    first byte has no limit, because prefill is slow.
    """

    _awaits_first_byte = False
    _head_incomplete = False
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, head_timeout_s: float) -> None:
        super().__init__(loop)
        self._head_timeout_s = head_timeout_s

    def set_response_params(self, **options: Any) -> None:
        self._awaits_first_byte = self._head_incomplete = True
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        if self._awaits_first_byte and data.startswith(b"HTTP/1.1 204 "):
            head, end, _ = data.partition(b"\r\n\r\n")
            data = head + end
            self.force_close()
        self._awaits_first_byte = False
        super().data_received(data)
        if self._head_incomplete and self._head_timer is None and self.transport is not None:
            self._head_timer = self._loop.call_later(self._head_timeout_s, self._abort_slow_head)

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        message = data[0]
        if message.code >= 200:
            self._on_head_complete()
        if message.chunked or message.code >= 400:
            self.force_close()
        super().feed_data(data, size)

    def connection_lost(self, exc: BaseException | None) -> None:
        if exc is not None:
            self._read_remainder()
        self._on_head_complete()
        super().connection_lost(exc)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        if isinstance(exc, OSError):
            self._read_remainder()
        super().set_exception(exc, *cause)

    def _read_remainder(self) -> None:
        """Read the bytes that arrived before the connection broke, and that asyncio left unread."""
        transport = self.transport
        if not self._awaits_first_byte or transport is None or not transport.is_closing():
            return
        if transport.get_extra_info("ssl_object") is not None:
            return
        raw_socket = transport.get_extra_info("socket")
        with suppress(OSError):
            while self._head_incomplete and (data := os.read(raw_socket.fileno(), PIECE_BYTES)):
                self.data_received(data)

    def _on_head_complete(self) -> None:
        self._head_incomplete = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _abort_slow_head(self) -> None:
        self.set_exception(aiohttp.SocketTimeoutError("the head of the answer does not end"))
        if self.transport is not None:
            self.transport.abort()


class _ClientBody:
    """A request body that is read from a client while it is sent to llama-server.

    Attributes:
        failure: The error raised while reading from the client; it is not a failure of
            llama-server. None without an error.
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


def _keepalive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Make a socket with TCP keep-alive, which detects that the host of the peer is gone."""
    new_socket = socket.socket(*address[:3])
    new_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_KEEPALIVE.items():
        if hasattr(socket, name):  # Linux has all of these options
            new_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return new_socket


class _Connector(aiohttp.TCPConnector):
    """Opens connections; raises ConnectionTimeoutError after `connect_timeout_s` seconds."""

    def __init__(self, connect_timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._connect_timeout_s = connect_timeout_s

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        try:
            async with timeout_without_lag(self._connect_timeout_s):
                return await super()._create_connection(req, traces, timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError("no connection in time") from error


class HttpTransport:
    """The connections to one llama-server; use it as an async context manager.

    Attributes:
        url: base URL of the server without a trailing slash.
    """

    def __init__(self, config: UpstreamConfig) -> None:
        self._config = config
        self.url = config.url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpTransport:
        config = self._config
        connector = _Connector(
            config.connect_timeout_s,
            limit=0,
            keepalive_timeout=_IDLE_CONNECTION_S,
            socket_factory=_keepalive_socket,
        )
        # aiohttp has no public way to set the protocol class. pyproject.toml limits aiohttp to
        # versions in which this private attribute works; without it a test of a 204 reply fails.
        factory: Any = partial(_ResponseHandler, asyncio.get_running_loop(), config.read_timeout_s)
        connector._factory = factory
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_AUTOMATIC_HEADERS,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def open(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body | None = None,
    ) -> AsyncIterator[Reply]:
        """Send a request and yield its reply; leaving the context early closes the connection.

        `target` is the path with the query, encoded. The wait for the head of the reply has no
        limit, because prefill is slow. Raises RequestError, and sends nothing, when llama-server
        could not parse the head of the request. Raises RequestError, or ConnectionResetError when
        the client is gone, when reading `body` fails. Raises UpstreamError when llama-server fails.
        """
        if self._session is None:
            raise RuntimeError("the transport is used outside its context")
        url = URL(self.url + target, encoded=True)
        sent = CIMultiDict(headers)
        streamed: _ClientBody | None = None
        data: AsyncIterable[bytes | memoryview] | None = None
        if isinstance(body, bytes | tuple):
            parts = (body,) if isinstance(body, bytes) else body
            sent["Content-Length"], data = str(sum(map(len, parts))), _pieces(parts)
        elif body is not None:
            data = streamed = _ClientBody(body)
        if data is not None and method in _UNREAD_BODY:
            sent["Connection"] = "close"
        chunked = data is not None and "Content-Length" not in sent
        check_head(method, target, sent, chunked)
        try:
            with mapped_errors(self.url):
                response = await self._session.request(
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
            yield self._reply(method, response)
        finally:
            response.close()

    def _reply(self, method: str, response: aiohttp.ClientResponse) -> Reply:
        status, reason, headers = response.status, response.reason or "", _decoded(response)
        malformed = malformed_header(headers) or malformed_header({"reason": reason})
        if malformed is not None:
            message = f"llama-server at {self.url} sent control characters in {malformed!r}"
            raise UpstreamProtocolError(message, self.url)
        # An event stream that answers a GET may be silent for hours.
        is_event_feed = method == "GET" and response.content_type == "text/event-stream"
        read_timeout_s = None if is_event_feed else self._config.read_timeout_s
        return Reply(status, reason, headers, self.url, response, read_timeout_s)


async def _pieces(parts: BodyParts) -> AsyncIterator[bytes | memoryview]:
    """Yield a body in pieces of at most PIECE_BYTES, and let other tasks run between them.

    If the reader is fast, writing a piece never suspends, so that other tasks would not run.
    """
    if sum(map(len, parts)) <= PIECE_BYTES:
        yield b"".join(parts)
        return
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]
            await asyncio.sleep(0)


def _decoded(response: aiohttp.ClientResponse) -> CIMultiDict[str]:
    pairs = response.raw_headers
    return CIMultiDict(
        (name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in pairs
    )


@contextmanager
def mapped_errors(url: str) -> Iterator[None]:
    """Turn errors of aiohttp, and time-outs, into UpstreamError."""
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
            f" {_WHEN_AWAY}",
            url,
            reached=False,
            public=f"llama-server cannot be reached: {_WHEN_AWAY}",
        ) from error
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise UpstreamUnavailable(
            f"llama-server at {url} closed the connection; it may have crashed: see its log", url
        ) from error
    except aiohttp.ClientPayloadError as error:
        raise UpstreamUnavailable(f"llama-server at {url} broke off in its answer", url) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise UpstreamProtocolError(f"llama-server at {url}: {error}", url) from error
