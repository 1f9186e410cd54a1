"""An event loop that clients keep busy is no failure of llama-server."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.time_limits import timeout_without_lag
from evoke_proxy.config import Config, EmbedderConfig, PoolConfig, UpstreamConfig
from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.engine.routing.pool_gateway import PoolGateway
from evoke_proxy.errors import UpstreamTimeout

# Seconds for which each step of the event loop is blocked, and the limit of a check.
STEP_S, LIMIT_S = 0.03, 0.15
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def _server(answers: bool) -> Iterator[str]:
    """A server in threads of its own, which answers each request, or none; yields its URL."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while connection.recv(65536):
                if answers:
                    connection.sendall(ANSWER)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


async def _keep_busy() -> None:
    while True:
        time.sleep(STEP_S)
        await asyncio.sleep(0)


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "hangs"])
def test_only_a_server_that_hangs_loses_its_requests(answers: bool) -> None:
    async def state() -> str:
        upstream = UpstreamConfig(connect_timeout_s=STEP_S, call_timeout_s=0.5)
        rules = PoolConfig((f"a={url}",), health_timeout_s=LIMIT_S)
        gateway = build_gateway(
            Config(upstream=upstream, pool=rules, embedder=EmbedderConfig("none"))
        )
        assert isinstance(gateway, PoolGateway)
        async with asyncio.TaskGroup() as tasks:
            busy = tasks.create_task(_keep_busy())
            async with gateway:
                busy.cancel()
                return gateway.servers.pool.members[0].breaker.state

    with _server(answers) as url:
        assert asyncio.run(state()) == ("closed" if answers else "open")


def test_a_limit_without_lag_expires_after_its_time() -> None:
    async def waited() -> float:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            async with timeout_without_lag(0.1):
                await asyncio.sleep(60)
        return time.monotonic() - start

    assert 0.1 <= asyncio.run(waited()) < 5

    async def in_time() -> int:
        async with timeout_without_lag(0.1):
            return len(asyncio.all_tasks())

    assert asyncio.run(in_time()) == 1


def test_a_connection_that_is_not_made_in_time_counts_as_not_reached() -> None:
    async def refused() -> UpstreamTimeout:
        async with LlamaClient(UpstreamConfig(url=url, connect_timeout_s=0.2)) as client:
            with pytest.raises(UpstreamTimeout) as caught:
                await client.call("GET", "/props")
        return caught.value

    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for client in (first, second):  # they fill the queue of connections
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert not asyncio.run(refused()).reached
