"""Health checks: failures of a check, and an event loop that clients keep busy."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from pool_fixtures import pool_gateway

from evoke_proxy.config import Config, EmbedderConfig, PoolConfig, UpstreamConfig
from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.engine.routing.pool_gateway import PoolGateway

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


def test_health_checks_continue_after_any_failure_of_a_check(monkeypatch: Any) -> None:
    async def checked() -> None:
        gateway = pool_gateway()
        assert gateway.servers.pool.due_checks(0.0) == [0, 1]

        async def odd(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(gateway.servers[0].upstream, "call", odd)
        with pytest.raises(ZeroDivisionError):
            await gateway.monitor._check(0)
        assert gateway.servers.pool.due_checks(asyncio.get_running_loop().time() + 60) == [0]

    asyncio.run(checked())
