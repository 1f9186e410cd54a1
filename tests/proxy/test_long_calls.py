"""Long calls before an answer: each ends, and the client receives keep-alive comments."""

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
from stock_deployment import SAVE_ALWAYS, Deployment, long_chat
from test_model_probe import _Steady, told

from evoke_proxy.adapters.llama.stock_api import PrefillResult, StockApi
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.models import bundled_model
from evoke_proxy.web.sse_keepalive import KeepaliveStream

WAITING = b": waiting\n\n"
JSON = {"Content-Type": "application/json"}
OFTEN = {"limits__keepalive_s": 0.05}


class _Comments(KeepaliveStream):
    """Notes when comments are sent; the client is gone when it is said so."""

    def __init__(self, is_gone: bool = False) -> None:
        super().__init__(None, None, 5.0)  # type: ignore[arg-type]
        self.sent_at: list[float] = []
        self.is_gone = is_gone

    async def _send_comment(self) -> None:
        if self.is_gone:
            raise ConnectionResetError
        self.sent_at.append(asyncio.get_running_loop().time())


async def _entered(stream: _Comments, work: Callable[[RequestTrace], Awaitable[Any]]) -> Any:
    trace = RequestTrace(0.0)

    @asynccontextmanager
    async def opening() -> AsyncIterator[Any]:
        yield await work(trace)

    async with AsyncExitStack() as stack:
        return await stream.enter(stack, opening(), trace)


def test_a_long_call_sends_keepalive_comments() -> None:
    async def run(seconds: float, error: Exception | None = None) -> tuple[Any, list[float]]:
        stream, loop = _Comments(), asyncio.get_running_loop()

        async def work(trace: RequestTrace) -> float:
            await asyncio.sleep(9)  # nothing that a client is told of
            with trace.waiting():
                await asyncio.sleep(seconds)
            if error is not None:
                raise error
            return loop.time()

        return await _entered(stream, work), stream.sent_at

    assert virtual_time.run(run(17.0)) == (26.0, [14.0, 19.0, 24.0])
    assert virtual_time.run(run(4.0)) == (13.0, [])
    with pytest.raises(ZeroDivisionError):
        virtual_time.run(run(6.0, ZeroDivisionError()))


@pytest.mark.parametrize("leaves", ["seen by the comment", "cancelled", "cancelled twice"])
def test_a_long_call_ends_when_its_client_disconnects(leaves: str) -> None:
    ended: list[float] = []

    async def work(trace: RequestTrace) -> None:
        try:
            with trace.waiting():
                await asyncio.sleep(60)
        finally:
            await asyncio.sleep(1)  # closing takes a while
            ended.append(asyncio.get_running_loop().time())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        stream = _Comments(is_gone=leaves == "seen by the comment")
        request = loop.create_task(_entered(stream, work))
        await asyncio.sleep(7)
        if leaves != "seen by the comment":
            request.cancel()
        await asyncio.sleep(0.5)
        if leaves == "cancelled twice":
            request.cancel()
        with pytest.raises((ConnectionResetError, asyncio.CancelledError)):
            await request
        assert len(ended) == 1

    virtual_time.run(run())


def _slow(call: Callable[..., Awaitable[Any]], seconds: float) -> Callable[..., Awaitable[Any]]:
    async def slow(*given: Any) -> Any:
        await asyncio.sleep(seconds)
        return await call(*given)

    return slow


def _stream(running: RunningProxy, body: dict[str, Any], **headers: str) -> Answer:
    asked = json.dumps(body | {"stream": True, "max_tokens": 4}).encode()
    return ask(running.port, "POST", "/v1/chat/completions", asked, JSON | headers)


def _assert_begins_with_comments(answer: Answer) -> None:
    assert answer.status == 200, answer.body
    assert answer.body.startswith(WAITING) and answer.body.endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in answer.body


def test_a_prefill_up_to_a_boundary_sends_keepalive_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StockApi, "prefill", _slow(StockApi.prefill, 0.4))
    deployment, chat = Deployment(tmp_path), long_chat(300)
    chat.messages.append({"role": "user", "content": "So what is it?"})
    with deployment.server() as port:
        quick = {f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()} | OFTEN
        with proxy(port, snapshots__directory=str(tmp_path), **quick) as running:
            _assert_begins_with_comments(_stream(running, {"messages": chat.messages}))
            running.wait_for_background()
            # A client that leaves meanwhile gives its slot back.
            chat.messages[0]["content"] = "Another one: " + chat.messages[0]["content"]
            body = json.dumps({"messages": chat.messages, "stream": True}).encode()
            connection = http.client.HTTPConnection("127.0.0.1", running.port)
            connection.request("POST", "/v1/chat/completions", body, JSON)
            assert connection.getresponse().read1(5)
            connection.close()
            running.wait_for_background()
            assert "*" not in repr(running.gateway.server.slots.pool)
            whole = json.dumps({"messages": chat.messages, "max_tokens": 4}).encode()
            answer = ask(running.port, "POST", "/v1/chat/completions", whole, JSON)
            assert json.loads(answer.body)["choices"]


def test_a_probe_sends_keepalive_comments(
    patched_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy(patched_port, **OFTEN) as running:
        probing = running.gateway.server.strategies.budgeted._planner._prober
        monkeypatch.setattr(probing, "pace", _Steady(1000))
        talk = told(running.port, "long calls", "model")
        made = running.metric("evoke_probes_total", result="made")
        monkeypatch.setattr(probing, "_decode", _slow(probing._decode, 0.4))
        messages = [*talk.messages, {"role": "user", "content": "Where do I live?"}]
        body = {"messages": messages, **talk.fields}
        _assert_begins_with_comments(_stream(running, body, **{"X-Evoke-Session": "long calls"}))
        assert running.metric("evoke_probes_total", result="made") > made


def test_loading_a_model_sends_keepalive_comments(tmp_path: Path) -> None:
    for name in ("models", "slots"):
        (tmp_path / name).mkdir()
    (tmp_path / "models" / "one.gguf").symlink_to(bundled_model())
    options = ["--models-dir", str(tmp_path / "models"), "-np", "1", "-c", "4096", "-t", "1"]
    options += ["--slot-save-path", str(tmp_path / "slots")]
    with bare_llama_server(server_binary(patched=False), *options) as port:
        often = {"limits__keepalive_s": 0.01, "snapshots__directory": str(tmp_path / "slots")}
        with proxy(port, **often) as running:
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
        fault_injector(port) as line,
        proxy(line.port, **settings) as running,
    ):
        server, hello = process_on(port), b'{"messages":[{"role":"user","content":"Hello."}]}'
        ask(running.port, "POST", "/v1/chat/completions", hello, JSON)
        running.wait_for_background()  # it has found out what llama-server is
        line.run_at(b"POST /completion", lambda: os.kill(server, signal.SIGSTOP))
        with ThreadPoolExecutor(1) as client:
            path = "/v1/chat/completions"
            answering = client.submit(ask, running.port, "POST", path, body, JSON)
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
    """llama-server has chosen it before the other request was given it."""
    prefill = StockApi.prefill

    async def elsewhere(calls: StockApi, *given: Any) -> PrefillResult:
        return replace(await prefill(calls, *given), slot=taken[0])

    taken: list[int] = []
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
            taken.append(slot)
            monkeypatch.setattr(StockApi, "prefill", elsewhere)
            chat.ask(running.port, "So what is it?")
            until(
                lambda: repr(running.gateway.server.slots.pool).count("*") == 1, "one slot is back"
            )
            assert running.metric("evoke_degraded_total", stage="prefill") == 0
