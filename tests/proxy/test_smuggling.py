"""Requests sent over raw sockets cannot smuggle a second one past the proxy to llama-server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from fake_upstream import Exchange, fake_upstream, response
from harness import (
    TIMEOUT_S,
    ThreadedLoop,
    ask,
    llama_server,
    proxy,
    server_binary,
    until,
)
from smuggled_requests import (
    FRAMING_NAMES,
    HEAD_NAMES,
    AttackedProxy,
    ambiguous_requests,
    read_answer,
    unparsable_heads,
)
from tap import tap
from tenant_keys import KEYS, write_keys

JSON = {"Content-Type": "application/json"}
ALICE = KEYS["alice"]
UPSTREAM_KEY = "key-that-only-the-proxy-has"


@pytest.fixture(scope="module", params=["with --api-key", "without"])
def attacked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AttackedProxy]:
    options = ["-np", "1", "--slots", "--metrics"]
    settings = {}
    if has_key := request.param == "with --api-key":
        options += ["--api-key", UPSTREAM_KEY]
        path = tmp_path_factory.mktemp("secrets") / "keys"
        write_keys(path, ["alice"])
        settings = {"security__keys_file": str(path), "upstream__api_key": UPSTREAM_KEY}
    with ExitStack() as stack:
        port = stack.enter_context(llama_server(server_binary(patched=False), *options))
        recorder = stack.enter_context(tap(port))
        running = stack.enter_context(proxy(recorder.port, **settings))
        yield AttackedProxy(running, recorder, ALICE if has_key else "")


@pytest.mark.parametrize("name", HEAD_NAMES)
def test_a_head_that_llama_server_cannot_parse_is_not_forwarded(
    attacked: AttackedProxy, name: str
) -> None:
    """The connection has carried a valid request before, and its upstream connection is open."""
    attack, statuses = unparsable_heads(attacked)[name]
    with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
        client.sendall(attacked.request("GET /props HTTP/1.1", ()))
        assert read_answer(client)[0] == 200
        n_connections = len(attacked.tap.sent)
        n_sent, n_answered = attacked.tap.n_sent, len(attacked.tap.statuses)
        client.sendall(attack)
        status, body = read_answer(client)
    assert status in statuses, body
    assert "message" in json.loads(body)["error"]
    # Nothing was forwarded, and the next request gets its own answer.
    assert attacked.tap.n_sent == n_sent
    with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
        client.sendall(attacked.request("GET /v1/models HTTP/1.1", ()))
        status, body = read_answer(client)
        assert status == 200 and json.loads(body)["object"] == "list"
    assert len(attacked.tap.statuses) == n_answered + 1
    assert len(attacked.tap.statuses) == attacked.forwarded
    assert b"/slots" not in b"".join(attacked.tap.sent[n_connections:])


@pytest.mark.parametrize("name", FRAMING_NAMES)
def test_a_body_cannot_smuggle_a_second_request(attacked: AttackedProxy, name: str) -> None:
    """llama-server answers as many requests as the proxy sends; each client gets its own answer."""
    with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
        client.sendall(ambiguous_requests(attacked)[name])
        with contextlib.suppress(TimeoutError):
            client.settimeout(0.3)
            while client.recv(1 << 16):
                pass
    with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
        client.sendall(attacked.request("GET /v1/models HTTP/1.1", ()))
        status, body = read_answer(client)
        assert status == 200 and json.loads(body)["object"] == "list"
    until(lambda: len(attacked.tap.statuses) >= attacked.forwarded)
    assert len(attacked.tap.statuses) == attacked.forwarded


def test_a_health_request_is_not_forwarded_with_its_headers_or_body(
    attacked: AttackedProxy,
) -> None:
    n_sent = len(b"".join(attacked.tap.sent))
    lines = ("X-Secret: s3cret", "Content-Length: 6", "X-Conversation-Id: 7")
    with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
        client.sendall(attacked.request("GET /health HTTP/1.1", lines, "s3cret"))
        assert read_answer(client) == (200, b'{"status":"ok"}')
    forwarded = b"".join(attacked.tap.sent)
    assert len(forwarded) > n_sent
    assert b"s3cret" not in forwarded and b"X-Conversation-Id" not in forwarded
    origin = {"Origin": "http://a.example:3000"}
    direct = ask(attacked.tap.server, "GET", "/health", headers=origin).headers
    allowed = ask(attacked.port, "GET", "/health", headers=origin).headers
    name = "access-control-allow-origin"
    assert allowed[name] == direct[name], "not the header of llama-server"
    long_origin = {"Origin": f"http://{'o' * 300}.example"}
    assert ask(attacked.port, "GET", "/health", headers=long_origin).status == 200
    assert b"ooo" not in b"".join(attacked.tap.sent)
    for path in ("/health", "/v1/health"):
        for method, status in (("HEAD", 200), ("OPTIONS", 200), ("POST", 405), ("DELETE", 405)):
            answer = ask(attacked.port, method, path)
            assert answer.status == status, (method, path)
            assert (answer.headers.get("allow") is not None) == (status == 405)


def test_llama_server_parses_the_largest_accepted_head(
    attacked: AttackedProxy,
) -> None:
    """A target and a header line of 8,000 bytes, and 90 headers."""
    n_own = 3 if attacked.key else 2  # Host, Content-Length and Authorization
    lines = tuple(f"X-{number}: 1" for number in range(90 - n_own - 2))
    longest = f"User-Agent: {'u' * (8000 - len('User-Agent: '))}"
    target = "/tokenize?" + "q" * (8000 - len("/tokenize?"))
    body = ("Content-Length: 15", longest, *lines)
    with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
        client.sendall(attacked.request(f"POST {target} HTTP/1.1", body, '{"content":"a"}'))
        status, answer = read_answer(client)
        assert status == 200 and json.loads(answer)["tokens"], answer
    for extra, status in ((f"X-L: {'x' * 7996}", 431), ("X-1: 1\r\nX-2: 2\r\nX-3: 3", 431)):
        with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
            client.sendall(attacked.request("POST /tokenize HTTP/1.1", (*body, extra)))
            assert read_answer(client)[0] == status


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_refused_head_is_answered_in_the_dialect_of_its_path(
    attacked: AttackedProxy, path: str
) -> None:
    with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
        client.sendall(attacked.request(f"POST {path} HTTP/1.1", (f"X: {'x' * 9000}",)))
        status, body = read_answer(client)
    error = json.loads(body)
    assert status == 431 and ("type" in error) == (path == "/v1/messages")


def test_an_upstream_connection_is_not_reused_after_an_error() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.send(response(b"no", status=b"404 Not Found"))

    with fake_upstream(refuse) as fake, tap(fake.port) as recorder, proxy(recorder.port) as running:
        for _ in range(3):
            assert ask(running.port, "POST", "/x", b"{}").status == 404
        until(lambda: fake.lost >= 3)
        counts = [data.count(b"POST /x") for data in recorder.sent]
    assert [count for count in counts if count] == [1, 1, 1]


@pytest.mark.parametrize("status", [b"200 OK", b"413 Payload Too Large"])
def test_an_upstream_connection_is_not_reused_when_the_reply_precedes_the_body(
    status: bytes,
) -> None:
    """The server answers the head and reads the body later; the body must not become a request."""
    read_bodies = asyncio.Event()
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"POST /x" not in head:
            writer.write(response(b'{"total_slots":1}', b"application/json"))
        else:
            writer.write(response(b"early", status=status))
            await read_bodies.wait()
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(1 << 20):
                    head += piece
            requests.append(head)
        writer.close()

    with ThreadedLoop() as thread:
        starting = asyncio.start_server(serve, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(starting, thread.loop).result(TIMEOUT_S)
        with proxy(server.sockets[0].getsockname()[1]) as running:
            answer = ask(running.port, "POST", "/x", b"x" * (32 << 20))
            assert answer.status == int(status.split()[0])
            assert ask(running.port, "POST", "/x", b"{}").status == answer.status
            thread.loop.call_soon_threadsafe(read_bodies.set)
            until(lambda: len(requests) == 2)
        thread.loop.call_soon_threadsafe(server.close)
    assert [data.count(b"HTTP/1.1") for data in requests] == [1, 1]
    assert min(map(len, requests)) < 1000 < max(map(len, requests)) < 32 << 20
