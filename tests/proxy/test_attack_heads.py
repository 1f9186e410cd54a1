"""Hostile request heads on raw sockets are answered, and are no errors of the proxy."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator

import pytest
from fake_upstream import Exchange, FakeUpstream, fake_upstream, response
from harness import TIMEOUT_S, RunningProxy, pool, proxy
from smuggled_requests import read_answer

BODY = b'{"content":"x"}'
LENGTH = f"Content-Length: {len(BODY)}"
FAILURES = ("upstream_unavailable", "upstream_protocol", "upstream_timeout")


def _request(line: str, *lines: str) -> bytes:
    return "\r\n".join((line, "Host: a", *lines, "", "")).encode() + BODY


async def _answer(exchange: Exchange) -> None:
    """Answer with an empty object, which is also a valid reply to calls of the proxy."""
    await exchange.send(response(b"{}", b"application/json"))


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeUpstream]:
    with fake_upstream(_answer) as fake:
        yield fake


@pytest.fixture(scope="module", params=["one server", "pool"])
def running(request: pytest.FixtureRequest, upstream: FakeUpstream) -> Iterator[RunningProxy]:
    ports = {"a": upstream.port}
    one = request.param == "one server"
    with proxy(upstream.port) if one else pool(ports) as started:
        yield started


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages", "/slots/0", "/x"])
def test_a_length_of_thousands_of_digits_is_refused(
    running: RunningProxy, upstream: FakeUpstream, path: str
) -> None:
    """The HTTP parser accepts leading zeros; Python converts at most 4,300 digits."""
    n_forwarded = len(upstream.requests)
    zeros = f"Content-Length: {'0' * 5000}{len(BODY)}"
    with socket.create_connection(("127.0.0.1", running.port), TIMEOUT_S) as client:
        client.sendall(_request(f"POST {path} HTTP/1.1", zeros))
        status, body = read_answer(client)
    assert status == 400 and "Content-Length" in json.loads(body)["error"]["message"]
    assert [one for one in upstream.requests[n_forwarded:] if b"POST" in one.head] == []
    for kind in FAILURES:
        assert running.metric("evoke_upstream_errors_total", kind=kind) == 0


@pytest.mark.parametrize(
    ("path", "expected"), [("/tokenize", "200-ok"), ("/v1/messages", "x"), ("/evoke/health", "x")]
)
def test_an_unknown_expectation_is_refused_in_the_dialect_of_its_path(
    running: RunningProxy, path: str, expected: str
) -> None:
    refused = running.metric("evoke_requests_total", endpoint=path, code="417")
    with socket.create_connection(("127.0.0.1", running.port), TIMEOUT_S) as client:
        client.sendall(_request(f"POST {path} HTTP/1.1", LENGTH, f"Expect: {expected}"))
        status, body = read_answer(client)
    error = json.loads(body)
    assert status == 417 and ("type" in error) == (path == "/v1/messages")
    assert running.metric("evoke_requests_total", endpoint=path, code="417") == refused + 1


def test_a_client_that_waits_for_100_continue_gets_it_once(running: RunningProxy) -> None:
    head = _request("POST /tokenize HTTP/1.1", LENGTH, "Expect: 100-continue")[: -len(BODY)]
    with (
        socket.create_connection(("127.0.0.1", running.port), TIMEOUT_S) as client,
        client.makefile("rb") as read,
    ):
        client.sendall(head)
        assert read.readline() == b"HTTP/1.1 100 Continue\r\n" and read.readline() == b"\r\n"
        client.sendall(BODY)
        assert read.readline() == b"HTTP/1.1 200 OK\r\n"


def test_a_client_that_leaves_while_100_continue_is_sent_is_no_failure(
    running: RunningProxy, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", running.port), TIMEOUT_S) as client:
                client.sendall(_request("POST /tokenize HTTP/1.1", LENGTH, "Expect: 100-continue"))
                client.shutdown(socket.SHUT_WR)
                while client.recv(1000):
                    pass
        running.wait_until_idle()
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize(("method", "closes"), [("GET", True), ("OPTIONS", True), ("POST", False)])
def test_the_server_closes_the_connection_after_a_body_that_it_may_leave_unread(
    upstream: FakeUpstream, running: RunningProxy, method: str, closes: bool
) -> None:
    """Older llama-servers parse the body of these methods as the next request."""
    with socket.create_connection(("127.0.0.1", running.port), TIMEOUT_S) as client:
        client.sendall(_request(f"{method} /v1/models HTTP/1.1", LENGTH))
        assert read_answer(client)[0] == 200
    (head,) = [one.head for one in upstream.requests if one.body == BODY and b"/v1/m" in one.head]
    assert (b"\r\nConnection: close\r\n" in head) == closes
    upstream.requests.clear()
