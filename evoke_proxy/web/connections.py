"""Client connections, with limits on request heads and a time limit for every write."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import HttpVersion11, web, web_protocol
from aiohttp.http_exceptions import BadHttpMethod, HttpProcessingError, LineTooLong
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.request import request_head
from evoke_proxy.errors import MethodRefused, RequestError
from evoke_proxy.web import error_responses
from evoke_proxy.web.parse_queue import ParseQueue
from evoke_proxy.web.turn_queue import TurnQueue

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_REQUEST_LINE = re.compile(rb"([!-~]{1,32}) (/[!-~]{0,64})")
_SEPARATOR = len(": ")
# Requests that are parsed and kept per connection while an earlier one runs. With aiohttp's 32 the
# first data of 400 connections is parsed for 0.1 s without a pause.
web_protocol.MAX_MSG_QUEUE_SIZE = 2
# Bytes that a connection keeps of requests behind those. With more it is not read for a second, and
# then closed after the current answer.
_MAX_UNPARSED_BYTES = 65536
_MAX_PAUSE_S = 1.0
# Bytes with more line ends than this are parsed in pieces, in the turn of the connection: the
# parser works for each chunk of a body, which has two line ends, and for each header.
_LINES_AT_ONCE = 128
_LENGTH = "Content-Length"
_PIECE_BYTES = 2048
_NOTHING = memoryview(b"")
# What a chunked body may have in bytes that are not its content (sizes and ends of chunks): these,
# and a part of its content. A body in chunks of 64 bytes or more has fewer.
_FRAMING_BYTES = 16384
_FRAMING_PART = 10
# Bytes of a refused body that are read after the answer, so that a client that reads the answer
# only when it has sent its body gets it. After these the connection waits, unread, for its end.
_DISCARDED_BYTES = 16 * 2**20
# The prefix length of an IPv6 network that belongs to one client.
_V6_PREFIX = 64


@web.middleware
async def check_head(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that refuses request heads above the limits, or with ambiguous bytes."""
    request_head.check_target(request.raw_path)
    request_head.check_headers(request.headers)
    return await handler(request)


@web.middleware
async def answer_expect(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that asks a client for the body that it announces with `Expect: 100-continue`."""
    expected = request.headers.get("Expect")
    if expected is not None and request.version >= HttpVersion11:
        if expected.lower() != "100-continue":
            message = "the only expectation that evoke-proxy meets is 100-continue"
            raise RequestError(message, status=417)
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer itself is sent
    return await handler(request)


async def ignore_expect(_: web.Request) -> None:
    """Leave the header Expect to `answer_expect`, whose errors are answered like all others."""


async def announce_close(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler that adds `Connection: close` to the last answer of a connection."""
    connection = request.protocol
    if isinstance(connection, ClientConnection) and connection.is_closing:
        response.force_close()
        response.headers["Connection"] = "close"


def peer_of(transport: asyncio.BaseTransport) -> str:
    """The IPv4 address, or the IPv6 network, of the client; empty when there is none."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return ""
    address = str(peer[0])
    if ":" not in address:
        return address
    network = ipaddress.ip_network(f"{address.partition('%')[0]}/{_V6_PREFIX}", strict=False)
    return str(network.network_address)


def _nothing() -> None:
    """Do nothing."""


class ClientConnection(RequestHandler):
    """One connection of a client.

    It is closed when the client does not read written bytes within `limits.idle_timeout_s`. The
    limit also applies to errors, to what aiohttp itself writes, and while the connection is
    closing. A request that cannot be parsed is answered with an error in the format of its path.

    The socket is read while a request is answered, so that a disconnected client is noticed at
    once. What the client sends meanwhile is kept for later, up to a limit.

    What takes long to parse is parsed in pieces, which wait in `queue` for their turn; meanwhile
    the socket is not read. A body in too many small chunks is refused.
    """

    def __init__(
        self,
        manager: web.Server,
        queue: ParseQueue,
        limits: LimitsConfig,
        metrics: Metrics,
        **options: Any,
    ):
        super().__init__(manager, **options)
        self._queue = queue
        self._limits = limits
        self._dropped = metrics.clients_dropped.labels(reason="slow_reader")
        self._dropped_pipelines = metrics.clients_dropped.labels(reason="pipelining")
        self._dropped_chunks = metrics.clients_dropped.labels(reason="small_chunks")
        self._socket: asyncio.Transport | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._request_line = (b"", b"")
        self._peer = ""
        # Called when the connection is lost.
        self.when_lost: Callable[[], None] = _nothing
        # When the latest bytes arrived that began a request, event loop time.
        self.began_at = 0.0
        # Bytes that are parsed later, while aiohttp has paused reading; None when it has not.
        self._unparsed: bytearray | None = None
        self._pause_timer: asyncio.TimerHandle | None = None
        # Bytes whose pieces are parsed next; while there are any, the socket is not read.
        self._rest = _NOTHING
        self._is_queued = False
        self._is_resuming = False
        # The body that is arriving, and how many bytes of the connection it has had so far.
        self._arriving: StreamReader | None = None
        self._arrived_bytes = 0
        # The body of the latest request that was answered.
        self._answered: StreamReader | None = None
        # Bytes that have arrived after the last answer.
        self._discarded_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether the connection is neither closed nor being closed."""
        return self._socket is not None and not self._socket.is_closing()

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open and has no request."""
        return self.is_open and self._current_request is None and not self._messages

    @property
    def body_s(self) -> float:
        """Seconds since the current request began, while its body arrives; 0 for no such body."""
        socket = self._socket
        if socket is None or socket.is_closing() or self._current_request is None:
            return 0.0
        # While the proxy does not read, the client is not the cause, except when its bytes wait to
        # be parsed in pieces.
        if self._current_request.content.is_eof():
            return 0.0
        if not (socket.is_reading() or self._is_queued):
            return 0.0
        return self._loop.time() - self.began_at

    @property
    def is_closing(self) -> bool:
        """Whether the connection is closed after the answer to the current request."""
        return self._close

    @property
    def peer(self) -> str:
        """The network address of the client, empty when it is not connected."""
        return self._peer if self._socket is not None else ""

    def displace(self) -> None:
        """Close the connection at once."""
        if self._socket is not None:
            self._socket.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket, self._peer = transport, peer_of(transport)
        # Any bytes that the system does not accept at once pause writing and start the time limit.
        transport.set_write_buffer_limits(high=0)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel_timer()
        self._socket = None
        self._unparsed = self._arriving = self._answered = None
        self._rest = _NOTHING
        self._cancel_pause()
        self.when_lost()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._loop.call_later(
            self._limits.idle_timeout_s, self._drop_slow_reader
        )

    def resume_writing(self) -> None:
        self._cancel_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._close and self._current_request is None:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > _DISCARDED_BYTES:
                super()._pause_transport_reading()
        elif self._unparsed is None or not data:
            self._parse_in_turn(data)
        elif self._close or self._force_close:
            self._unparsed.clear()
        else:
            self._keep(self._unparsed, data)

    def _keep(self, unparsed: bytearray, data: bytes | memoryview) -> None:
        """Keep bytes until aiohttp resumes parsing; stop reading above a limit."""
        unparsed += data
        if self._is_receiving_body:
            super()._pause_transport_reading()
        elif len(unparsed) > _MAX_UNPARSED_BYTES and self._pause_timer is None:
            super()._pause_transport_reading()
            self._time_pause()

    def _parse_in_turn(self, data: bytes) -> None:
        """Parse at once what takes little time, and the rest in pieces later."""
        if len(data) <= self._n_body_left or data.count(b"\n") <= _LINES_AT_ONCE:
            self._parse(data)
        else:
            self._rest = memoryview(data)
            super()._pause_transport_reading()
            self._enqueue()

    @property
    def _n_body_left(self) -> int:
        """Bytes that are left of an arriving body of known length, whose lines cost nothing."""
        request = self._current_request
        if self._messages:
            message, body = self._messages[-1]
            length = "" if isinstance(message, _ErrInfo) else message.headers.get(_LENGTH, "")
        elif request is not None:
            length, body = request.headers.get(_LENGTH, ""), request.content
        else:
            return 0
        if body is not self._arriving or not (length.isascii() and length.isdecimal()):
            return 0
        return int(length) - body.total_bytes

    def _enqueue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._queue.add(self.peer, self._parse_piece)

    def _parse_piece(self) -> None:
        """Parse the next piece of the rest, unless aiohttp has paused; it enqueues when resumed."""
        self._is_queued = False
        if self._close or self._force_close:
            self._rest = _NOTHING
        elif self._rest and not (self._reading_paused or self._buffer_paused):
            piece, self._rest = self._rest[:_PIECE_BYTES], self._rest[_PIECE_BYTES:]
            self._parse(bytes(piece))
        if self._rest and self._unparsed is not None:
            # Like what arrives from now on, which the socket is read for again.
            rest, self._rest = self._rest, _NOTHING
            super()._resume_transport_reading()
            self._keep(self._unparsed, rest)
        elif not (self._reading_paused or self._buffer_paused):
            self._resume_transport_reading()

    def _time_pause(self) -> None:
        self._pause_timer = self._loop.call_later(
            _MAX_PAUSE_S, self._end_pause, self._current_request
        )

    def _end_pause(self, request: web.BaseRequest | None) -> None:
        """Close the connection after the answer to `request`, unless that is being sent already.

        Until then, discard what the client sends.
        """
        self._pause_timer = None
        if self._unparsed is None or self._is_receiving_body:
            return
        if request is None or self._current_request is not request:
            self._time_pause()
        else:
            self._unparsed.clear()
            self._dropped_pipelines.inc()
            self.close()
            super()._resume_transport_reading()

    @property
    def _is_receiving_body(self) -> bool:
        """Whether the current request, or else the next, has not arrived completely."""
        if self._current_request is not None:
            return not self._current_request.content.is_eof()
        return bool(self._messages) and not self._messages[0][1].is_eof()

    def _pause_transport_reading(self) -> None:
        """Stop to parse; stop to read only while the body of the current request arrives."""
        if self._is_receiving_body:
            super()._pause_transport_reading()
        elif self._unparsed is None:
            self._unparsed = bytearray()

    def _resume_transport_reading(self) -> None:
        if self._unparsed is None and self._rest:
            self._enqueue()
        elif self._unparsed is None:
            super()._resume_transport_reading()
        else:  # later: aiohttp may call this while it parses
            self._loop.call_soon(self._parse_kept)

    def resume_reading(self, resume_parser: bool = True) -> None:
        # aiohttp calls this for each chunk that is read, also when reading is not paused. Then it
        # is for requests that the parser has kept: once is enough for all chunks read at once.
        if self._reading_paused or not resume_parser:
            super().resume_reading(resume_parser)
        elif not self._is_resuming:
            self._is_resuming = True
            self._loop.call_soon(self._resume_parser)

    def _resume_parser(self) -> None:
        self._is_resuming = False
        if self._socket is not None and not (self._reading_paused or self._buffer_paused):
            super().resume_reading()

    def _parse_kept(self) -> None:
        if self._unparsed is None or self._reading_paused or self._buffer_paused:
            return
        unparsed, self._unparsed = self._unparsed, None
        self._cancel_pause()
        if unparsed:
            self._parse_in_turn(bytes(unparsed))
        if not (self._rest or self._reading_paused or self._buffer_paused):
            super()._resume_transport_reading()

    def _parse(self, data: bytes) -> None:
        if self._current_request is None and not self._messages:
            self.began_at = self._loop.time()
            started = _REQUEST_LINE.match(data)
            if started:
                self._request_line = (started[1], started[2])
        super().data_received(data)
        if self._upgraded and self._payload_parser is None and not self._buffer_paused:
            self._pause_reading_for_buffer()  # until the request is answered, since none upgrades
        self._check_chunks(len(data))
        # aiohttp treats bytes that it cannot parse as another request, after the current one. When
        # they belong to the body of the current request, that body would never end.
        request = self._current_request
        if request is not None and self._messages and isinstance(self._messages[-1][0], _ErrInfo):
            if not request.content.is_eof():
                request.content.set_exception(RequestError("the request body is malformed"))
                request.content.feed_eof()
                self._messages.pop()
                self.close()  # after the answer to the current request

    def _check_chunks(self, n_bytes: int) -> None:
        """Refuse the arriving body when it consists of too many small chunks.

        `n_bytes` have been parsed since the latest call.
        """
        body = self._messages[-1][1] if self._messages else self._arriving
        if body is None or body.is_eof():
            self._arriving = None
            return
        if body is not self._arriving:
            self._arriving, self._arrived_bytes = body, body.total_bytes
            return
        self._arrived_bytes += n_bytes
        # When aiohttp has paused, some of these bytes are not parsed yet.
        if self._reading_paused or self._close:
            return
        content = body.total_bytes
        if self._arrived_bytes - content > _FRAMING_BYTES + content // _FRAMING_PART:
            self._dropped_chunks.inc()
            self.logger.info("a request body is refused: its chunks are too small")
            self.close()  # after the answer; until then, what arrives is discarded
            if body is not self._answered:
                body.set_exception(RequestError("the chunks of the request body are too small"))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        # Without the error aiohttp waits for the end of a refused body, for a limited time, before
        # it closes the connection: closing it with unread input could take the answer away.
        self._answered = request.content
        if request.content is self._arriving:
            request.content._exception = None
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that aiohttp cannot parse, with an error of the proxy."""
        if isinstance(exc, ConnectionResetError):  # the client has disconnected
            self.force_close()
            return web.Response(status=499)
        plain = super().handle_error(request, status, exc, message)
        if not isinstance(exc, HttpProcessingError):
            return plain
        response = error_responses.error_response(
            self._request_line[1].decode(), self._refusal(exc)
        )
        response.force_close()
        return response

    def _refusal(self, exc: HttpProcessingError) -> RequestError:
        if isinstance(exc, LineTooLong):
            # The limit in the error shows what is too long, see ClientServer.
            is_target = exc.args[1] == request_head.MAX_LINE_BYTES
            make = request_head.target_too_long if is_target else request_head.header_too_long
            return make()
        if exc.message.startswith("Too many headers"):
            return request_head.too_many_headers(request_head.MAX_HEADERS)
        if isinstance(exc, BadHttpMethod) and self._request_line[0]:
            return MethodRefused(
                self._request_line[0].decode(), request_head.METHODS, is_standard=False
            )
        reason = exc.message.partition("\n")[0]
        return RequestError(f"the request is not valid HTTP: {reason}")

    def _drop_slow_reader(self) -> None:
        if self._socket is not None and self._socket.get_write_buffer_size():
            self._dropped.inc()
            self._socket.abort()

    def _cancel_pause(self) -> None:
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None

    def _cancel_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class ClientServer(web.Server):
    """Makes a ClientConnection for each connection."""

    def __init__(self, made: web.Server, limits: LimitsConfig, metrics: Metrics) -> None:
        """Use the options of `made`, a server that has served no connection."""
        self._turns = TurnQueue()
        self._pieces = ParseQueue()
        self._handle = made.request_handler
        super().__init__(
            self._handle_in_turn,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
        self._limits = limits
        self._metrics = metrics

    async def _handle_in_turn(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        peer = ""
        if isinstance(connection, ClientConnection):
            peer = connection.peer
            # The parser counts a request whose body arrived after it had begun as one that waits.
            # Then it keeps what follows, and aiohttp resumes it only when bodies are read.
            connection.resume_reading()
        await self._turns.wait(peer)
        return await self._handle(request)

    def __call__(self) -> RequestHandler:
        return ClientConnection(
            self,
            self._pieces,
            self._limits,
            self._metrics,
            loop=self._loop,
            max_line_size=request_head.MAX_LINE_BYTES,
            max_field_size=request_head.MAX_LINE_BYTES - _SEPARATOR,
            max_headers=request_head.MAX_HEADERS,
            **self._kwargs,
        )


class ClientRunner(web.AppRunner):
    """Runs an application behind a ClientServer."""

    def __init__(
        self, app: web.Application, limits: LimitsConfig, metrics: Metrics, **options: Any
    ) -> None:
        super().__init__(app, **options)
        self._limits = limits
        self._metrics = metrics

    async def _make_server(self) -> web.Server:
        return ClientServer(await super()._make_server(), self._limits, self._metrics)
