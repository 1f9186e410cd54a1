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
ENDLESS = REQUEST.replace(b"/", b"/endless", 1)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[Streams]]


async def _handle(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _answer_for_ever(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(b"begun")
    await asyncio.Event().wait()
    return answer


async def _begin(streams: Streams) -> None:
    """Send a request whose answer does not end, and wait until it begins."""
    streams[1].write(ENDLESS)
    async with asyncio.timeout(2):
        await streams[0].readuntil(b"begun")


async def _is_closed(streams: Streams) -> bool:
    """Whether the server closes the connection within 0.2 seconds."""
    try:
        async with asyncio.timeout(0.2):
            await streams[0].read()
            return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


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
    """Call `use` with a function that connects from an address; returns how many were dropped.

    Its second argument is 0 for the site of clients, 1 for that of operators.
    """
    metrics = Metrics()

    async def work() -> None:
        app = web.Application()
        app.router.add_get("/", _handle)
        app.router.add_get("/endless", _answer_for_ever)
        limits = LimitsConfig(connections=most)
        runner = ClientRunner(app, metrics=metrics, limits=limits, shutdown_timeout=0.1)
        await runner.setup()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(runner.cleanup)
            site = ClientSite(runner, "127.0.0.1", 0, ConnectionLimit(most, metrics))
            await site.start()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            ports = [port for _, port in runner.addresses]

            async def connect(address: str, site: int = 0) -> Streams:
                streams = await asyncio.open_connection(
                    "127.0.0.1", ports[site], local_addr=(address, 0)
                )
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


def test_an_address_with_all_connections_gives_up_its_newest_request_to_another() -> None:
    async def use(connect: Connect) -> None:
        many = [await connect("127.0.0.1") for _ in range(16)]
        for streams in many:
            await _begin(streams)
        for address in ("127.0.0.2", "127.0.0.3", "127.0.0.2"):
            await _begin(await connect(address))
        closed = [await _is_closed(streams) for streams in many]
        assert closed == [False] * 13 + [True] * 3
        answer = await _ask(await connect("127.0.0.1"))
        assert answer.startswith(b"HTTP/1.1 503 "), "it takes none back"

    assert limited(16, use) == 4


def test_an_idle_connection_is_given_up_before_a_running_request_of_a_larger_address() -> None:
    async def use(connect: Connect) -> None:
        running = [await connect("127.0.0.1") for _ in range(5)]
        for streams in running:
            await _begin(streams)
        idle = [await connect("127.0.0.2") for _ in range(3)]
        for streams in idle:
            assert (await _ask(streams)).endswith(b"ok")
        await _begin(await connect("127.0.0.3"))
        assert await _is_closed(idle[0])
        assert not any([await _is_closed(streams) for streams in running])

    assert limited(8, use) == 1


def test_an_address_with_few_connections_loses_no_running_request() -> None:
    """However many addresses there are, so that numerous ones do not stop all others."""

    async def use(connect: Connect) -> None:
        earlier = [await connect(f"127.0.0.{2 + number // 2}") for number in range(16)]
        for streams in earlier:
            await _begin(streams)
        assert (await _ask(await connect("127.0.0.99"))).startswith(b"HTTP/1.1 503 ")
        assert not any([await _is_closed(streams) for streams in earlier])

    assert limited(16, use) == 1


def test_connections_to_the_admin_address_neither_count_nor_are_closed() -> None:
    async def use(connect: Connect) -> None:
        page = [await connect("127.0.0.1", 1) for _ in range(8)]
        for streams in page:
            assert (await _ask(streams)).endswith(b"ok")
        clients = [await connect("127.0.0.2") for _ in range(4)]
        for streams in clients:
            assert (await _ask(streams)).endswith(b"ok")
        assert (await _ask(await connect("127.0.0.3"))).endswith(b"ok")
        assert [(await _ask(streams)).endswith(b"ok") for streams in page] == [True] * 8
        assert await _is_closed(clients[0])

    assert limited(4, use) == 1


def test_a_closed_connection_no_longer_counts() -> None:
    async def use(connect: Connect) -> None:
        for _ in range(5):
            streams = [await connect("127.0.0.1") for _ in range(2)]
            for reader, writer in streams:
                assert (await _ask((reader, writer))).endswith(b"ok")
                writer.close()
                await writer.wait_closed()
            await asyncio.sleep(0.05)

    assert limited(2, use) == 0


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
