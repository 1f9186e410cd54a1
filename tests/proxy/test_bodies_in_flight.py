"""The bodies of all running requests use bounded memory, shared fairly between tenants."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fake_upstream import Exchange, FakeUpstream, fake_upstream, response
from harness import Answer, ask, proxy, until

from bench.llama import proxied

MIB = 1 << 20
LIMIT_MIB = 256
LIMITS = {"limits__bodies_mib": LIMIT_MIB, "limits__body_bytes": 64 * MIB}
PATH = "/v1/chat/completions"
# Longest time of a small request on a busy machine.
SMALL_REQUEST_S = 10.0


def _headers(tenant: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Authorization": f"Bearer {tenant}"}


def _body(n_bytes: int) -> bytes:
    head, tail = b'{"messages":[{"role":"user","content":"', b'"}]}'
    return head + b"a" * (n_bytes - len(head) - len(tail)) + tail


def _chat(port: int, tenant: str, n_bytes: int) -> Answer:
    return ask(port, "POST", PATH, _body(n_bytes), _headers(tenant))


@contextmanager
def _partial_upload(port: int, tenant: str, announced: int, sent: int) -> Iterator[socket.socket]:
    """Open a connection on which only part of a body has been sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        lines = [f"POST {PATH} HTTP/1.1", "Host: a", f"Content-Length: {announced}"]
        lines += [f"{name}: {value}" for name, value in _headers(tenant).items()]
        client.sendall("\r\n".join([*lines, "", ""]).encode() + _body(announced)[:sent])
        yield client


@pytest.fixture
def holding_server() -> Iterator[tuple[FakeUpstream, threading.Event]]:
    """A fake server that answers small requests at once, and large ones when the event is set."""
    release = threading.Event()

    async def behave(exchange: Exchange) -> None:
        large = len(exchange.body) > 16 * MIB
        exchange.body = b""
        while large and not release.is_set():
            await asyncio.sleep(0.05)
        await exchange.send(response(b"{}", b"application/json"))

    with fake_upstream(behave) as fake:
        yield fake, release
        release.set()


def test_forty_large_bodies_of_one_tenant_leave_memory_and_time_to_others(
    holding_server: tuple[FakeUpstream, threading.Event], tmp_path: Path
) -> None:
    fake, release = holding_server
    settings = tmp_path / "evoke.yaml"
    settings.write_text(f"limits: {{bodies_mib: {LIMIT_MIB}}}\n", encoding="utf-8")
    with proxied(fake.port, "--config", str(settings)) as running, ThreadPoolExecutor(40) as pool:

        def peak_mib() -> float:
            status = Path(f"/proc/{running.pid}/status").read_text(encoding="ascii")
            (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
            return int(line.split()[1]) / 1024

        assert _chat(running.port, "small", 300).status == 200
        before = peak_mib()
        large = [pool.submit(_chat, running.port, "large", 32 * MIB) for _ in range(40)]
        while not all(future.done() for future in large):
            began = time.monotonic()
            for n_bytes in (300, MIB):
                assert _chat(running.port, "small", n_bytes).status == 200
            assert time.monotonic() - began < SMALL_REQUEST_S
            if sum(future.done() for future in large) >= 36:
                release.set()
        assert peak_mib() - before < LIMIT_MIB + 64
        answers = [future.result() for future in large]
        refused = [answer for answer in answers if answer.status == 503]
        assert {answer.status for answer in answers} == {200, 503}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert all(
            json.loads(answer.body)["error"]["code"] == "body_memory_full" for answer in refused
        )
        assert _chat(running.port, "large", 32 * MIB).status == 200, "all memory is free again"


def test_an_announced_body_that_does_not_arrive_uses_no_memory(
    holding_server: tuple[FakeUpstream, threading.Event],
) -> None:
    with proxy(holding_server[0].port, **LIMITS) as running, ExitStack() as slow:
        for _ in range(20):
            slow.enter_context(_partial_upload(running.port, "one", 64 * MIB, 1000))
        for tenant in ("one", "other"):
            assert _chat(running.port, tenant, 15 * MIB).status == 200


def test_the_newest_body_of_the_largest_tenant_is_refused_to_admit_another_tenant(
    holding_server: tuple[FakeUpstream, threading.Event],
) -> None:
    fake, release = holding_server
    release.set()
    n_bytes = 24 * MIB
    with proxy(fake.port, **LIMITS) as running, ExitStack() as slow:
        budget = running.bodies
        first = slow.enter_context(_partial_upload(running.port, "large", n_bytes, n_bytes - 1))
        until(lambda: budget.n_bytes > 3 * 23 * MIB, "the first body has arrived")
        second = slow.enter_context(_partial_upload(running.port, "large", n_bytes, n_bytes - 1))
        until(lambda: budget.n_bytes > 6 * 23 * MIB, "the second body has arrived")
        assert _chat(running.port, "other", 32 * MIB).status == 200
        assert second.recv(100).startswith(b"HTTP/1.1 503")
        first.sendall(b"}")
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: budget.n_bytes == 0, "all memory is free")


def test_chunked_bodies_count_as_they_arrive(
    holding_server: tuple[FakeUpstream, threading.Event],
) -> None:
    fake, _ = holding_server
    part = b"100000\r\n" + b"a" * MIB + b"\r\n"
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    start = b'28\r\n{"messages":[{"role":"user","content":"a\r\n'
    with proxy(fake.port, **LIMITS) as running, ExitStack() as slow:
        clients = []
        for _ in range(3):
            client = socket.create_connection(("127.0.0.1", running.port), timeout=60)
            slow.enter_context(client)
            client.sendall(head + start)
            clients.append(client)

        def send(client: socket.socket) -> bytes:
            try:
                for _ in range(40):
                    client.sendall(part)
                return client.recv(12)
            except OSError:
                return b""

        with ThreadPoolExecutor(3) as pool:
            uploads = [pool.submit(send, client) for client in clients]
            until(lambda: any(upload.done() for upload in uploads), "an upload is refused")
            assert running.bodies.n_bytes <= LIMIT_MIB * MIB
            for client in clients:
                client.shutdown(socket.SHUT_RDWR)
