"""Long calls to llama-server before an answer: clients get keep-alive comments, and calls end."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import virtual_time
from conversation import endless_stream
from fault_injector import fault_injector
from harness import (
    Answer,
    RunningProxy,
    ask,
    bare_llama_server,
    process_on,
    proxy,
    server_binary,
    until,
)
from probed import FixedSpeed, conversation_with_evicted_fact
from stock_deployment import SAVE_ALWAYS, Deployment, long_chat

from evoke_proxy.adapters.llama.stock_api import PrefillResult, StockApi
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.models import bundled_model
from evoke_proxy.web.sse_keepalive import KeepaliveStream

WAITING = b": waiting\n\n"
JSON = {"Content-Type": "application/json"}
FREQUENT_COMMENTS = {"limits__keepalive_s": 0.05}


class RecordingStream(KeepaliveStream):
    """Records when comments are sent; with `is_disconnected` sending one fails."""

    def __init__(self, is_disconnected: bool = False) -> None:
        super().__init__(None, None, 5.0)  # type: ignore[arg-type]
        self.sent_at: list[float] = []
        self.is_disconnected = is_disconnected

    async def _send_comment(self, trace: RequestTrace) -> None:
        if self.is_disconnected:
            raise ConnectionResetError
        self.sent_at.append(asyncio.get_running_loop().time())


async def _enter(stream: RecordingStream, work: Callable[[RequestTrace], Awaitable[Any]]) -> Any:
    """Run `work` as the entering of an exchange; returns its result."""
    trace = RequestTrace(0.0)

    @asynccontextmanager
    async def exchange() -> AsyncIterator[Any]:
        yield await work(trace)

    async with AsyncExitStack() as stack:
        return await stream.enter(stack, exchange(), trace)


def test_a_long_call_sends_keepalive_comments() -> None:
    async def run(seconds: float, error: Exception | None = None) -> tuple[Any, list[float]]:
        stream, loop = RecordingStream(), asyncio.get_running_loop()

        async def work(trace: RequestTrace) -> float:
            await asyncio.sleep(9)  # not a wait, so no comments are sent
            with trace.waiting():
                await asyncio.sleep(seconds)
            if error is not None:
                raise error
            return loop.time()

        return await _enter(stream, work), stream.sent_at

    assert virtual_time.run(run(17.0)) == (26.0, [14.0, 19.0, 24.0])
    assert virtual_time.run(run(4.0)) == (13.0, [])
    with pytest.raises(ZeroDivisionError):
        virtual_time.run(run(6.0, ZeroDivisionError()))


@pytest.mark.parametrize("end", ["comment fails", "cancelled", "cancelled twice"])
def test_a_long_call_ends_when_its_client_disconnects(end: str) -> None:
    ended: list[float] = []

    async def work(trace: RequestTrace) -> None:
        try:
            with trace.waiting():
                await asyncio.sleep(60)
        finally:
            await asyncio.sleep(1)  # closing takes a second
            ended.append(asyncio.get_running_loop().time())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        stream = RecordingStream(is_disconnected=end == "comment fails")
        request = loop.create_task(_enter(stream, work))
        await asyncio.sleep(7)
        if end != "comment fails":
            request.cancel()
        await asyncio.sleep(0.5)
        if end == "cancelled twice":
            request.cancel()
        with pytest.raises((ConnectionResetError, asyncio.CancelledError)):
            await request
        assert len(ended) == 1

    virtual_time.run(run())


def _delayed(call: Callable[..., Awaitable[Any]], seconds: float) -> Callable[..., Awaitable[Any]]:
    async def delayed(*args: Any) -> Any:
        await asyncio.sleep(seconds)
        return await call(*args)

    return delayed


def _stream(running: RunningProxy, body: dict[str, Any], **headers: str) -> Answer:
    request = json.dumps(body | {"stream": True, "max_tokens": 4}).encode()
    return ask(running.port, "POST", "/v1/chat/completions", request, JSON | headers)


def _assert_begins_with_comments(answer: Answer) -> None:
    assert answer.status == 200, answer.body
    assert answer.body.startswith(WAITING) and answer.body.endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in answer.body


def test_a_prefill_up_to_a_boundary_sends_keepalive_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, chat = Deployment(tmp_path), long_chat(300)
    chat.messages.append({"role": "user", "content": "So what is it?"})
    with deployment.server() as port:
        settings = {
            f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()
        } | FREQUENT_COMMENTS
        with proxy(port, snapshots__directory=str(tmp_path), **settings) as running:
            hello = {"messages": [{"role": "user", "content": "Hello."}]}
            _stream(running, hello)
            running.wait_for_background()  # the probe of llama-server, another wait, has ended
            monkeypatch.setattr(StockApi, "prefill", _delayed(StockApi.prefill, 0.4))
            _assert_begins_with_comments(_stream(running, {"messages": chat.messages}))
            running.wait_for_background()
            # A client that disconnects during the prefill releases its slot.
            chat.messages[0]["content"] = "Another one: " + chat.messages[0]["content"]
            body = json.dumps({"messages": chat.messages, "stream": True}).encode()
            connection = http.client.HTTPConnection("127.0.0.1", running.port)
            connection.request("POST", "/v1/chat/completions", body, JSON)
            assert connection.getresponse().read1(5)
            connection.close()
            running.wait_for_background()
            assert "*" not in repr(running.gateway.server.slots.pool)
            body = json.dumps({"messages": chat.messages, "max_tokens": 4}).encode()
            answer = ask(running.port, "POST", "/v1/chat/completions", body, JSON)
            assert json.loads(answer.body)["choices"]


def test_a_probe_sends_keepalive_comments(
    patched_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy(patched_port, **FREQUENT_COMMENTS) as running:
        prober = running.gateway.server.strategies.budgeted._planner._prober
        monkeypatch.setattr(prober, "pace", FixedSpeed(1000))
        client = conversation_with_evicted_fact(running.port, "long calls", "model")
        n_before = running.metric("evoke_probes_total", result="made")
        monkeypatch.setattr(prober, "_decode", _delayed(prober._decode, 0.4))
        messages = [*client.messages, {"role": "user", "content": "Where do I live?"}]
        body = {"messages": messages, **client.fields}
        _assert_begins_with_comments(_stream(running, body, **{"X-Evoke-Session": "long calls"}))
        assert running.metric("evoke_probes_total", result="made") > n_before


def test_loading_a_model_sends_keepalive_comments(tmp_path: Path) -> None:
    for name in ("models", "slots"):
        (tmp_path / name).mkdir()
    (tmp_path / "models" / "one.gguf").symlink_to(bundled_model())
    options = ["--models-dir", str(tmp_path / "models"), "-np", "1", "-c", "4096", "-t", "1"]
    options += ["--slot-save-path", str(tmp_path / "slots")]
    with bare_llama_server(server_binary(patched=False), *options) as port:
        settings = {"limits__keepalive_s": 0.01, "snapshots__directory": str(tmp_path / "slots")}
        with proxy(port, **settings) as running:
            messages = [{"role": "user", "content": "Hello."}]
            _assert_begins_with_comments(_stream(running, {"model": "one", "messages": messages}))


def test_a_hanging_prefill_is_cancelled_and_the_request_continues(tmp_path: Path) -> None:
    deployment, chat = Deployment(tmp_path), long_chat(300)
    chat.messages.append({"role": "user", "content": "So what is it?"})
    body = json.dumps({"messages": chat.messages, "max_tokens": 4}).encode()
    settings = {f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()}
    settings |= {"snapshots__directory": str(tmp_path), "upstream__long_call_timeout_s": 0.5}
    with (
        deployment.server() as port,
        fault_injector(port) as injector,
        proxy(injector.port, **settings) as running,
    ):
        server, hello = process_on(port), b'{"messages":[{"role":"user","content":"Hello."}]}'
        ask(running.port, "POST", "/v1/chat/completions", hello, JSON)
        running.wait_for_background()  # the probe of llama-server has ended
        injector.run_at(b"POST /completion", lambda: os.kill(server, signal.SIGSTOP))
        with ThreadPoolExecutor(1) as pool:
            path = "/v1/chat/completions"
            answering = pool.submit(ask, running.port, "POST", path, body, JSON)
            sample = running.gateway.metrics.registry.get_sample_value
            try:
                until(lambda: sample("evoke_degraded_total", {"stage": "prefill"}))
            finally:
                os.kill(server, signal.SIGCONT)
            assert answering.result().status == 200
        running.wait_for_background()
        assert "*" not in repr(running.gateway.server.slots.pool)


def test_a_prefill_does_not_wait_for_a_slot_of_another_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server chose the slot for the prefill before the other request got its lease."""
    prefill = StockApi.prefill

    async def prefill_in_other_slot(calls: StockApi, *args: Any) -> PrefillResult:
        return replace(await prefill(calls, *args), slot=other_slot[0])

    other_slot: list[int] = []
    deployment, chat = (
        Deployment(tmp_path, "", ("-np", "2", "--no-cache-idle-slots")),
        long_chat(300),
    )
    with deployment.server() as port:
        settings = {f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()}
        settings |= {"snapshots__directory": str(tmp_path), "limits__queue_timeout_s": 1.0}
        with proxy(port, **settings) as running, endless_stream(running.port):
            (other,) = running.gateway.conversations
            slot = running.gateway.server.slots.pool.slot_of(other.id)
            assert slot is not None
            other_slot.append(slot)
            monkeypatch.setattr(StockApi, "prefill", prefill_in_other_slot)
            chat.ask(running.port, "So what is it?")
            until(
                lambda: repr(running.gateway.server.slots.pool).count("*") == 1,
                "one slot is released",
            )
            assert running.metric("evoke_degraded_total", stage="prefill") == 0
