"""Connections to a server on a real socket: requests as sent, replies as read, and failures."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from evoke_proxy.adapters.llama.transport import PIECE_BYTES, HttpTransport, Reply
from evoke_proxy.config import UpstreamConfig
from evoke_proxy.errors import (
    RequestError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamTimeout,
    UpstreamUnavailable,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Server:
    """Answers every request on a connection with the same bytes, and then closes it or not."""

    answer: bytes
    closes: bool = False
    requests: list[bytes] = field(default_factory=list)
    n_connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                self.requests.append(head + body)
                writer.write(self.answer)
                await writer.drain()
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def answered(
    server: Server, use: Callable[[HttpTransport], Awaitable[None]], read_timeout_s: float = 5.0
) -> None:
    async def work() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        config = UpstreamConfig(
            url=f"http://127.0.0.1:{port}/", connect_timeout_s=2.0, read_timeout_s=read_timeout_s
        )
        async with listener, HttpTransport(config) as transport:
            await use(transport)

    asyncio.run(work())


async def _read(transport: HttpTransport, method: str = "GET", target: str = "/x") -> bytes:
    async with transport.open(method, target, {}) as reply:
        return await reply.read()


def test_a_request_is_sent_as_it_is_and_without_headers_of_the_library() -> None:
    server = Server(OK)

    async def use(transport: HttpTransport) -> None:
        headers = {"Content-Type": "application/json", "X-Own": "a"}
        async with transport.open("POST", "/a%2Fb?q=%20x", headers, b'{"a":1}') as reply:
            assert (reply.status, reply.reason, await reply.read()) == (200, "OK", b"ok")
        host = transport.url.removeprefix("http://")
        (sent,) = server.requests
        head, _, body = sent.partition(b"\r\n\r\n")
        line, *fields = head.decode().split("\r\n")
        assert (line, body) == ("POST /a%2Fb?q=%20x HTTP/1.1", b'{"a":1}')
        assert sorted(fields) == sorted(
            [f"Host: {host}", "Content-Type: application/json", "X-Own: a", "Content-Length: 7"]
        )

    answered(server, use)


@pytest.mark.parametrize("n_parts", [1, 3])
def test_a_large_body_arrives_whole_also_in_parts(n_parts: int) -> None:
    server, part = Server(OK), bytes(range(256)) * (3 * PIECE_BYTES // 512)

    async def use(transport: HttpTransport) -> None:
        body = part if n_parts == 1 else (part,) * n_parts
        async with transport.open("POST", "/x", {}, body) as reply:
            assert await reply.read() == b"ok"
        assert server.requests[0].partition(b"\r\n\r\n")[2] == part * n_parts

    answered(server, use)


def test_a_connection_is_used_again_but_not_after_a_stream_or_an_error() -> None:
    stream = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    error = OK.replace(b"200 OK", b"400 Bad Request")
    for answer, expected in ((OK, 1), (stream, 3), (error, 3)):
        server = Server(answer)

        async def use(transport: HttpTransport) -> None:
            assert [await _read(transport) for _ in range(3)] == [b"ok"] * 3

        answered(server, use)
        assert server.n_connections == expected


def test_a_204_with_a_body_is_read_as_empty() -> None:
    server = Server(b"HTTP/1.1 204 No Content\r\n\r\n0\r\n\r\n")

    async def use(transport: HttpTransport) -> None:
        assert [await _read(transport) for _ in range(2)] == [b"", b""]

    answered(server, use)
    assert server.n_connections == 2


def test_headers_keep_bytes_that_are_not_utf_8_and_their_order() -> None:
    head = b"HTTP/1.1 200 OK\r\nX-A: \xff\r\nX-B: \xc3\xa9\r\nX-A: 2\r\nContent-Length: 0\r\n\r\n"

    async def use(transport: HttpTransport) -> None:
        async with transport.open("GET", "/x", {}) as reply:
            assert reply.headers.getall("X-A") == ["\udcff", "2"]
            assert reply.headers["X-B"] == "\u00e9"

    answered(Server(head), use)


def test_a_compressed_body_is_not_decoded_and_redirects_are_not_followed() -> None:
    head = (
        b"HTTP/1.1 302 Found\r\nLocation: /y\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n"
    )
    server = Server(head + b"\x1f\x8bx")

    async def use(transport: HttpTransport) -> None:
        async with transport.open("GET", "/x", {}) as reply:
            assert (reply.status, await reply.read()) == (302, b"\x1f\x8bx")

    answered(server, use)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", UpstreamUnavailable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", UpstreamUnavailable),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nok", UpstreamUnavailable),
        (b"this is not HTTP\r\n\r\n", UpstreamProtocolError),
    ],
    ids=["closed", "cut", "cut-chunk", "no-http"],
)
def test_a_reply_that_breaks_off_or_is_no_http_is_an_error_of_the_server(
    answer: bytes, expected: type[UpstreamError]
) -> None:
    async def use(transport: HttpTransport) -> None:
        with pytest.raises(expected) as raised:
            await _read(transport)
        assert raised.value.url == transport.url and raised.value.reached
        assert transport.url not in raised.value.public

    answered(Server(answer, closes=True), use)


def test_a_refused_connection_says_that_the_server_was_not_reached() -> None:
    async def refused() -> UpstreamError:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # bound, but not listening
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            async with HttpTransport(UpstreamConfig(url=url)) as transport:
                with pytest.raises(UpstreamUnavailable) as raised:
                    await _read(transport)
        return raised.value

    error = asyncio.run(refused())
    assert not error.reached and error.url in str(error) and error.url not in error.public


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", b"HTTP/1.1 200 OK\r\nX-A"]
)
def test_a_reply_that_stops_is_an_error_after_the_time_limit(answer: bytes) -> None:
    async def use(transport: HttpTransport) -> None:
        with pytest.raises(UpstreamTimeout) as raised:
            await _read(transport)
        assert raised.value.reached

    answered(Server(answer), use, read_timeout_s=0.1)


def test_what_was_buffered_is_yielded_first_and_nothing_is_lost() -> None:
    body = bytes(range(256)) * 4096
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def use(transport: HttpTransport) -> None:
        async with transport.open("GET", "/x", {}) as reply:
            buffered: Reply = await reply.buffered()
            assert await buffered.read() == body
            assert buffered.status == 200

    answered(Server(head + body), use)


def test_a_client_whose_body_fails_is_no_failure_of_the_server() -> None:
    async def failing(error: Exception) -> AsyncIterator[bytes]:
        yield b"{"
        raise error

    async def use(transport: HttpTransport) -> None:
        for error, expected in (
            (ConnectionResetError("gone"), ConnectionResetError),
            (RequestError("too large", "too_large", 413), RequestError),
            (ValueError("malformed"), RequestError),
        ):
            with pytest.raises(expected):
                async with transport.open("POST", "/x", {"Content-Length": "9"}, failing(error)):
                    pass

    answered(Server(OK), use)


@pytest.mark.parametrize(
    ("target", "headers"),
    [("/x", {"X-A": "a\r\nX-B: b"}), ("/x", {"X A": "1"}), ("/x\r\nX-B: b", {})],
)
def test_a_head_that_would_be_two_requests_is_refused_and_not_sent(
    target: str, headers: dict[str, str]
) -> None:
    server = Server(OK)

    async def use(transport: HttpTransport) -> None:
        with pytest.raises(RequestError):
            async with transport.open("GET", target, headers):
                pass

    answered(server, use)
    assert server.requests == []
