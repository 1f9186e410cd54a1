"""Slot leases at real servers: always released, shared fairly, and exclusive."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conversation import ENDLESS, FILLER, ChatClient, endless_stream
from harness import (
    Answer,
    RunningProxy,
    ask,
    llama_server,
    proxy,
    server_binary,
    until,
)
from stock_deployment import Deployment
from tenant_keys import KEYS, LOUD_AND_QUIET, proxy_with_keys

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.adapters.llama.transport import Reply

JSON = {"Content-Type": "application/json"}
# Invalid values of `usage.input_tokens_details`.
INVALID_DETAILS: list[Any] = [
    [1],
    "many",
    -3,
    10**30,
    {"cached_tokens": [[{}]]},
    {"cached_tokens": -1},
]


def _chat(port: int, name: str, text: str, path: str = "/v1/chat/completions") -> Answer:
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    headers = JSON | {"Authorization": f"Bearer {KEYS[name]}"}
    return ask(port, "POST", path, json.dumps(body).encode(), headers)


def _with_usage(running: RunningProxy, usage: dict[str, Any]) -> None:
    """Replace the usage of all further chat answers, and remove their timings."""
    upstream = running.gateway.upstream
    original = upstream.open

    class ReplyWithUsage:
        def __init__(self, reply: Reply, body: bytes) -> None:
            self._reply, self._body = reply, body

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reply, name)

        async def chunks(self) -> AsyncIterator[bytes]:
            yield self._body

    @asynccontextmanager
    async def replacing_open(
        method: str, target: str, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        async with original(method, target, *args, **kwargs) as reply:
            if target != "/v1/chat/completions":
                yield reply
                return
            answer = json.loads(await reply.read())
            answer.pop("timings", None)
            body = json.dumps(answer | {"usage": usage}).encode()
            reply.headers["Content-Length"] = str(len(body))
            yield ReplyWithUsage(reply, body)

    upstream.open = replacing_open  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["patched", "stock"])
def test_the_only_slot_is_released_after_answers_with_invalid_usage(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        if kind == "patched":
            port = request.getfixturevalue("patched_port")
            running = stack.enter_context(proxy(port, limits__queue_timeout_s=5))
        else:
            running = stack.enter_context(Deployment(tmp_path).server_and_proxy())
        client = ChatClient(running.port, "odd")
        n_answers = 0
        usage: dict[str, Any] = {"input_tokens": -4, "output_tokens": "2"}
        _with_usage(running, usage)
        for details in INVALID_DETAILS:
            usage["input_tokens_details"] = details
            client.messages.append({"role": "user", "content": f"Number {n_answers}."})
            answer = client.post(stream=False)
            assert answer.status == 200, answer.body
            client.messages.append({"role": "assistant", "content": "Yes."})
            n_answers += 1
        running.wait_until_idle()
        pool = running.gateway.server.slots.pool
        until(pool.idle, "every slot is released")
        assert running.metric("evoke_upstream_errors_total", kind="upstream_protocol") == n_answers
        assert running.metric("evoke_degraded_total", stage="report") == 0


def test_abandoned_answers_in_both_slots_do_not_delay_another_tenant(tmp_path: Path) -> None:
    with (
        llama_server(server_binary(patched=True), "-np", "2", "--evoke-ram", "64") as port,
        proxy_with_keys(port, tmp_path, LOUD_AND_QUIET) as running,
    ):
        assert _chat(running.port, "quiet", "Hello.").status == 200  # warm up
        for path in ("/v1/chat/completions", "/completion"):
            with ExitStack() as stack:
                for number in range(2):
                    body = {
                        "messages": [{"role": "user", "content": f"Go on for ever, {number}."}],
                        "prompt": "Go on for ever.",
                        "max_tokens": ENDLESS,
                        "n_predict": ENDLESS,
                        "ignore_eos": True,
                        "stream": True,
                    }
                    headers = JSON | {
                        "Authorization": f"Bearer {KEYS['loud']}",
                        "X-Conversation-Id": f"mine-{number}",
                    }
                    stack.enter_context(_running_answer(running.port, path, body, headers))
                until(lambda: not running.gateway.server.slots.pool.idle())
            abandoned_at = time.monotonic()
            answer = _chat(running.port, "quiet", "Hello.")
            assert answer.status == 200 and time.monotonic() - abandoned_at < 2.0
            running.wait_until_idle()


@pytest.mark.parametrize("kind", ["patched", "stock"])
def test_a_slot_is_released_whatever_its_client_sends_before_it_disconnects(kind: str) -> None:
    """The answers are not streamed, so that no write to the client fails."""
    more = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    upload = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4000000\r\n\r\n"
    binary = server_binary(patched=kind == "patched")
    with llama_server(binary, "-np", "1", "--slots") as port, proxy(port) as running:

        def is_busy() -> bool:
            return bool(json.loads(ask(port, "GET", "/slots").body)[0]["is_processing"])

        for ahead in (b"", more, 2 * more, 32 * more, upload + bytes(3_000_000)):
            messages = [{"role": "user", "content": "Go on for ever."}]
            body = {"messages": messages, "max_tokens": ENDLESS, "ignore_eos": True}
            content = json.dumps(body).encode()
            with socket.create_connection(("127.0.0.1", running.port), timeout=10) as client:
                client.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                    % (len(content), content)
                )
                until(is_busy, "the answer has begun")
                client.sendall(ahead)
                time.sleep(0.2)
                assert is_busy()
            # A stock server looks for disconnected clients when no request has come for a second.
            time.sleep(1.25)
            if is_busy():
                time.sleep(1.25)
                assert not is_busy(), f"with {len(ahead)} bytes behind the request"


@contextmanager
def _running_answer(
    port: int, path: str, body: dict[str, Any], headers: dict[str, str]
) -> Iterator[None]:
    """Start a stream; its client disconnects at the end of the block."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body).encode(), headers)
    answer = connection.getresponse()
    try:
        assert answer.status == 200 and answer.read1(5)
        yield
    finally:
        answer.close()
        connection.close()


def test_a_tenant_with_32_retrying_connections_does_not_block_another(
    patched_port: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"limits__queue": 8, "limits__queue_timeout_s": 60}
    with proxy_with_keys(patched_port, tmp_path, LOUD_AND_QUIET, **settings) as running:
        stop, refused = threading.Event(), list[Answer]()

        def retry(number: int) -> None:
            while not stop.is_set():
                path = "/v1/messages" if number % 2 else "/v1/chat/completions"
                answer = _chat(running.port, "loud", f"Number {number}. {FILLER}", path)
                if answer.status != 200:
                    refused.append(answer)
                    stop.wait(0.02)

        with ThreadPoolExecutor(32) as loud:
            for number in range(32):
                loud.submit(retry, number)
            try:
                until(lambda: refused, "the queue is full")
                with ThreadPoolExecutor(3) as quiet:  # less than half of the queue
                    texts = [f"Turn {i}. {FILLER}" for i in range(12)]
                    chat = partial(_chat, running.port, "quiet")
                    answers = list(quiet.map(chat, texts))
            finally:
                stop.set()
        assert [answer.status for answer in answers] == [200] * 12
        for answer in refused:
            assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
            error = json.loads(answer.body)["error"]
            assert error.get("code", "slots_busy") == "slots_busy"
            assert error["type"] in ("unavailable_error", "overloaded_error")
        displaced = [answer for answer in refused if b"has most of the requests" in answer.body]
        assert displaced, "no request of the loud tenant was displaced"


def test_a_refused_request_does_not_change_its_conversation(patched_port: int) -> None:
    with proxy(patched_port, limits__queue=0) as running:
        client = ChatClient(running.port, "mine")
        client.say(f"Hello. {FILLER}")
        running.wait_for_background()
        (conversation,) = running.gateway.conversations
        prompt, n_resident = conversation.prompt, conversation.budgeted.n_resident
        with endless_stream(running.port, "other"):
            client.messages.append({"role": "user", "content": f"Refused. {FILLER}"})
            assert client.post().status == 503
            assert ChatClient(running.port, "new").post().status == 503
            assert conversation.prompt is prompt and conversation.budgeted.n_resident in (
                n_resident,
                0,
            )
        running.wait_until_idle()
        names = {each.name for each in running.gateway.conversations}
        assert names == {"mine", "other"}, "a refused request created a conversation"
        del client.messages[-1]
        assert client.say("Go on.").accounting["marker"] == "ok"


def test_a_turn_waits_while_another_session_saves_the_rows_of_its_slot(
    two_slots_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third session takes the slot of the first and saves its rows; the other slot is idle."""
    with proxy(two_slots_port, policy__budget=448, policy__writeback=False) as running:
        first, second = ChatClient(running.port, "first"), ChatClient(running.port, "second")
        for client in (first, second):
            client.say(f"Hello from {client.session}. {FILLER}")
        running.wait_for_background()
        gateway = running.gateway
        conversation = next(each for each in gateway.conversations if each.name == "first")
        run, saving, saved = BlockApi.run, threading.Event(), threading.Event()
        # For each turn of the first session, whether its rows were saved when it began.
        saved_before_turn: list[bool] = []

        async def slow_run(api: BlockApi, slot: int, action: str, body: Any) -> Any:
            call = json.loads(body) if isinstance(body, bytes) else body
            saves = action == "block-plan" and any(op["op"] == "save" for op in call["ops"])
            if saves and not saving.is_set():
                saving.set()
                await asyncio.to_thread(saved.wait, 60)
            return await run(api, slot, action, body)

        begin = conversation.session.begin

        def recording_begin(*args: Any, **kwargs: Any) -> Any:
            saved_before_turn.append(saved.is_set())
            return begin(*args, **kwargs)

        monkeypatch.setattr(BlockApi, "run", slow_run)
        conversation.session.begin = recording_begin  # type: ignore[method-assign]
        with ThreadPoolExecutor(2) as pool:
            third = pool.submit(ChatClient(running.port, "third").say, f"Hello. {FILLER}")
            until(saving.is_set)
            waiting = pool.submit(first.say, "Go on.")
            until(lambda: gateway.server.slots.pool.queued, "the turn waits")
            assert not saved_before_turn
            saved.set()
            turns = [third.result(), waiting.result()]
            assert [turn.accounting["marker"] for turn in turns] == ["ok", "ok"]
        assert saved_before_turn and all(saved_before_turn)
        assert running.metric("evoke_plan_failures_total", reason="books_differ") == 0
        assert turns[1].accounting["decoded"] < 60, "the saved rows were decoded, not recovered"


def test_a_readiness_check_does_not_probe_a_leased_slot(tmp_path: Path) -> None:
    """A probe saves a slot or decodes in it, and a request is about to use this one."""
    with Deployment(tmp_path).server_and_proxy() as running:
        server = running.gateway.server
        running.wait_for_background()
        ask(running.port, "GET", "/evoke/ready")
        # For each save, whether all slots were free.
        calls, idle_at_save = server.strategies.snapshots._api, list[bool]()
        save = calls.save

        async def recording_save(slot: int, name: str) -> Any:
            idle_at_save.append(server.slots.pool.idle())
            return await save(slot, name)

        calls.save = recording_save  # type: ignore[method-assign]
        # A request that has its slot and has not been forwarded yet: /slots lists it as idle.
        acquiring = server.slots.acquire("about to be forwarded", "")
        lease = asyncio.run_coroutine_threadsafe(acquiring, running.loop).result(60)
        server.strategies.snapshots.probe.forget()
        ready = json.loads(ask(running.port, "GET", "/evoke/ready").body)
        assert "snapshots" in ready["checks"] and not idle_at_save
        running.loop.call_soon_threadsafe(lease.release)
        until(server.slots.pool.idle)
        ask(running.port, "GET", "/evoke/ready")
        assert idle_at_save == [True]
