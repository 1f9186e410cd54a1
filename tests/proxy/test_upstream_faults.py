"""What clients receive from a server that fails, or answers in an unusual way."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
import threading
import time

import pytest
from fake_upstream import Exchange, chunked, fake_upstream, response
from harness import TIMEOUT_S, ask, proxy, until, unused_port

JSON = {"Content-Type": "application/json"}
CHAT = b'{"messages":[{"role":"user","content":"hi"}]}'
# Measured: 1 to 9 ms; the rest allows for a busy machine.
AT_ONCE_S = 1.0
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


async def _echo(exchange: Exchange) -> None:
    await exchange.send(response(exchange.head + exchange.body))


def test_a_refused_connection_is_answered_503_with_advice() -> None:
    with proxy(unused_port()) as running:
        answer = ask(running.port, "POST", "/v1/chat/completions", CHAT, JSON)
        assert answer.status == 503
        error = json.loads(answer.body)["error"]
        assert error["code"] == "upstream_unavailable"
        assert error["type"] == "unavailable_error"
        assert error["param"] is None
        assert "or point --upstream" in error["message"]
        assert "127.0.0.1" not in error["message"], (
            "clients may not see the address of llama-server"
        )
        assert answer.headers["retry-after"] == "5"
        assert running.metric("evoke_upstream_errors_total", kind="upstream_unavailable") >= 1
        labels = {"endpoint": "/v1/chat/completions", "code": "503"}
        assert running.metric("evoke_requests_total", **labels) == 1


def test_upstream_sockets_have_the_options_that_detect_a_lost_host() -> None:
    """TCP keep-alive detects a lost host within 30 s, as tried by hand on a cut link.

    There is no TCP_USER_TIMEOUT, because a server may take longer to read a large body.
    """
    socket_options: list[tuple[int, ...]] = []

    async def behave(exchange: Exchange) -> None:
        connector = running.gateway.upstream._transport._session.connector  # type: ignore[union-attr]
        for protocol in connector._acquired:  # type: ignore[union-attr]
            upstream = protocol.transport.get_extra_info("socket")
            values = [upstream.getsockopt(socket.IPPROTO_TCP, option) for option in options]
            socket_options.append(
                (upstream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *values)
            )
        await exchange.send(response(b"ok"))

    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    options += (socket.TCP_USER_TIMEOUT,)
    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        assert ask(running.port, "GET", "/x").status == 200
    assert socket_options == [(1, 10, 5, 4, 0)]


def test_errors_on_anthropic_paths_have_the_anthropic_format() -> None:
    with proxy(unused_port()) as running:
        answer = ask(running.port, "POST", "/v1/messages", CHAT, JSON)
    assert answer.status == 503
    body = json.loads(answer.body)
    assert body["type"] == "error"
    assert body["error"]["type"] == "overloaded_error"
    assert set(body["error"]) == {"type", "message"}


@pytest.mark.parametrize(
    ("reply", "status", "code"),
    [
        (b"", 503, "upstream_unavailable"),
        (b"HTTP/1.1 200", 503, "upstream_unavailable"),
        (b"this is not HTTP\r\n\r\n", 502, "upstream_protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", 502, "upstream_protocol"),
    ],
)
def test_a_closed_connection_is_answered_503_and_invalid_http_502(
    reply: bytes, status: int, code: str
) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.send(reply)
        exchange.writer.close()

    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        answer = ask(running.port, "POST", "/v1/chat/completions", CHAT, JSON)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (status, code)


def test_a_client_can_detect_an_answer_that_breaks_off() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD, chunked(b"data: 1\n\n"), pause_s=0.05)
        exchange.writer.close()

    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        with pytest.raises(http.client.IncompleteRead) as broken:
            _read_all(running.port)
        assert broken.value.partial in (b"", b"data: 1\n\n")
        assert running.metric("evoke_upstream_errors_total", kind="upstream_unavailable") == 1


def _read_all(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", CHAT, JSON)
    try:
        return connection.getresponse().read()
    finally:
        connection.close()


def test_errors_of_the_server_are_forwarded_unchanged() -> None:
    body = b'{"error":{"code":418,"message":"short and stout","type":"odd"}}'

    async def behave(exchange: Exchange) -> None:
        await exchange.send(response(body, b"application/json; charset=utf-8", b"418 I'm a teapot"))

    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        answer = ask(running.port, "POST", "/v1/chat/completions", CHAT, JSON)
    assert (answer.status, answer.reason, answer.body) == (418, "I'm a teapot", body)
    assert answer.headers["content-type"] == "application/json; charset=utf-8"


def test_the_connection_stays_usable_after_a_204_with_a_chunked_body() -> None:
    async def behave(exchange: Exchange) -> None:
        if b"/first" in exchange.head:
            await exchange.send(
                b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            )
        else:
            await exchange.send(response(b"second"))

    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port)
        connection.request("DELETE", "/first")
        first = connection.getresponse()
        assert (first.status, first.read()) == (204, b"")
        connection.request("GET", "/second")
        assert connection.getresponse().read() == b"second"
        connection.close()


def test_replies_to_head_and_304_replies_keep_their_headers() -> None:
    async def behave(exchange: Exchange) -> None:
        status = b"304 Not Modified" if b"GET" in exchange.head else b"200 OK"
        await exchange.send(b"HTTP/1.1 " + status + b"\r\nETag: x\r\nContent-Length: 7\r\n\r\n")

    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        for method, status in (("HEAD", 200), ("GET", 304)):
            answer = ask(running.port, method, "/thing")
            assert (answer.status, answer.headers["etag"], answer.body) == (status, "x", b"")
            assert "content-type" not in answer.headers


def test_replies_without_a_length_and_with_repeated_headers_are_forwarded() -> None:
    async def behave(exchange: Exchange) -> None:
        cookies = b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
        await exchange.send(b"HTTP/1.1 200 OK\r\n" + cookies + b"\r\n", b"until ", b"close")
        exchange.writer.close()

    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port)
        connection.request("GET", "/odd")
        answer = connection.getresponse()
        assert answer.read() == b"until close"
        assert answer.headers.get_all("Set-Cookie") == ["a=1", "b=2"]
        assert answer.headers.get_all("Server") is None
        connection.close()


def test_a_compressed_reply_is_forwarded_unchanged() -> None:
    compressed = gzip.compress(b"text " * 100)

    async def behave(exchange: Exchange) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
        await exchange.send(head % len(compressed) + compressed)

    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        answer = ask(running.port, "GET", "/", None, {"Accept-Encoding": "gzip"})
    assert answer.body == compressed
    assert answer.headers["content-encoding"] == "gzip"


def test_a_compressed_request_body_is_forwarded_unchanged() -> None:
    compressed = gzip.compress(b'{"content":"x"}')
    with fake_upstream(_echo) as fake, proxy(fake.port) as running:
        ask(running.port, "POST", "/tokenize", compressed, JSON | {"Content-Encoding": "gzip"})
        ask(running.port, "POST", "/v1/chat/completions", compressed, {"Content-Encoding": "gzip"})
        assert [request.body for request in fake.requests] == [compressed, compressed]


def test_an_http_1_0_client_gets_no_chunks() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD, chunked(b"one ", b"two"), b"0\r\n\r\n")

    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as client:
            client.sendall(b"GET /old HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"one two"
    assert b"chunked" not in head.lower()


def test_the_request_target_and_headers_are_forwarded_as_sent() -> None:
    target = "/A%2fb//c;d/../e?x=%20+&y=%C3%A4&z"
    with fake_upstream(_echo) as fake, proxy(fake.port) as running:
        ask(
            running.port,
            "GET",
            target,
            None,
            {"X-One": "a, b", "Connection": "X-Hop", "X-Hop": "1"},
        )
        head = fake.requests[0].head.decode()
    assert head.startswith(f"GET {target} HTTP/1.1\r\n")
    names = [line.split(":")[0].lower() for line in head.split("\r\n")[1:] if line]
    assert sorted(names) == ["host", "x-one"]


def test_a_stream_is_relayed_as_it_arrives() -> None:
    received = [threading.Event() for _ in range(3)]

    async def behave(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD, chunked(b": odd comment 0\n\n"))
        for number, event in enumerate(received, 1):
            await asyncio.to_thread(event.wait, TIMEOUT_S)
            await exchange.send(chunked(b": odd comment %d\n\n" % number))
        await exchange.send(b"0\r\n\r\n")

    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT_S / 2)
        connection.request("POST", "/v1/chat/completions", CHAT, JSON)
        answer = connection.getresponse()
        for number, event in enumerate(received):  # the next is sent once this one was received
            assert answer.read1() == b": odd comment %d\n\n" % number
            event.set()
        assert answer.read() == b": odd comment 3\n\n"
        connection.close()


def test_a_disconnecting_client_closes_the_upstream_request() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        while True:
            await exchange.send(chunked(b"data: x\n\n"), pause_s=0.05)

    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port)
        connection.request("POST", "/v1/chat/completions", CHAT, JSON)
        assert connection.getresponse().read1(5)
        assert connection.sock is None or connection.sock.shutdown(socket.SHUT_RDWR) is None
        connection.close()
        until(lambda: fake.lost)
        assert fake.lost == 1


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_disconnects_during_its_prompt_closes_the_upstream_request_at_once(
    stream: bytes,
) -> None:
    """llama-server can release the slot only then."""
    closed_at = list[float]()

    async def behave(exchange: Exchange) -> None:
        assert await exchange.reader.read() == b""  # nothing is answered while a prompt is decoded
        closed_at.append(time.monotonic())

    body = CHAT[:-1] + b',"stream":' + stream + b"}"
    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port)
        connection.request("POST", "/v1/chat/completions", body, JSON)
        until(lambda: fake.requests)
        left_at = time.monotonic()
        connection.close()
        until(lambda: closed_at)
        assert closed_at[0] - left_at < AT_ONCE_S


def test_a_body_over_the_limit_is_answered_413_in_the_dialect_of_its_path() -> None:
    with fake_upstream(_echo) as fake, proxy(fake.port, limits__body_bytes=1000) as running:
        body = b'{"x":"' + b"x" * 1000 + b'"}'
        openai = ask(running.port, "POST", "/v1/chat/completions", body, JSON)
        anthropic = ask(running.port, "POST", "/v1/messages", body, JSON)
        assert (openai.status, anthropic.status) == (413, 413)
        assert json.loads(openai.body)["error"]["code"] == "request_too_large"
        assert json.loads(anthropic.body)["error"]["type"] == "request_too_large"
        assert fake.requests == []
        assert ask(running.port, "POST", "/tokenize", body, JSON).status == 413
        assert ask(running.port, "POST", "/lora-adapters", body, JSON).status == 200


def test_fields_of_the_proxy_are_not_forwarded() -> None:
    body = (
        b'{ "evoke_policy":"discard", "messages":[{"role":"user","content":"evoke_x",'
        b'"evoke_keep":"pin","evoke_name":"n"}],"temperature":1.0e-1,'
        b' "evoke" : false , "big":12345678901234567890}'
    )
    with fake_upstream(_echo) as fake, proxy(fake.port) as running:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            ask(running.port, "POST", path, body, JSON)
        for request in fake.requests:
            assert b"evoke_policy" not in request.body
            assert b"evoke_keep" not in request.body
            assert json.loads(request.body) == {
                "messages": [{"role": "user", "content": "evoke_x"}],
                "temperature": 0.1,
                "big": 12345678901234567890,
            }
            assert b"1.0e-1" in request.body


def test_an_unknown_path_under_evoke_is_answered_404_without_a_server() -> None:
    with proxy(unused_port()) as running:
        assert ask(running.port, "GET", "/evoke/nothing").status == 404
        assert json.loads(ask(running.port, "GET", "/evoke/health").body) == {"status": "ok"}


def test_readiness_names_the_failed_check() -> None:
    with proxy(unused_port()) as running:
        answer = ask(running.port, "GET", "/evoke/ready")
    body = json.loads(answer.body)
    assert (answer.status, body["failed"]) == (503, ["upstream"])
    assert "cannot be reached" in body["checks"]["upstream"]["detail"]


def test_metrics_of_the_proxy_are_exported_without_a_server() -> None:
    with proxy(unused_port()) as running:
        answer = ask(running.port, "GET", "/metrics")
    assert answer.status == 200
    assert b"evoke_build_info" in answer.body
