"""A connection parses and keeps few requests ahead, and notices when its client disconnects."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest
from aiohttp import web

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config.schema import LimitsConfig
from evoke_proxy.web import connections
from evoke_proxy.web.connections import ClientConnection, ClientRunner

_Connections = Callable[[], list[ClientConnection]]
_N_SENT = 100
_REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_POST = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n%s\r\n\r\n"


def _post(body: bytes, *, chunked: bool = False) -> bytes:
    if not body or not chunked:
        return _POST % (b"Content-Length: %d" % len(body)) + body
    return _POST % b"Transfer-Encoding: chunked" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


@dataclass
class _Server:
    """A server whose requests are answered with the length of their body, when they may be."""

    metrics: Metrics = field(default_factory=Metrics)
    pause_s: float = 0.0
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.has_begun.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        await asyncio.sleep(self.pause_s)
        return web.Response(text=f"<{len(body)}>")

    @property
    def n_closed(self) -> float:
        labels = {"reason": "pipelining"}
        return self.metrics.registry.get_sample_value("evoke_clients_dropped_total", labels) or 0.0

    @asynccontextmanager
    async def connected(
        self,
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, _Connections]]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/", self.handle)
        app.on_response_prepare.append(connections.announce_close)
        runner = ClientRunner(
            app, LimitsConfig(), self.metrics, access_log=None, handler_cancellation=True
        )
        await runner.setup()
        assert (server := runner.server) is not None
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        try:
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            yield reader, writer, lambda: cast(list[ClientConnection], server.connections)
            writer.close()
        finally:
            listener.close()
            await runner.cleanup()


def _run(test: Callable[[_Server], Awaitable[None]]) -> None:
    async def within_limit() -> None:
        async with asyncio.timeout(60):
            await test(_Server())

    asyncio.run(within_limit())


async def _read_until_closed(reader: asyncio.StreamReader) -> bytes:
    received = b""
    while chunk := await reader.read(1 << 16):
        received += chunk
    return received


def test_a_connection_parses_two_requests_ahead_and_answers_all() -> None:
    """aiohttp reads the limit from a global name of its module, which is not documented."""

    async def test(server: _Server) -> None:
        async with server.connected() as (reader, writer, _open):
            writer.write(_REQUEST * _N_SENT)
            await server.has_begun.wait()
            for _ in range(20):  # whatever else would be parsed is parsed by then
                await asyncio.sleep(0.005)
            (connection,) = _open()
            assert len(connection._messages) == 2
            server.may_answer.set()
            n_answered = 0
            while n_answered < _N_SENT:
                n_answered += (await reader.read(1 << 16)).count(b"HTTP/1.1 200 OK")

    _run(test)


# With 110 and 417 aiohttp's parser keeps a request back that no event of its own makes it parse.
@pytest.mark.parametrize("seed", [*range(20), 110, 417])
def test_requests_are_answered_in_their_order_however_they_arrive(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 100, 1800]) for _ in range(rng.randint(1, 30))]
    sizes[0] = rng.choice([10, 300_000, 1_000_000])  # larger than what is read at once
    sent = b"".join(_post(bytes(n), chunked=rng.random() < 0.5) for n in sizes)

    async def test(server: _Server) -> None:
        async with server.connected() as (reader, writer, _):
            if rng.random() < 0.5:
                server.may_answer.set()
            begin = 0
            while begin < len(sent):
                end = begin + rng.choice([10, 1000, 30_000, 1_000_000])
                writer.write(sent[begin:end])
                await writer.drain()
                await asyncio.sleep(rng.choice([0, 0, 0.001]))
                begin = end
            server.may_answer.set()
            for size in sizes:
                assert (await reader.readuntil(b">")).endswith(b"\r\n\r\n<%d>" % size)

    _run(test)


@pytest.mark.parametrize(
    "ahead",
    [
        b"",
        _REQUEST,
        _REQUEST * 2,
        _REQUEST * 32,
        _REQUEST * 10_000,
        _post(bytes(2_000_000)),
    ],
    ids=["none", "one", "two", "32", "10,000", "body"],
)
def test_a_disconnected_client_is_noticed_while_its_request_is_answered(ahead: bytes) -> None:
    async def test(server: _Server) -> None:
        async with server.connected() as (_, writer, _open):
            writer.write(_REQUEST)
            await server.has_begun.wait()
            writer.write(ahead)
            await writer.drain()
            for _ in range(20):
                await asyncio.sleep(0.005)
            assert not server.was_cancelled.is_set()
            writer.close()
            async with asyncio.timeout(2.0):
                await server.was_cancelled.wait()

    _run(test)


def test_any_number_of_requests_is_answered_when_each_answer_takes_less_than_a_second() -> None:
    n_sent = 500  # half a megabyte, answered in three seconds: both are above the limits
    request = _REQUEST.replace(b"Host", b"X: %s\r\nHost" % (b"x" * 1000))

    async def test(server: _Server) -> None:
        async with server.connected() as (reader, writer, _open):

            async def send() -> None:
                for _ in range(n_sent):
                    writer.write(request)
                    await writer.drain()

            server.may_answer.set()
            server.pause_s = 0.006
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(send())
                for _ in range(n_sent):
                    assert (await reader.readuntil(b">")).endswith(b"<0>")
            assert server.n_closed == 0

    _run(test)


def test_a_connection_with_too_many_bytes_ahead_is_closed_after_an_answer() -> None:
    async def test(server: _Server) -> None:
        async with server.connected() as (reader, writer, _open):
            for _ in range(50):
                writer.write(_REQUEST * 10_000)
                await writer.drain()
            (connection,) = _open()
            while not connection.is_closing:
                assert (
                    len(connection._unparsed or b"") <= 65536 + 262144
                )  # and what is read at once
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.5)  # bytes that arrive after it is closed would reset it
            server.may_answer.set()
            answer = await _read_until_closed(reader)
            assert answer.count(b"HTTP/1.1 200 OK") == 1 and b"Connection: close" in answer
            assert server.n_closed == 1

    _run(test)
