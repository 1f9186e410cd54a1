"""Clients that send or read too slowly are disconnected, and counted; others are not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD, SlowClientGuard, body_deadline

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def guarded(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    use: Callable[[Streams], Awaitable[None]],
) -> dict[str, float]:
    """Call `use` with a connection to a guarded server; returns the disconnections by reason."""
    metrics = Metrics()
    limits = replace(Config().limits, body_timeout_s=0.3, idle_timeout_s=0.3)

    async def work() -> None:
        app = web.Application(middlewares=[body_deadline])
        app[SLOW_CLIENT_GUARD] = SlowClientGuard(limits, metrics)
        app.router.add_route("*", "/", handler)
        async with TestServer(app) as server:
            assert server.port is not None
            streams = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
            await use(streams)
            streams[1].close()

    asyncio.run(work())
    value = metrics.registry.get_sample_value
    counts = {
        reason: value("evoke_clients_dropped_total", {"reason": reason}) or 0.0
        for reason in ("slow_body", "slow_reader")
    }
    return {reason: count for reason, count in counts.items() if count}


async def _echo(request: web.Request) -> web.StreamResponse:
    return web.Response(body=await request.read())


def test_a_body_that_does_not_arrive_in_time_ends_the_connection() -> None:
    async def use(streams: Streams) -> None:
        reader, writer = streams
        writer.write(HEAD + b"ab")
        async with asyncio.timeout(5):
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readuntil(b"\r\n\r\n")

    assert guarded(_echo, use) == {"slow_body": 1}


def test_a_long_answer_to_a_whole_body_is_not_timed() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        await asyncio.sleep(0.6)
        return web.Response(text="late")

    async def use(streams: Streams) -> None:
        reader, writer = streams
        writer.write(HEAD)
        await asyncio.sleep(0.05)
        writer.write(b"abcd")
        async with asyncio.timeout(5):
            assert (await reader.readuntil(b"late")).startswith(b"HTTP/1.1 200")

    assert guarded(answer, use) == {}


def test_a_client_that_does_not_read_its_answer_is_disconnected() -> None:
    ended: list[Exception] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        guard = request.app[SLOW_CLIENT_GUARD]
        try:
            while True:
                await guard.write(request, response, bytes(1 << 20))
        except ConnectionResetError as error:
            ended.append(error)
        return response

    async def use(streams: Streams) -> None:
        streams[1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(10):
            while not ended:
                await asyncio.sleep(0.05)

    assert guarded(answer, use) == {"slow_reader": 1}
    assert "does not read" in str(ended[0])


def test_a_client_that_reads_slowly_but_reads_gets_its_whole_answer() -> None:
    size = 1 << 16

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 10 * size
        await response.prepare(request)
        for _ in range(10):
            await request.app[SLOW_CLIENT_GUARD].write(request, response, bytes(size))
        return response

    async def use(streams: Streams) -> None:
        reader, writer = streams
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        n_read = 0
        async with asyncio.timeout(10):
            while n_read < 10 * size:
                await asyncio.sleep(0.02)
                n_read += len(await reader.read(size))

    assert guarded(answer, use) == {}
