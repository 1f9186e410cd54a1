"""A limit on open connections: who is refused, who is displaced, and what each is told."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import LimitsConfig
from evoke_proxy.web.connection_limit import ClientSite, ConnectionLimit, raise_file_limit
from evoke_proxy.web.connections import ClientRunner

REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str], Awaitable[Streams]]


async def _handle(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _ask(streams: Streams) -> bytes:
    """Send a request; returns what the server answers within two seconds, or until it closes."""
    reader, writer = streams
    writer.write(REQUEST)
    async with asyncio.timeout(2):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return head + await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""


def limited(most: int, use: Callable[[Connect], Awaitable[None]]) -> float:
    """Call `use` with a function that connects from an address; returns how many were dropped."""
    metrics = Metrics()

    async def work() -> None:
        app = web.Application()
        app.router.add_get("/", _handle)
        runner = ClientRunner(app, metrics=metrics, limits=LimitsConfig(connections=most))
        await runner.setup()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(runner.cleanup)
            site = ClientSite(runner, "127.0.0.1", 0, ConnectionLimit(most, metrics))
            await site.start()
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

            async def connect(address: str) -> Streams:
                streams = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
                stack.callback(streams[1].close)
                return streams

            await use(connect)

    asyncio.run(work())
    labels = {"reason": "connections"}
    return metrics.registry.get_sample_value("evoke_clients_dropped_total", labels) or 0.0


def test_up_to_the_limit_every_connection_is_served() -> None:
    async def use(connect: Connect) -> None:
        for _ in range(3):
            assert (await _ask(await connect("127.0.0.1"))).endswith(b"ok")

    assert limited(3, use) == 0


def test_a_connection_above_the_limit_of_the_same_address_is_answered_and_closed() -> None:
    async def use(connect: Connect) -> None:
        first = [await connect("127.0.0.1") for _ in range(2)]
        for streams in first:
            assert (await _ask(streams)).endswith(b"ok")
        answer = await _ask(await connect("127.0.0.1"))
        assert answer.startswith(b"HTTP/1.1 503 ") and b"limits.connections" in answer
        assert b"Retry-After: " in answer and b"Connection: close" in answer
        assert (await _ask(first[0])).endswith(b"ok"), "the earlier connections stay open"

    assert limited(2, use) == 1


def test_another_address_displaces_an_idle_connection_of_the_one_with_most() -> None:
    async def use(connect: Connect) -> None:
        many = [await connect("127.0.0.1") for _ in range(3)]
        for streams in many:
            assert (await _ask(streams)).endswith(b"ok")
        assert (await _ask(await connect("127.0.0.2"))).endswith(b"ok")
        answers = [await _ask(streams) for streams in many]
        assert sorted(answer.endswith(b"ok") for answer in answers) == [False, True, True]
        assert answers[0] == b"", "the oldest is closed"

    assert limited(3, use) == 1


def test_an_address_that_would_have_as_many_displaces_none() -> None:
    async def use(connect: Connect) -> None:
        addresses = ("127.0.0.1", "127.0.0.1", "127.0.0.2")
        earlier = [await connect(address) for address in addresses]
        for streams in earlier:
            assert (await _ask(streams)).endswith(b"ok")
        assert (await _ask(await connect("127.0.0.2"))).startswith(b"HTTP/1.1 503 ")
        assert [(await _ask(streams)).endswith(b"ok") for streams in earlier] == [True] * 3

    assert limited(3, use) == 1


@pytest.fixture
def file_limit() -> object:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_on_files_is_raised_to_what_the_connections_need(
    file_limit: tuple[int, int],
) -> None:
    hard = file_limit[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    needed = 2 * 100 + 256
    assert raise_file_limit(100) == min(needed, hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(needed, hard), hard)
    assert raise_file_limit(1) == min(needed, hard), "it is never lowered"
