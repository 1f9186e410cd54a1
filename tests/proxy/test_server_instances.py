"""A restart of llama-server is another process, never a failed request."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conversation import FILLER, ChatClient, endless_stream
from fault_injector import FaultInjector, fault_injector
from harness import (
    RunningProxy,
    ask,
    llama_server,
    pool,
    process_on,
    proxy,
    server_binary,
    until,
)
from stock_deployment import SAVE_ALWAYS, Deployment, decoded, long_chat

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.demo.processes import free_port
from evoke_proxy.engine.server.slot_queue import SlotLease

BUDGET = 448
OPTIONS = ("-np", "2", "-no-kvu", "--evoke-ram", "64")


@pytest.fixture(scope="module")
def line(two_slots_port: int) -> Iterator[FaultInjector]:
    """A wire to a patched server with two slots."""
    with fault_injector(two_slots_port) as made:
        yield made


def _break_one(running: RunningProxy, line: FaultInjector) -> None:
    """A client's request is sent to llama-server, and its connection breaks."""
    line.break_at(b"GET /v1/models?break")
    assert ask(running.port, "GET", "/v1/models?break").status == 503
    line.break_at(b"")


def _started(running: RunningProxy) -> int:
    """How often the engine has taken the server for another one."""
    return len(_starts[running.port])


_starts: dict[int, list[object]] = {}


@contextmanager
def _watched(running: RunningProxy) -> Iterator[None]:
    """Count from here on what the engine takes for restarts."""
    starts = _starts[running.port] = []
    running.gateway.monitor.on_start.append(starts.append)
    yield


def test_a_broken_connection_takes_no_slot_from_a_running_turn(line: FaultInjector) -> None:
    with proxy(line.port, policy__budget=BUDGET) as running, _watched(running):
        with endless_stream(running.port) as first:
            (known,) = running.gateway.conversations
            epoch, slot = known.budgeted.epoch, running.gateway.server.slots.pool.slot_of(known.id)
            assert epoch is not None and slot is not None
            _break_one(running, line)
            # any request makes the engine ask what the server is
            ChatClient(running.port, "other").say("Hello.")
            assert (known.budgeted.epoch, running.gateway.server.slots.pool.slot_of(known.id)) == (
                epoch,
                slot,
            )
            second = ChatClient(running.port, "endless")
            second.messages.append({"role": "user", "content": "hello"})
            with ThreadPoolExecutor(1) as others:
                answer = others.submit(second.post)
                until(
                    lambda: running.gateway.server.slots.pool.queued == 1, "it waits for the first"
                )
                assert known.in_use == 2 and not answer.done()
                first.disconnect()
                assert answer.result().status == 200
        assert _started(running) == 0
        assert running.metric("evoke_upstream_errors_total", kind="upstream_unavailable") == 1


def test_a_broken_connection_keeps_the_state_of_a_conversation(line: FaultInjector) -> None:
    with proxy(line.port, policy__budget=BUDGET) as running, _watched(running):
        talk = ChatClient(running.port, "kept")
        for number in range(7):
            talk.say(f"Turn {number}. {FILLER}")
            running.wait_for_background()
            _break_one(running, line)
        accounting = talk.say("Go on.").accounting
        assert accounting["marker"] == "ok" and accounting["decoded"] < 30
        assert accounting["resident_before"] + accounting["recovered"] > BUDGET / 2
        assert _started(running) == 0
        assert running.metric("evoke_sessions") >= 1


def test_a_failure_in_planning_and_forwarding_counts_once(
    line: FaultInjector,
) -> None:
    with proxy(line.port, policy__budget=BUDGET) as running, _watched(running):
        talk = ChatClient(running.port, "kept")
        talk.say("Hello.")
        running.wait_for_background()
        line.break_at(b"POST ")
        talk.messages.append({"role": "user", "content": "Go on."})
        answer = talk.post()
        line.break_at(b"")
        assert answer.status == 503
        running.wait_for_background()
        found = running.gateway.metrics.upstream_errors.collect()[0].samples
        assert sum(sample.value for sample in found if sample.name.endswith("_total")) == 1
        assert talk.post().status == 200 and _started(running) == 0


def test_a_failed_request_whose_slot_cannot_be_polled_counts_once(line: FaultInjector) -> None:
    with proxy(line.port, policy__budget=BUDGET) as running, _watched(running):
        talk = ChatClient(running.port, "kept")
        talk.say("Hello.")
        running.wait_for_background()
        line.break_at(b"POST /v1/chat/completions", b"GET /slots/")
        talk.messages.append({"role": "user", "content": "Go on."})
        assert talk.post().status == 503
        running.wait_for_background()
        line.break_at()
        found = running.gateway.metrics.upstream_errors.collect()[0].samples
        assert sum(sample.value for sample in found if sample.name.endswith("_total")) == 1


HOSTILE: tuple[tuple[str, str, dict[str, str], bytes | None], ...] = (
    ("GET", "/health", {"X-Large": "a" * 40_000}, None),
    ("GET", "/health", {"X-Large": "a" * 60_000}, None),
    ("GET", "/props", {"X-Large": "a" * 12_000}, None),
    ("POST", "/tokenize", {"X-Large": "a" * 9_000}, b"{}"),
    ("PROPFIND", "/health", {}, None),
    ("GET", "/" + "a" * 9_000, {}, None),
    ("POST", "/no/such/call", {}, b"{}"),
    ("POST", "/slots/99?action=block-plan", {}, b"{}"),
    ("POST", "/v1/chat/completions", {}, b"{not JSON"),
    ("POST", "/completion", {"Content-Encoding": "gzip"}, b"not gzip"),
)


def _attack(port: int) -> None:
    """Requests of every kind that llama-server refuses, breaks off or answers oddly."""
    for method, target, headers, body in HOSTILE:
        with contextlib.suppress(OSError, http.client.HTTPException):
            ask(port, method, target, body, headers)
    for hostile in (
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 500000\r\n\r\n{",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
    ):
        _send_raw(port, hostile)


def _send_raw(port: int, data: bytes) -> None:
    """Send these bytes, wait for an answer or a moment, and hang up."""
    import socket

    with socket.create_connection(("127.0.0.1", port), timeout=0.3) as client:
        client.sendall(data)
        with contextlib.suppress(OSError):
            client.recv(65536)


def test_no_request_of_a_client_looks_like_a_restart_of_llama_server() -> None:
    with llama_server(server_binary(patched=True), *OPTIONS) as port:
        with proxy(port, policy__budget=BUDGET) as running, _watched(running):
            talk = ChatClient(running.port, "kept")
            for number in range(6):
                talk.say(f"Turn {number}. {FILLER}")
            for _ in range(3):
                _attack(running.port)
                running.wait_for_background()
                accounting = talk.say("Go on.").accounting
                assert accounting["marker"] == "ok" and accounting["decoded"] < 30
            assert _started(running) == 0
            kept = ChatClient(running.port, "kept")
            kept.messages = talk.messages
            assert ask(running.port, "GET", "/evoke/ready").status == 200


def test_no_request_of_a_client_opens_a_breaker(stock_port: int, two_slots_port: int) -> None:
    ports = {"stock": stock_port, "patched": two_slots_port}
    with pool(ports, pool__health_interval_s=0.2, pool__failures=1) as running:
        for _ in range(4):
            _attack(running.port)
            for name in ports:
                hostile = {"X-Evoke-Server": name, "X-Large": "a" * 50_000}
                with contextlib.suppress(OSError, http.client.HTTPException):
                    ask(running.port, "GET", "/health", headers=hostile)
            ChatClient(running.port).say("Hello.")
        rows = json.loads(ask(running.port, "GET", "/evoke/servers").body)["servers"]
        assert [(row["breaker"], row["takes"]) for row in rows] == [("closed", True)] * 2
        for name in ports:
            assert running.metric("evoke_server_breaker_openings_total", server=name) == 0


def test_an_aborted_upload_is_no_failure_of_llama_server(
    stock_port: int,
) -> None:
    with proxy(stock_port) as running, _watched(running):
        head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\n"
        for framed in (
            b"Content-Length: 500000\r\n\r\n" + b"a" * 100_000,
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\nzzz\r\n",
        ):
            _send_raw(running.port, head + framed)
        running.wait_for_background()
        found = running.gateway.metrics.upstream_errors.collect()[0].samples
        assert [sample for sample in found if sample.value and "_total" in sample.name] == []
        assert _started(running) == 0


def test_another_process_on_the_same_port_is_detected_before_planning() -> None:
    """It was replaced while nobody asked anything: the rendering names another instance."""
    port = free_port()
    with contextlib.ExitStack() as first:
        first.enter_context(llama_server(server_binary(patched=True), *OPTIONS, port=port))
        with proxy(port, policy__budget=BUDGET) as running, _watched(running):
            talk = ChatClient(running.port, "kept")
            for number in range(6):
                talk.say(f"Turn {number}. {FILLER}")
            running.wait_for_background()
            os.kill(process_on(port), signal.SIGKILL)
            first.close()
            with llama_server(server_binary(patched=True), *OPTIONS, port=port):
                accounting = talk.say("Go on.").accounting
                assert accounting["marker"] == "ok" and accounting["n_resident_peak"] <= BUDGET
                assert _started(running) == 1
                assert running.metric("evoke_plan_failures_total", reason="unknown_block") == 0
                for _ in range(2):
                    assert talk.say("Go on.").accounting["decoded"] < 30
                assert _started(running) == 1


def test_a_restarted_stock_server_is_detected_by_its_task_counter(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    deployment = Deployment(tmp_path_factory.mktemp("slots"), "", ("--cache-ram", "0"))
    port = free_port()
    with contextlib.ExitStack() as first:
        first.enter_context(deployment.server(port))
        with deployment.proxy(port, look_ahead=False) as running, _watched(running):
            chat = long_chat(300)
            chat.ask(running.port, "So what is it?")
            running.wait_for_background()
            chat.add_reply()
            with contextlib.suppress(OSError, http.client.HTTPException):
                ask(running.port, "GET", "/health", headers={"X-Large": "a" * 50_000})
            cached, new = chat.ask(running.port, "And now?")
            assert cached > new and _started(running) == 0
            running.wait_for_background()
            chat.add_reply()
            first.close()
            with deployment.server(port) as again:
                before = decoded(again)
                cached, new = chat.ask(running.port, "And after that?")
                assert cached > new and decoded(again) - before < 100, "it was restored"
                running.wait_for_background()


@contextmanager
def _one_at_a_time(running: RunningProxy) -> Iterator[Counter[str]]:
    """Fails when two turns of a session have slots at once, or two requests are in one slot; counts
    turns by session."""
    queue, upstream = running.gateway.server.slots, running.gateway.upstream
    acquire, returned, opened = queue.acquire, queue.returned, upstream.open
    exchange = queue.exchange
    sessions, turns, twice = dict[int, str](), Counter[str](), list[str]()
    slots = set[int]()

    async def acquired(session: str, *given: Any, **named: Any) -> SlotLease:
        lease = await acquire(session, *given, **named)
        if session in sessions.values() or lease.slot in sessions:
            twice.append(session)
        sessions[lease.slot] = session
        turns[session] += 1
        return lease

    def exchanged(lease: SlotLease, slot: int) -> bool:
        was = lease.slot
        if not exchange(lease, slot):
            return False
        sessions[slot] = sessions.pop(was)
        return True

    def given_back(slot: int) -> None:
        sessions.pop(slot)
        returned(slot)

    @asynccontextmanager
    async def noted(method: str, target: str, headers: Any, body: Any = None) -> AsyncIterator[Any]:
        slot = -1
        if target == "/v1/chat/completions" and isinstance(body, bytes):
            slot = json.loads(body).get("id_slot", -1)
        if slot in slots:
            twice.append(f"slot {slot}")
        slots.update({slot} - {-1})
        try:
            async with opened(method, target, headers, body) as reply:
                yield reply
        finally:
            slots.discard(slot)

    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(queue, "acquire", acquired)
        patched.setattr(queue, "returned", given_back)
        patched.setattr(queue, "exchange", exchanged)
        patched.setattr(upstream, "open", noted)
        yield turns
        running.wait_for_background()
    assert twice == [] and not sessions


@contextmanager
def _stock(folder: Path) -> Iterator[tuple[FaultInjector, dict[str, object]]]:
    """A wire to a stock server with two slots, settings of a proxy that keeps them."""
    settings = {f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()}
    settings |= {"snapshots__directory": str(folder), "snapshots__min_tokens": 32}
    deployment = Deployment(folder, "", ("-np", "2", "--no-cache-idle-slots"))
    with deployment.server() as port, fault_injector(port) as line:
        yield line, settings


@pytest.mark.parametrize(("kind", "seed"), [("patched", 1), ("patched", 2), ("stock", 3)])
def test_turns_of_a_session_never_run_concurrently(
    line: FaultInjector, kind: str, seed: int, tmp_path: Path
) -> None:
    """Connections of others and their own break, and clients leave."""
    with contextlib.ExitStack() as servers:
        settings: dict[str, object] = {"policy__budget": BUDGET}
        call = b"action=block-plan"
        if kind == "stock":
            line, settings = servers.enter_context(_stock(tmp_path))
            call = b"action=save"
        _check_interleaved_turns(line, call, settings, seed)


def _check_interleaved_turns(
    line: FaultInjector, call: bytes, settings: dict[str, object], seed: int
) -> None:
    """Turns of three sessions, two clients each, while connections break, those of a call too."""
    names = [f"session-{number}-{seed}" for number in range(3)]
    how = random.Random(seed)

    def turns(name: str, each: random.Random) -> None:
        talk = ChatClient(running.port, name)
        for number in range(8):
            said = f"{name}: {FILLER if each.random() < 0.5 else number}"
            body = talk.body(messages=[*talk.messages, {"role": "user", "content": said}])
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
            connection.request("POST", "/v1/chat/completions", body, talk.headers)
            if each.random() < 0.3:  # the client leaves, and asks again at once
                connection.close()
                continue
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.getresponse().read()
            connection.close()

    def breaks() -> None:
        while not done.is_set():
            line.break_at(b"GET /v1/models?break")
            ask(running.port, "GET", "/v1/models?break")
            line.break_at(call if how.random() < 0.2 else b"")
            done.wait(how.random() / 5)
        line.break_at(b"")

    done = threading.Event()
    with proxy(line.port, **settings) as running, _watched(running):
        with _one_at_a_time(running) as turns_of, ThreadPoolExecutor(8) as clients:
            breaking = clients.submit(breaks)
            each = [
                clients.submit(turns, name, random.Random(f"{seed}{name}{at}"))
                for name in names
                for at in range(2)
            ]
            for one in each:
                one.result()
            done.set()
            breaking.result()
        running.wait_for_background()
        assert max(turns_of.values()) > 2 and _started(running) == 0
        for name in names:
            assert ChatClient(running.port, name).say("Still there?").text
        running.wait_for_background()
        assert "*" not in repr(running.gateway.server.slots.pool), "every slot was given back"


def test_planning_waits_until_a_slot_used_by_another_client_is_idle(
    patched_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a proxy was killed: llama-server has not noticed yet that nobody listens."""
    with proxy(patched_port, policy__budget=BUDGET) as running:
        talk = ChatClient(running.port, "kept")
        talk.say(FILLER)
        running.wait_for_background()
        looked, planned = list[object](), list[object]()
        slot, run = BlockApi.slot, BlockApi.run

        async def looks(*given: Any, **named: Any) -> Any:
            looked.append(given)
            return await slot(*given, **named)

        async def runs(*given: Any) -> Any:
            planned.append(given)
            return await run(*given)

        monkeypatch.setattr(BlockApi, "slot", looks)
        monkeypatch.setattr(BlockApi, "run", runs)
        with endless_stream(patched_port) as somebody, ThreadPoolExecutor(1) as client:
            answering = client.submit(talk.say, "Go on.")
            until(lambda: len(looked) > 2 or planned)
            assert not planned, "the slot is not ours yet"
            somebody.disconnect()
            accounting = answering.result().accounting
        assert accounting["marker"] == "ok" and accounting["n_resident_peak"] <= BUDGET
        found = running.gateway.metrics.degraded.collect()[0].samples
        assert not any(sample.value for sample in found if sample.name.endswith("_total"))


def test_a_long_upload_that_is_refused_early_gets_the_refusal() -> None:
    """llama-server answers 401 before it has read the body, and closes the connection."""
    body = b'{"content":"' + b"a" * 20_000_000 + b'"}'
    with llama_server(server_binary(patched=False), "-np", "1", "--api-key", "right") as port:
        with proxy(port) as running, _watched(running):
            for target in ("/tokenize", "/completion", "/no/such/path") * 4:
                answer = ask(running.port, "POST", target, body, {"Authorization": "Bearer wrong"})
                assert answer.status == 401 and b"Invalid API Key" in answer.body
            found = running.gateway.metrics.upstream_errors.collect()[0].samples
            assert [sample for sample in found if sample.value and "_total" in sample.name] == []
            assert _started(running) == 0
