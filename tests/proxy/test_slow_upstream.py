"""A llama-server that sends replies slowly or stops: time limits, counts, no effect on others."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_upstream import Exchange, chunked, fake_upstream, response
from harness import TIMEOUT_S, RunningProxy, ask, pool, proxy, until

from evoke_proxy.adapters.llama.transport import HttpTransport
from evoke_proxy.config import UpstreamConfig
from evoke_proxy.errors import UpstreamProtocolError

JSON = {"Content-Type": "application/json"}
CHAT = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
ANSWER = response(b'{"choices":[]}', b"application/json")
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMIT_S = 0.6
Behaviour = Callable[[Exchange], Awaitable[None]]


def _sends_and_stops(sent: bytes) -> Behaviour:
    """Return a behaviour that sends these bytes and then nothing, until the client disconnects."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send(sent)
        await asyncio.Event().wait()

    return behave


def _sends_slowly(sent: bytes, pause_s: float) -> Behaviour:
    """Return a behaviour that sends a byte at a time."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send(*[bytes((byte,)) for byte in sent], pause_s=pause_s)

    return behave


def _n_timeouts(running: RunningProxy) -> float:
    return running.metric("evoke_upstream_errors_total", kind="upstream_timeout")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/x"])
@pytest.mark.parametrize(
    "behave",
    [_sends_and_stops(ANSWER[:10]), _sends_and_stops(ANSWER[:40]), _sends_slowly(ANSWER, 0.05)],
    ids=["status line", "head", "drip"],
)
def test_an_incomplete_reply_head_is_answered_504(behave: Behaviour, path: str) -> None:
    with (
        fake_upstream(behave) as fake,
        proxy(fake.port, upstream__read_timeout_s=LIMIT_S) as running,
    ):
        began = time.monotonic()
        answer = ask(running.port, "POST", path, CHAT, JSON)
        assert answer.status == 504 and time.monotonic() - began >= LIMIT_S
        assert json.loads(answer.body)["error"]["code"] == "upstream_timeout"
        assert _n_timeouts(running) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/x"])
@pytest.mark.parametrize(
    "sent",
    [STREAM + chunked(b"data: {}\n\n"), STREAM, response(b"x" * 100)[:-50]],
    ids=["stream", "stream without data", "length"],
)
def test_a_stalled_reply_is_cut_off(sent: bytes, path: str) -> None:
    with (
        fake_upstream(_sends_and_stops(sent)) as fake,
        proxy(fake.port, upstream__read_timeout_s=LIMIT_S) as running,
    ):
        assert not _is_complete(running.port, path)
        assert _n_timeouts(running) == 1


def _is_complete(port: int, path: str) -> bool:
    """Send a request; returns whether its answer is complete for the client."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("POST", path, CHAT, JSON)
        try:
            connection.getresponse().read()
        except (http.client.HTTPException, ConnectionError):
            return False
    return True


def test_an_event_stream_of_llama_server_has_no_read_timeout() -> None:
    with (
        fake_upstream(_sends_and_stops(STREAM + chunked(b"data: 1\n\n"))) as fake,
        proxy(fake.port, upstream__read_timeout_s=LIMIT_S) as running,
    ):
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=2 * LIMIT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/models/sse")
            answer = connection.getresponse()
            assert answer.read1(100) == b"data: 1\n\n"
            with pytest.raises(TimeoutError):
                answer.read1(100)
        assert _n_timeouts(running) == 0


def test_a_slow_reply_arrives_complete_and_delays_no_other() -> None:
    event = b"data: {}\n\n"
    slow_reply = STREAM + chunked(*[event] * 6) + b"0\r\n\r\n"
    answer_at_once = response(b"fast")

    async def behave(exchange: Exchange) -> None:
        if b"POST /fast" in exchange.head:
            await exchange.send(answer_at_once)
        else:
            await exchange.send(STREAM)
            await _sends_slowly(slow_reply[len(STREAM) :], 0.05)(exchange)

    with (
        fake_upstream(behave) as fake,
        proxy(fake.port, upstream__read_timeout_s=5.0) as running,
        ThreadPoolExecutor(8) as threads,
    ):
        slow = [threads.submit(ask, running.port, "POST", "/x", CHAT, JSON) for _ in range(8)]
        until(lambda: len(fake.requests) >= 8)
        waited: list[float] = []
        started = time.monotonic()
        while not all(future.done() for future in slow):
            began = time.monotonic()
            assert ask(running.port, "POST", "/fast", b"{}").body == b"fast"
            waited.append(time.monotonic() - began)
        assert {future.result().body for future in slow} == {event * 6}
        took_s = time.monotonic() - started
        assert len(waited) > 10 and sorted(waited)[len(waited) // 2] < took_s / 10
        assert _n_timeouts(running) == 0


def test_a_slow_upstream_scrape_is_left_out_of_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evoke_proxy.engine.admin.exposition._SCRAPE_S", LIMIT_S)
    body = response(b"llamacpp:n 1\n" * 1000)
    with fake_upstream(_sends_slowly(body, 0.02)) as fake, proxy(fake.port) as running:
        began = time.monotonic()
        answer = ask(running.port, "GET", "/metrics")
        assert time.monotonic() - began < 20
        assert answer.body.startswith(b"# llama-server has no metrics now")
        assert b"evoke_build_info" in answer.body


def test_replies_to_the_proxys_own_calls_are_limited_in_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is many times the size of any valid reply."""

    async def send_too_much(exchange: Exchange) -> None:
        if b"/evoke/render" in exchange.head:
            await exchange.send(STREAM, *[chunked(b"[" * 65_000)] * 100, b"0\r\n\r\n")
        else:
            await exchange.send(ANSWER)

    monkeypatch.setattr("evoke_proxy.adapters.llama.transport.ANSWER_BYTES", 1 << 20)
    with (
        fake_upstream(send_too_much, patched=True) as fake,
        proxy(fake.port, policy__budget=320) as running,
    ):
        answer = ask(running.port, "POST", "/v1/chat/completions", CHAT, JSON)
        assert answer.status == 200 and answer.body == b'{"choices":[]}'
        assert running.metric("evoke_degraded_total", stage="render") == 1


def test_reading_a_reply_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evoke_proxy.adapters.llama.transport.ANSWER_BYTES", 1 << 20)

    async def send_too_much(exchange: Exchange) -> None:
        await exchange.send(STREAM, *[chunked(b"[" * 65_000)] * 100, b"0\r\n\r\n")

    async def read(port: int) -> bytes:
        async with HttpTransport(UpstreamConfig(url=f"http://127.0.0.1:{port}")) as transport:
            async with transport.open("GET", "/x", {}) as reply:
                return await reply.read()

    with fake_upstream(send_too_much) as fake:
        with pytest.raises(UpstreamProtocolError, match="over 1048576 bytes"):
            asyncio.run(read(fake.port))


def test_a_slow_server_of_a_pool_delays_only_its_own_requests() -> None:
    async def answer_at_once(exchange: Exchange) -> None:
        await exchange.send(ANSWER)

    limits = {"upstream__read_timeout_s": LIMIT_S, "pool__health_timeout_s": LIMIT_S}
    with (
        fake_upstream(_sends_slowly(ANSWER, 0.05)) as slow,
        fake_upstream(answer_at_once) as other,
        pool({"slow": slow.port, "other": other.port}, **limits) as running,
    ):
        statuses = [ask(running.port, "POST", "/x", CHAT, JSON).status for _ in range(8)]
        assert set(statuses) <= {200, 504} and statuses[-1] == 200
        assert other.requests
