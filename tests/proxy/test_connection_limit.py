"""Limits on clients with many connections, slow request heads or unread event streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import time

import pytest
from fake_upstream import FakeUpstream
from harness import TIMEOUT_S, RunningProxy, ask, proxy, until

from evoke_proxy.web import connection_limit
from evoke_proxy.web.connection_limit import raise_file_limit

DROPPED = "evoke_clients_dropped_total"


def _open(port: int, buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.settimeout(TIMEOUT_S)
    client.connect(("127.0.0.1", port))
    return client


def test_a_connection_above_the_limit_is_refused_and_the_others_continue(
    echo: FakeUpstream,
) -> None:
    with proxy(echo.port, limits__connections=3) as running, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(_open(running.port)) for _ in range(3)]
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"):
            with _open(running.port) as extra:
                extra.sendall(sent)
                head, _, body = b"".join(iter(lambda: extra.recv(4096), b"")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 5" in head
            error = json.loads(body)["error"]
            assert "limits.connections" in error["message"]
            assert error["code"] == "capacity_exceeded"
        assert running.metric(DROPPED, reason="connections") == 2 and echo.requests == []
        for client in connections:
            client.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        connections[0].close()
        until(lambda: ask(running.port, "GET", "/x").status == 200)
        assert len(echo.requests) >= 4


def test_a_flood_of_connections_is_closed_and_open_connections_continue(
    echo: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No refused connection times out before all are open.
    monkeypatch.setattr(connection_limit, "_REFUSAL_S", TIMEOUT_S)
    with proxy(echo.port, limits__connections=2) as running, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(_open(running.port)) for _ in range(2)]
        flood = [stack.enter_context(_open(running.port)) for _ in range(150)]
        responses = [b""] * len(flood)
        for number, client in enumerate(flood):
            with contextlib.suppress(ConnectionResetError):
                while part := client.recv(4096):
                    responses[number] += part
        n_answered = sum(response.startswith(b"HTTP/1.1 503 ") for response in responses)
        assert n_answered == 64, "only this many refused connections are answered"
        assert running.metric(DROPPED, reason="connections") == 150
        connections[1].sendall(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connections[1].recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_refused_client_that_has_disconnected_is_no_failure(
    echo: FakeUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    with proxy(echo.port, limits__connections=1) as running, _open(running.port) as first:
        assert _answer_on(first).startswith(b"HTTP/1.1 200 ")
        running.loop.call_soon_threadsafe(time.sleep, 0.3)  # it accepts the connection afterwards
        time.sleep(0.1)
        _open(running.port).close()
        until(lambda: running.metric(DROPPED, reason="connections") == 1)
        assert _answer_on(first).startswith(b"HTTP/1.1 200 ")
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def _answer_on(client: socket.socket) -> bytes:
    """Send a request; returns its complete response, whose body is `ok`."""
    client.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
    answer = b""
    while not answer.endswith(b"\r\n\r\nok"):
        part = client.recv(4096)
        assert part, answer
        answer += part
    return answer


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo"], ids=["nothing", "half a head"])
def test_a_new_connection_displaces_one_of_the_address_with_the_most_connections(
    echo: FakeUpstream, sent: bytes
) -> None:
    with proxy(echo.port, limits__connections=8) as running, contextlib.ExitStack() as stack:
        many = [stack.enter_context(_open(running.port)) for _ in range(8)]
        for client in many:
            client.sendall(sent)
        other = stack.enter_context(socket.socket())
        other.settimeout(TIMEOUT_S)
        other.bind(("127.0.0.2", 0))
        other.connect(("127.0.0.1", running.port))
        assert _answer_on(other).startswith(b"HTTP/1.1 200 ")
        # It displaced the oldest one. Another connection of the first address displaces none.
        with contextlib.suppress(ConnectionResetError):
            assert many[0].recv(100) == b""
        with _open(running.port) as extra:
            assert extra.recv(100).startswith(b"HTTP/1.1 503 ")
        assert running.metric(DROPPED, reason="connections") == 2
        assert _answer_on(other).startswith(b"HTTP/1.1 200 ")


SLOW = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{"


def _is_closed(client: socket.socket) -> bool:
    """Whether the proxy closes a connection without an answer."""
    with contextlib.suppress(ConnectionResetError):
        return client.recv(100) == b""
    return True


def test_slow_bodies_of_one_address_leave_connections_to_another(echo: FakeUpstream) -> None:
    with proxy(echo.port, limits__connections=8) as running, contextlib.ExitStack() as stack:
        many = [stack.enter_context(_open(running.port)) for _ in range(8)]
        for number, client in enumerate(many, 1):
            client.sendall(SLOW)
            until(lambda n=number: running.gateway.metrics.in_flight._value.get() == n)  # type: ignore[misc]
        other = stack.enter_context(socket.socket())
        other.settimeout(TIMEOUT_S)
        other.bind(("127.0.0.2", 0))
        other.connect(("127.0.0.1", running.port))
        assert _answer_on(other).startswith(b"HTTP/1.1 200 ")
        assert _is_closed(many[0])
        # These bodies are not slow yet, so another connection of their address displaces none.
        with _open(running.port) as extra:
            assert extra.recv(100).startswith(b"HTTP/1.1 503 ")
        many[1].sendall(b" " * 998 + b"}")
        assert many[1].recv(4096).startswith(b"HTTP/1.1 ")


def test_a_body_that_is_slow_for_long_is_displaced_by_its_own_address(
    echo: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limit, "_SLOW_BODY_S", 0.2)
    with proxy(echo.port, limits__connections=2) as running, contextlib.ExitStack() as stack:
        slow, idle = (stack.enter_context(_open(running.port)) for _ in range(2))
        slow.sendall(SLOW)
        until(lambda: running.gateway.metrics.in_flight._value.get() == 1)
        time.sleep(0.3)
        assert _answer_on(stack.enter_context(_open(running.port))).startswith(b"HTTP/1.1 200 ")
        assert _is_closed(slow)
        with _open(running.port) as extra:  # an idle one of the same address is not displaced
            assert extra.recv(100).startswith(b"HTTP/1.1 503 ")
        assert _answer_on(idle).startswith(b"HTTP/1.1 200 ")


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
    """The time limit applies to the whole head, not to each part of it."""
    with proxy(echo.port, limits__idle_timeout_s=0.4) as running, _open(running.port) as client:
        client.sendall(b"GET /x HTTP/1.1\r\nHost: ")
        with pytest.raises(OSError):
            until(lambda: client.sendall(b"a"))
        assert echo.requests == []


@pytest.mark.parametrize("idle_timeout_s", [60.0, 0.3], ids=["events", "time"])
def test_an_admin_page_that_does_not_read_is_disconnected_and_others_get_all_events(
    idle_timeout_s: float,
) -> None:
    """It is disconnected when too many events wait for it, or when it has not read for too long."""
    with proxy(1, limits__idle_timeout_s=idle_timeout_s) as running:
        with (
            _open(running.port, 4096) as slow,
            _open(running.port) as fast,
            fast.makefile("rb") as lines,
        ):
            for client in (slow, fast):
                client.sendall(b"GET /evoke/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            until(lambda: len(running.gateway.feed) == 2)
            n_published = n_received = 0
            while len(running.gateway.feed) == 2:
                assert n_published < 4000, "the slow page was not disconnected"
                n_published = _publish_large_event(running)
                while n_received < n_published:
                    n_received += lines.readline() == b"event: turn\n"
            assert running.metric(DROPPED, reason="slow_reader") == 1
            with contextlib.suppress(ConnectionResetError):
                while slow.recv(1 << 20):
                    pass
        until(lambda: len(running.gateway.feed) == 0)


def _publish_large_event(running: RunningProxy) -> int:
    """Publish an event that fills buffers quickly; returns the number of events so far."""
    spans = [[0, 10**9]] * 1500

    async def publish() -> int:
        running.gateway.feed.publish("turn", spans=spans)
        return running.gateway.feed.latest

    return asyncio.run_coroutine_threadsafe(publish(), running.loop).result(TIMEOUT_S)


def test_bodies_in_small_chunks_of_one_address_leave_connections_to_another(
    echo: FakeUpstream,
) -> None:
    """Connections whose bytes wait to be parsed are displaced like those with slow bodies."""
    head = SLOW.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked")[:-1]
    with proxy(echo.port, limits__connections=8) as running, contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.socket())
        other.settimeout(TIMEOUT_S)
        other.bind(("127.0.0.2", 0))
        many = [stack.enter_context(_open(running.port)) for _ in range(8)]
        for number, client in enumerate(many, 1):
            client.sendall(head)
            until(lambda n=number: running.gateway.metrics.in_flight._value.get() == n)  # type: ignore[misc]
        # 64 bytes a chunk are not refused; they are parsed for longer than it takes to connect.
        running.loop.call_soon_threadsafe(time.sleep, 0.3)
        for client in many:
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.send((b"40\r\n" + b" " * 64 + b"\r\n") * 30_000)
        other.connect(("127.0.0.1", running.port))
        assert _answer_on(other).startswith(b"HTTP/1.1 200 ")
