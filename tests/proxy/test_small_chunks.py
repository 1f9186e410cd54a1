"""Bodies in small chunks: they take little time from others, and too many are refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_upstream import FakeUpstream, answer_ok, fake_upstream
from harness import TIMEOUT_S, RunningProxy, ask, proxy
from tenant_keys import KEYS, proxy_with_keys

from evoke_proxy.web.parse_queue import ParseQueue

DROPPED = "evoke_clients_dropped_total"
JSON = {"Content-Type": "application/json"}
N_HOSTILE = 8
HEAD = (
    b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"%sTransfer-Encoding: chunked\r\n\r\n"
)
ANSWERED = b'{"messages":[{"role":"user","content":"%s"}]}'


@pytest.fixture(scope="module")
def echo() -> Iterator[FakeUpstream]:
    with fake_upstream(answer_ok) as fake:
        yield fake


def _chunks(body: bytes, size: int) -> bytes:
    parts = (body[begin : begin + size] for begin in range(0, len(body), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def _flood(port: int, key: str, stop: threading.Event) -> None:
    """Send chunks of one byte on several connections, each as fast as the proxy reads."""
    credentials = f"Authorization: Bearer {key}\r\n".encode() if key else b""
    head, chunks = HEAD % (b"/v1/chat/completions", credentials), _chunks(b" " * 20_000, 1)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for _ in range(N_HOSTILE):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(head)
            client.setblocking(False)
            selector.register(client, selectors.EVENT_WRITE, [memoryview(chunks)])
        while not stop.is_set():
            for entry, _ in selector.select(0.1):
                left = entry.data
                try:
                    left[0] = left[0][entry.fileobj.send(left[0]) :] or memoryview(chunks)  # type: ignore[union-attr]
                except BlockingIOError:
                    pass
                except OSError:
                    selector.unregister(entry.fileobj)


@contextlib.contextmanager
def _hostile(port: int, key: str) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=_flood, args=(port, key, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def _longest_step(seconds: float) -> float:
    """The most processor time that the loop's thread takes between two moments of its own."""
    longest, end, latest = 0.0, time.monotonic() + seconds, time.thread_time()
    while time.monotonic() < end:
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, latest = max(longest, now - latest), now
    return longest


@pytest.mark.parametrize("key", ["", KEYS["alice"]], ids=["without a key", "with a key"])
def test_chunks_of_one_byte_on_eight_connections_delay_no_others(
    echo: FakeUpstream, tmp_path: Path, key: str
) -> None:
    gc.collect()
    gc.freeze()  # as the proxy does at its start: a collection of what other tests left takes 0.1 s
    with proxy_with_keys(echo.port, tmp_path) as running:
        measured = asyncio.run_coroutine_threadsafe(_longest_step(2.0), running.loop)
        with _hostile(running.port, key):
            waits = list[float]()
            while not measured.done():
                began = time.monotonic()
                assert ask(running.port, "GET", "/evoke/health").status == 200
                waits.append(time.monotonic() - began)
        # 2 ms on two cores; seconds when a connection's bytes are parsed as they arrive.
        assert statistics.median(waits) < 0.1
        # One iteration has a step of several connections; before, one of a single one took 0.08 s.
        assert measured.result() < 0.05
        assert running.metric(DROPPED, reason="small_chunks") == N_HOSTILE


def _send(port: int, sent: bytes) -> bytes:
    """Send everything, and only then read the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as client:
        client.sendall(sent)
        with client.makefile("rb") as answer:
            return answer.readline() + answer.read1(65536)


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages", b"/x"])
def test_a_body_of_many_small_chunks_is_refused_with_an_answer(
    echo: FakeUpstream, path: bytes
) -> None:
    with proxy(echo.port) as running:
        body = ANSWERED % (b"a" * 500_000)
        answer = _send(running.port, HEAD % (path, b"") + _chunks(body, 1))
        assert answer.startswith(b"HTTP/1.1 400 ") and b"\r\nConnection: close" in answer
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert "chunks" in error["message"]
        assert running.metric(DROPPED, reason="small_chunks") == 1
        assert ask(running.port, "GET", "/x").status == 200


@pytest.mark.parametrize(("n_bytes", "size"), [(2_500, 1), (1_500_000, 64), (6_000_000, 60_000)])
def test_few_small_chunks_and_many_larger_ones_are_a_body_like_others(
    echo: FakeUpstream, n_bytes: int, size: int
) -> None:
    with proxy(echo.port) as running:
        body = ANSWERED % (b"a\\n" * (n_bytes // 3))
        answer = _send(
            running.port, HEAD % (b"/completion", b"") + _chunks(body, size) + b"0\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert echo.requests[-1].body == body
        assert running.metric(DROPPED, reason="small_chunks") == 0


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_client_that_sends_a_large_refused_body_gets_the_answer(
    echo: FakeUpstream, tmp_path: Path, framing: str
) -> None:
    lines = b"a\n" * 5_000_000  # many lines: such a body is parsed in pieces
    with proxy_with_keys(echo.port, tmp_path) as running:
        head, body = HEAD % (b"/v1/chat/completions", b""), _chunks(lines, 1 << 16)
        if framing == "length":
            head = head.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(lines))
            body = lines
        assert _send(running.port, head + body).startswith(b"HTTP/1.1 401 ")


def test_a_proxy_parses_pipelined_requests_after_a_body_in_pieces(echo: FakeUpstream) -> None:
    body = ANSWERED % (b"a" * 20_000)
    request = HEAD % (b"/completion", b"") + _chunks(body, 20) + b"0\r\n\r\n"
    n_sent = 12

    def answers(running: RunningProxy) -> int:
        received = b""
        with socket.create_connection(("127.0.0.1", running.port), timeout=TIMEOUT_S) as client:
            client.sendall(request * n_sent)
            while received.count(b"HTTP/1.1 200 ") < n_sent:
                part = client.recv(65536)
                assert part, received[-300:]
                received += part
        return received.count(b"HTTP/1.1 ")

    with proxy(echo.port) as running:
        assert answers(running) == n_sent


def test_the_lines_of_a_body_of_known_length_are_parsed_at_once(
    echo: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a body is no work for the parser, however it is indented."""
    pieces = []
    add = ParseQueue.add
    monkeypatch.setattr(
        ParseQueue, "add", lambda queue, *step: (pieces.append(step), add(queue, *step))
    )
    body = json.dumps(
        {"messages": [{"role": "user", "content": "a"}], "x": [1] * 300_000}, indent=1
    )
    with proxy(echo.port) as running:
        answer = ask(running.port, "POST", "/completion", body.encode(), JSON)
    assert answer.status == 200, answer.body
    # Only the first bytes, which come with the head, are parsed in pieces of 4 KiB.
    assert body.count("\n") > 300_000 and len(pieces) < len(body) // 4096 // 2
