"""Responses to clients: headers, readiness, broken and unread responses."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conversation import endless_stream
from fake_upstream import Exchange, FakeUpstream, answer_ok, chunked, fake_upstream, response
from harness import (
    TIMEOUT_S,
    RunningProxy,
    ask,
    llama_server,
    proxy,
    server_binary,
    until,
    unused_port,
)
from tap import tap
from tenant_keys import KEYS, proxy_with_keys, write_keys

from evoke_proxy.engine.admin.admin import Admin
from evoke_proxy.engine.server.reply import ReplyReader
from evoke_proxy.errors import Forbidden
from evoke_proxy.web.operator_access import OperatorAccess

JSON = {"Content-Type": "application/json"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello there."}], "max_tokens": 4}
ENDLESS = CHAT | {"max_tokens": 7000, "ignore_eos": True, "stream": True}


def _bearer(name: str) -> dict[str, str]:
    return {**JSON, "Authorization": f"Bearer {KEYS[name]}", "X-Conversation-Id": "the same"}


def _begin(port: int, name: str) -> socket.socket:
    """Start an endless stream of a tenant; returns its connection once data has arrived."""
    body = json.dumps(ENDLESS).encode()
    lines = [f"{key}: {value}" for key, value in _bearer(name).items()]
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: a", *lines, f"Content-Length: {len(body)}"]
    client = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    client.sendall("\r\n".join([*head, "", ""]).encode() + body)
    assert b" 200 OK" in client.recv(1000)
    return client


def _reached_its_limit(stream: socket.socket) -> bool:
    """Whether a stream has ended because it has all of its tokens: on a slow machine it may."""
    received = b""
    stream.settimeout(1.0)
    with contextlib.suppress(TimeoutError):
        while piece := stream.recv(1 << 16):
            received += piece
    return b'"finish_reason":"length"' in received and b"data: [DONE]" in received


def _busy(port: int) -> list[bool]:
    slots = json.loads(ask(port, "GET", "/slots").body)
    return [bool(slot["is_processing"]) for slot in slots]


def test_tenants_with_the_same_conversation_id_do_not_end_each_others_streams(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        binary = server_binary(patched=False)
        port = stack.enter_context(llama_server(binary, "-np", "2", "--slots"))
        running = stack.enter_context(proxy_with_keys(port, tmp_path))
        alice = _begin(running.port, "alice")
        body = json.dumps(CHAT).encode()
        answer = ask(running.port, "POST", "/v1/chat/completions", body, _bearer("bob"))
        assert answer.status == 200
        stack.enter_context(_begin(running.port, "bob"))
        is_running = _busy(port) == [True, True]
        assert is_running or _reached_its_limit(alice), "the stream of alice was stopped"
        # A client that disconnects releases its slot at once, whatever its conversation id.
        alice.close()
        until(lambda: _busy(port).count(True) <= 1, limit_s=20)


def test_only_the_headers_that_llama_server_reads_are_forwarded_with_keys(tmp_path: Path) -> None:
    with fake_upstream(answer_ok) as fake, proxy_with_keys(fake.port, tmp_path) as running:
        extra = {"X-Anything": "1", "Cookie": "a=b", "X-Evoke-Session": "s", "User-Agent": "tests"}
        for path in ("/v1/chat/completions", "/tokenize"):
            body = json.dumps(CHAT).encode()
            assert ask(running.port, "POST", path, body, _bearer("alice") | extra).status == 200
        for request in fake.requests:
            lines = request.head.split(b"\r\n")[1:-2]
            names = {line.partition(b":")[0].decode().lower() for line in lines}
            assert names == {"host", "content-type", "content-length", "user-agent"}
        assert len(fake.requests) == 2


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ("localhost", "http://evil.example", None),
        ("localhost", "http://localhost:3000", "http://localhost:3000"),
        ("https://good.example", "http://evil.example", "https://good.example"),
    ],
)
def test_a_waiting_stream_sends_the_cors_headers_of_llama_server(
    origins: str, origin: str, allowed: str | None
) -> None:
    options = ["-np", "1", "--evoke-ram", "64", "--cors-origins", origins]
    with ExitStack() as stack:
        port = stack.enter_context(llama_server(server_binary(patched=True), *options))
        running = stack.enter_context(proxy(port, limits__keepalive_s=0.05))
        body = json.dumps(CHAT | {"stream": True}).encode()

        def post() -> tuple[bool, str | None]:
            headers = JSON | {"Origin": origin}
            answer = ask(running.port, "POST", "/v1/chat/completions", body, headers)
            waited = answer.body.startswith(b": waiting")
            return waited, answer.headers.get("access-control-allow-origin")

        direct = ask(port, "POST", "/v1/chat/completions", body, JSON | {"Origin": origin})
        assert direct.headers.get("access-control-allow-origin") == allowed
        assert post()[1] == allowed, "not the header of llama-server"
        with endless_stream(running.port) as stream, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(post)
            until(lambda: running.gateway.server.slots.pool.queued)
            time.sleep(0.3)
            stream.disconnect()
            assert waiting.result() == (True, allowed)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nX-Odd: a\x01b\r\n",
        b"HTTP/1.1 200 OK\r\nX-Odd: a\x0bb\r\n",
        b"HTTP/1.1 200 O\x01K\r\n",
    ],
    ids=["value", "vertical tab", "reason"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/x"])
def test_a_control_character_in_a_reply_counts_as_an_upstream_error(head: bytes, path: str) -> None:
    async def send_control_character(exchange: Exchange) -> None:
        await exchange.send(head + b"Content-Length: 2\r\n\r\nok")

    with fake_upstream(send_control_character) as fake, proxy(fake.port) as running:
        answer = ask(running.port, "POST", path, json.dumps(CHAT).encode(), JSON)
        assert answer.status == 502
        assert json.loads(answer.body)["error"]["code"] == "upstream_protocol"
        assert str(fake.port).encode() not in answer.body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/x", "/health"])
def test_a_503_has_retry_after_and_hides_the_upstream_address(
    path: str,
) -> None:
    port = unused_port()
    with proxy(port) as running:
        method = "GET" if path == "/health" else "POST"
        answer = ask(running.port, method, path, json.dumps(CHAT).encode(), JSON)
        assert answer.status == 503 and int(answer.headers["retry-after"]) > 0
        assert str(port).encode() not in answer.body and b"127.0.0.1" not in answer.body
        metrics = ask(running.port, "GET", "/metrics").body
        assert b"127.0.0.1" not in metrics.partition(b"# HELP")[0]


def test_the_metrics_response_has_the_headers_of_llama_server(
    stock_port: int, stock_proxy: RunningProxy
) -> None:
    direct = ask(stock_port, "GET", "/metrics")
    proxied = ask(stock_proxy.port, "GET", "/metrics")
    name = "process-start-time-unix"
    assert direct.headers[name] == proxied.headers[name]
    assert b"llamacpp:" in proxied.body and b"evoke_build_info" in proxied.body


def test_readiness_names_the_failed_check_to_clients_and_its_cause_to_operators(
    echo: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_at: list[float] = []

    def refuse(*_: object) -> None:
        raise Forbidden("the admin's address is another one")

    with proxy(echo.port) as running:
        ready = json.loads(ask(running.port, "GET", "/evoke/ready").body)
        assert str(echo.port) in ready["checks"]["upstream"]["detail"]
        checks = running.gateway.checks

        async def recording_checks() -> Any:
            checked_at.append(time.monotonic())
            return await checks()

        running.gateway.checks = recording_checks  # type: ignore[method-assign]
        monkeypatch.setattr(OperatorAccess, "admit", refuse)
        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(running.port, "GET", "/evoke/ready"), range(64)))
        took_s = time.monotonic() - began
    for answer in answers:
        assert answer.status == 200 and str(echo.port).encode() not in answer.body
        assert json.loads(answer.body).keys() == {"status", "failed", "reasons", "mode"}
    assert 1 <= len(checked_at) <= 1 + took_s, "more than one check a second"


@pytest.mark.parametrize(
    ("path", "with_keys"),
    [("/v1/models", True), ("/evoke/sessions/none", False), ("/evoke/", False), ("/x", False)],
    ids=["401", "404", "page", "relayed"],
)
def test_a_client_that_reads_no_answers_is_disconnected(
    tmp_path: Path, path: str, with_keys: bool
) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send(small)

    small = response(b"x" * 4096)  # fills the buffers of the connection within a second
    settings: dict[str, Any] = {"limits__idle_timeout_s": 0.5, "limits__connections": 1}
    if with_keys:
        write_keys(tmp_path / "keys")
        settings["security__keys_file"] = str(tmp_path / "keys")
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() * 200
    with fake_upstream(answer) as fake, proxy(fake.port, **settings) as running:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", running.port))
            client.settimeout(0.2)
            deadline = time.monotonic() + TIMEOUT_S
            with pytest.raises(ConnectionError):
                while True:
                    assert time.monotonic() < deadline, "the connection stays open"
                    with contextlib.suppress(TimeoutError):
                        client.sendall(request)
            # The connection no longer counts before the client closes it.
            until(lambda: ask(running.port, "GET", "/evoke/health").status == 200)
        assert running.metric("evoke_clients_dropped_total", reason="slow_reader") == 1


def test_a_client_that_does_not_read_its_last_answer_is_disconnected(echo: FakeUpstream) -> None:
    """The proxy has already closed its side, and waits for the client to read the response."""
    settings: dict[str, Any] = {"limits__idle_timeout_s": 0.5, "limits__connections": 1}
    large = response(b"x" * (12 << 20))

    async def send_large(exchange: Exchange) -> None:
        await exchange.send(large)

    with fake_upstream(send_large) as fake, proxy(fake.port, **settings) as running:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", running.port))
            client.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            until(lambda: ask(running.port, "GET", "/evoke/health").status == 200)
        assert running.metric("evoke_clients_dropped_total", reason="slow_reader") == 1


def _exchange_raw(port: int, sent: bytes) -> bytes:
    """Send bytes; returns what is received until the connection ends in any way."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        client.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(65536):
                received += piece
    return received


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_error_within_a_relayed_answer_closes_the_connection(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client must not receive a second head in the body, and must see the body end early."""

    async def send_large(exchange: Exchange) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        await exchange.send(head + b"Transfer-Encoding: chunked\r\n\r\n")
        await exchange.send(*[chunked(b"data: {}\n\n")] * 4, b"0\r\n\r\n", pause_s=0.05)

    chunks: list[bytes] = []

    def fail(_: object, data: bytes) -> None:
        chunks.append(data)
        if len(chunks) > 2:
            raise RuntimeError("a defect")

    monkeypatch.setattr(ReplyReader, "feed", fail)
    with fake_upstream(send_large) as fake, proxy(fake.port) as running:
        body = json.dumps(CHAT | {"stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: a\r\n"
        framing = f"Content-Length: {len(body)}\r\n\r\n"
        received = _exchange_raw(running.port, (head + framing).encode() + body)
    assert received.count(b"data: {}") == 2 and received.count(b"HTTP/1.") == 1
    assert b"error" not in received and not received.endswith(b"0\r\n\r\n")


def test_a_failure_within_an_export_closes_the_connection(
    echo: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * 100_000
        raise OSError("the disk is gone")

    async def export(*_: object) -> Iterator[bytes]:
        return pieces()

    with proxy(echo.port) as running:
        monkeypatch.setattr(Admin, "export", export)
        request = b"GET /evoke/sessions/s/export HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        received = _exchange_raw(running.port, request)
    assert received.count(b"HTTP/1.") == 1 and b"error" not in received
    assert not received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("path", ["/x", "/v1/chat/completions"])
@pytest.mark.parametrize("end", [b"zz\r\n", b""], ids=["malformed", "hang-up"])
def test_an_incomplete_request_body_is_no_upstream_error(
    echo: FakeUpstream, path: str, end: bytes
) -> None:
    """Otherwise a client could make the proxy treat a healthy server as broken."""
    with tap(echo.port) as recorder, proxy(recorder.port) as running:
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", running.port), TIMEOUT_S) as client:
            client.sendall(head.encode() + b'4\r\n{"a"\r\n')
            if path == "/x":  # the first part of the body has been forwarded
                until(lambda: any(b"POST /x" in data for data in recorder.sent))
            client.sendall(end)
            if end:
                received = b""
                while piece := client.recv(1000):
                    received += piece
                assert received.split()[1] == b"400" and received.count(b"HTTP/1.") == 1
        running.wait_until_idle()
        for kind in ("upstream_unavailable", "upstream_protocol", "upstream_timeout"):
            assert running.metric("evoke_upstream_errors_total", kind=kind) == 0
