"""A server that sends heads and bodies slowly, or stops: bounded, counted, isolated."""

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

JSON = {"Content-Type": "application/json"}
CHAT = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
ANSWER = response(b'{"choices":[]}', b"application/json")
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMIT_S = 0.6
Behaviour = Callable[[Exchange], Awaitable[None]]


def _sends_and_stops(sent: bytes) -> Behaviour:
    """A server that says this much and then nothing, until it is left."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send(sent)
        await asyncio.Event().wait()

    return behave


def _sends_slowly(sent: bytes, pause_s: float) -> Behaviour:
    """A server that sends a byte at a time."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send(*[bytes((byte,)) for byte in sent], pause_s=pause_s)

    return behave


def _failures(running: RunningProxy) -> float:
    return running.metric("evoke_upstream_errors_total", kind="upstream_timeout")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/x"])
@pytest.mark.parametrize(
    "behave",
    [_sends_and_stops(ANSWER[:10]), _sends_and_stops(ANSWER[:40]), _sends_slowly(ANSWER, 0.05)],
    ids=["status line", "head", "drip"],
)
def test_an_incomplete_reply_head_is_answered_504(behave: Behaviour, path: str) -> None:
    with fake_upstream(behave) as fake, proxy(fake.port, upstream__read_timeout_s=LIMIT_S) as run:
        began = time.monotonic()
        answer = ask(run.port, "POST", path, CHAT, JSON)
        assert answer.status == 504 and time.monotonic() - began >= LIMIT_S
        assert json.loads(answer.body)["error"]["code"] == "upstream_timeout"
        assert _failures(run) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/x"])
@pytest.mark.parametrize(
    "sent",
    [STREAM + chunked(b"data: {}\n\n"), STREAM, response(b"x" * 100)[:-50]],
    ids=["stream", "stream without data", "length"],
)
def test_a_stalled_reply_is_cut_off(sent: bytes, path: str) -> None:
    with (
        fake_upstream(_sends_and_stops(sent)) as fake,
        proxy(fake.port, upstream__read_timeout_s=LIMIT_S) as run,
    ):
        assert not _is_whole(run.port, path)
        assert _failures(run) == 1


def _is_whole(port: int, path: str) -> bool:
    """Whether an answer is complete as far as its client can tell."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("POST", path, CHAT, JSON)
        try:
            connection.getresponse().read()
        except (http.client.HTTPException, ConnectionError):
            return False
    return True


def test_a_rare_event_does_not_end_the_event_stream() -> None:
    with (
        fake_upstream(_sends_and_stops(STREAM + chunked(b"data: 1\n\n"))) as fake,
        proxy(fake.port, upstream__read_timeout_s=LIMIT_S) as run,
    ):
        connection = http.client.HTTPConnection("127.0.0.1", run.port, timeout=2 * LIMIT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/models/sse")
            answer = connection.getresponse()
            assert answer.read1(100) == b"data: 1\n\n"
            with pytest.raises(TimeoutError):
                answer.read1(100)
        assert _failures(run) == 0


def test_a_slow_reply_arrives_whole_and_delays_no_other() -> None:
    event = b"data: {}\n\n"
    dripped = STREAM + chunked(*[event] * 6) + b"0\r\n\r\n"
    fast = response(b"fast")

    async def behave(exchange: Exchange) -> None:
        if b"POST /fast" in exchange.head:
            await exchange.send(fast)
        else:
            await exchange.send(STREAM)
            await _sends_slowly(dripped[len(STREAM) :], 0.05)(exchange)

    with (
        fake_upstream(behave) as fake,
        proxy(fake.port, upstream__read_timeout_s=5.0) as run,
        ThreadPoolExecutor(8) as threads,
    ):
        slow = [threads.submit(ask, run.port, "POST", "/x", CHAT, JSON) for _ in range(8)]
        until(lambda: len(fake.requests) >= 8)
        waited: list[float] = []
        started = time.monotonic()
        while not all(one.done() for one in slow):
            began = time.monotonic()
            assert ask(run.port, "POST", "/fast", b"{}").body == b"fast"
            waited.append(time.monotonic() - began)
        assert {one.result().body for one in slow} == {event * 6}
        took_s = time.monotonic() - started
        assert len(waited) > 10 and sorted(waited)[len(waited) // 2] < took_s / 10
        assert _failures(run) == 0


def test_a_slow_upstream_scrape_is_left_out_of_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evoke_proxy.engine.admin.exposition._SCRAPE_S", LIMIT_S)
    body = response(b"llamacpp:n 1\n" * 1000)
    with fake_upstream(_sends_slowly(body, 0.02)) as fake, proxy(fake.port) as run:
        began = time.monotonic()
        answer = ask(run.port, "GET", "/metrics")
        assert time.monotonic() - began < 20
        assert answer.body.startswith(b"# llama-server has no metrics now")
        assert b"evoke_build_info" in answer.body


def test_replies_to_the_proxys_own_calls_are_limited_in_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever llama-server says: what it is asked for fits many times."""

    async def pour(exchange: Exchange) -> None:
        if b"/evoke/render" in exchange.head:
            await exchange.send(STREAM, *[chunked(b"[" * 65_000)] * 100, b"0\r\n\r\n")
        else:
            await exchange.send(ANSWER)

    monkeypatch.setattr("evoke_proxy.adapters.llama.transport.ANSWER_BYTES", 1 << 20)
    with (
        fake_upstream(pour, patched=True) as fake,
        proxy(fake.port, policy__budget=320) as run,
    ):
        answer = ask(run.port, "POST", "/v1/chat/completions", CHAT, JSON)
        assert answer.status == 200 and answer.body == b'{"choices":[]}'
        assert run.metric("evoke_degraded_total", stage="render") == 1


def test_a_slow_server_of_a_pool_delays_only_its_own_requests() -> None:
    async def fast(exchange: Exchange) -> None:
        await exchange.send(ANSWER)

    limits = {"upstream__read_timeout_s": LIMIT_S, "pool__health_timeout_s": LIMIT_S}
    with (
        fake_upstream(_sends_slowly(ANSWER, 0.05)) as slow,
        fake_upstream(fast) as other,
        pool({"slow": slow.port, "other": other.port}, **limits) as run,
    ):
        statuses = [ask(run.port, "POST", "/x", CHAT, JSON).status for _ in range(8)]
        assert set(statuses) <= {200, 504} and statuses[-1] == 200
        assert other.requests
