"""Requests other than chats: few at a time at llama-server, and tenants take turns."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_upstream import Exchange, FakeUpstream, fake_upstream, response
from harness import Answer, ask, until
from tenant_keys import KEYS, LOUD_AND_QUIET, proxy_with_keys

N_LOUD = 30
JSON = {"Content-Type": "application/json"}
PATHS = pytest.mark.parametrize(
    ("path", "n_parallel"),
    [("/tokenize", 4), ("/v1/chat/completions/input_tokens", 4), ("/v1/embeddings", 1)],
)


class _Server:
    """Answers requests to one path one after the other, when a test says so."""

    def __init__(self) -> None:
        self.answered = threading.Semaphore(0)
        self.begun: list[bytes] = []

    async def behave(self, exchange: Exchange) -> None:
        self.begun.append(exchange.body)
        while not self.answered.acquire(blocking=False):
            await asyncio.sleep(0.005)
        await exchange.send(response(b"{}", b"application/json"))


@contextmanager
def _slow_server() -> Iterator[tuple[_Server, FakeUpstream]]:
    server = _Server()
    with fake_upstream(server.behave) as fake:
        try:
            yield server, fake
        finally:
            for _ in range(10 * N_LOUD):
                server.answered.release()


def _post(port: int, path: str, tenant: str) -> Answer:
    body = b'{"messages":[{"role":"user","content":"%s"}]}' % tenant.encode()
    return ask(port, "POST", path, body, JSON | {"Authorization": f"Bearer {KEYS[tenant]}"})


@PATHS
def test_a_tenant_with_many_requests_delays_another_by_one(
    tmp_path: Path, path: str, n_parallel: int
) -> None:
    with (
        _slow_server() as (server, fake),
        ThreadPoolExecutor(N_LOUD + 1) as threads,
        proxy_with_keys(fake.port, tmp_path, LOUD_AND_QUIET) as running,
    ):
        try:
            loud = [threads.submit(_post, running.port, path, "loud") for _ in range(N_LOUD)]
            until(lambda: len(server.begun) == n_parallel)
            time.sleep(0.5)
            assert len(server.begun) == n_parallel
            quiet = threads.submit(_post, running.port, path, "quiet")
            time.sleep(0.2)
            for _ in range(n_parallel + 2):
                server.answered.release()
            assert quiet.result(10).status == 200
        finally:
            for _ in range(N_LOUD):
                server.answered.release()
        assert {each.result().status for each in loud} == {200}


def test_a_disconnected_client_does_not_free_the_place_of_a_text_that_is_computed(
    tmp_path: Path,
) -> None:
    with (
        _slow_server() as (server, fake),
        proxy_with_keys(fake.port, tmp_path, LOUD_AND_QUIET) as running,
    ):
        for _ in range(3):
            for _ in range(4):
                with socket.create_connection(("127.0.0.1", running.port)) as client:
                    key = f"Authorization: Bearer {KEYS['loud']}\r\n".encode()
                    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n"
                    client.sendall(head + key + b"\r\n{}")
                    time.sleep(0.05)
        assert len(server.begun) == 4
        for _ in range(4):
            server.answered.release()
        server.answered.release()
        assert _post(running.port, "/tokenize", "quiet").status == 200
