"""Clients with too many connections, slow requests or unread streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket

import pytest
from fake_upstream import FakeUpstream
from harness import PATIENCE_S, RunningProxy, ask, proxy, until

from evoke_proxy.web import connection_limit
from evoke_proxy.web.connection_limit import raise_file_limit

DROPPED = "evoke_clients_dropped_total"


def _open(port: int, buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.settimeout(PATIENCE_S)
    client.connect(("127.0.0.1", port))
    return client


def test_a_connection_above_the_limit_is_refused_and_the_others_continue(
    echo: FakeUpstream,
) -> None:
    with proxy(echo.port, limits__connections=3) as running, contextlib.ExitStack() as stack:
        held = [stack.enter_context(_open(running.port)) for _ in range(3)]
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"):
            with _open(running.port) as extra:
                extra.sendall(sent)
                head, _, body = b"".join(iter(lambda: extra.recv(4096), b"")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 5" in head
            error = json.loads(body)["error"]
            assert "limits.connections" in error["message"]
            assert error["code"] == "capacity_exceeded"
        assert running.metric(DROPPED, reason="connections") == 2 and echo.requests == []
        for client in held:
            client.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        held[0].close()
        until(lambda: ask(running.port, "GET", "/x").status == 200)
        assert len(echo.requests) >= 4


def test_a_flood_of_connections_is_closed_without_harm_to_others(
    echo: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        connection_limit, "_REFUSAL_S", PATIENCE_S
    )  # nobody's time is over before all are here
    with proxy(echo.port, limits__connections=2) as running, contextlib.ExitStack() as stack:
        held = [stack.enter_context(_open(running.port)) for _ in range(2)]
        flood = [stack.enter_context(_open(running.port)) for _ in range(150)]
        said = [b""] * len(flood)
        for number, client in enumerate(flood):
            with contextlib.suppress(ConnectionResetError):
                while part := client.recv(4096):
                    said[number] += part
        told = sum(words.startswith(b"HTTP/1.1 503 ") for words in said)
        assert told == 64, "who floods is not answered for ever"
        assert running.metric(DROPPED, reason="connections") == 150
        held[1].sendall(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
        assert held[1].recv(4096).startswith(b"HTTP/1.1 200 ")


def _answer_on(client: socket.socket) -> bytes:
    """A whole answer of the upstream, whose body is `ok`."""
    client.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
    answer = b""
    while not answer.endswith(b"\r\n\r\nok"):
        part = client.recv(4096)
        assert part, answer
        answer += part
    return answer


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo"], ids=["nothing", "half a head"])
def test_a_new_connection_displaces_one_of_the_address_with_most(
    echo: FakeUpstream, sent: bytes
) -> None:
    with proxy(echo.port, limits__connections=8) as running, contextlib.ExitStack() as stack:
        many = [stack.enter_context(_open(running.port)) for _ in range(8)]
        for client in many:
            client.sendall(sent)
        other = stack.enter_context(socket.socket())
        other.settimeout(PATIENCE_S)
        other.bind(("127.0.0.2", 0))
        other.connect(("127.0.0.1", running.port))
        assert _answer_on(other).startswith(b"HTTP/1.1 200 ")
        # The oldest was closed for it; one more of the first address displaces nobody.
        with contextlib.suppress(ConnectionResetError):
            assert many[0].recv(100) == b""
        with _open(running.port) as extra:
            assert extra.recv(100).startswith(b"HTTP/1.1 503 ")
        assert running.metric(DROPPED, reason="connections") == 2
        assert _answer_on(other).startswith(b"HTTP/1.1 200 ")


def test_the_limit_on_open_files_suffices_for_the_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        assert raise_file_limit(10) == 512
        assert raise_file_limit(300) == 856 == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raise_file_limit(before[1]) == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_slow_request_head_has_the_same_time_limit(echo: FakeUpstream) -> None:
    with proxy(echo.port, limits__idle_timeout_s=0.4) as running, _open(running.port) as client:
        client.sendall(b"GET /x HTTP/1.1\r\nHost: ")
        # Were each drop given its time, it would go on for longer than anybody waits here.
        with pytest.raises(OSError):
            until(lambda: client.sendall(b"a"))
        assert echo.requests == []


@pytest.mark.parametrize("patience_s", [60.0, 0.3], ids=["events", "time"])
def test_an_admin_page_that_does_not_read_is_disconnected_and_others_get_all_events(
    patience_s: float,
) -> None:
    """By how far it is behind, or by how long it has not read."""
    with proxy(1, limits__write_timeout_s=patience_s) as running:
        with (
            _open(running.port, 4096) as slow,
            _open(running.port) as quick,
            quick.makefile("rb") as lines,
        ):
            for client in (slow, quick):
                client.sendall(b"GET /evoke/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            until(lambda: len(running.engine.feed) == 2)
            told = heard = 0
            while len(running.engine.feed) == 2:
                assert told < 4000, "it is never cut off"
                told = _publish_large_event(running)
                while heard < told:
                    heard += lines.readline() == b"event: turn\n"
            assert running.metric(DROPPED, reason="slow_reader") == 1
            with contextlib.suppress(ConnectionResetError):
                while slow.recv(1 << 20):
                    pass
        until(lambda: len(running.engine.feed) == 0)


def _publish_large_event(running: RunningProxy) -> int:
    """Another event, so long that buffers on the way do not take many; how many there were."""
    spans = [[0, 10**9]] * 1500

    async def tell() -> int:
        running.engine.feed.publish("turn", spans=spans)
        return running.engine.feed.latest

    return asyncio.run_coroutine_threadsafe(tell(), running.loop).result(PATIENCE_S)
