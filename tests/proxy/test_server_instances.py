"""Only another process of llama-server counts as its restart, never a failed request."""

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
def injector(two_slots_port: int) -> Iterator[FaultInjector]:
    """A fault injector in front of a patched server with two slots."""
    with fault_injector(two_slots_port) as started:
        yield started


def _break_connection(running: RunningProxy, injector: FaultInjector) -> None:
    """Send a client's request whose connection to llama-server breaks."""
    injector.break_at(b"GET /v1/models?break")
    assert ask(running.port, "GET", "/v1/models?break").status == 503
    injector.break_at(b"")


def _n_restarts(running: RunningProxy) -> int:
    """Return how many restarts of llama-server the proxy has detected."""
    return len(_starts[running.port])


_starts: dict[int, list[object]] = {}


@contextmanager
def _counting_restarts(running: RunningProxy) -> Iterator[None]:
    """Count the restarts of llama-server that the proxy detects."""
    starts = _starts[running.port] = []
    running.gateway.monitor.on_start.append(starts.append)
    yield


def test_a_running_turn_keeps_its_slot_when_another_connection_breaks(
    injector: FaultInjector,
) -> None:
    with proxy(injector.port, policy__budget=BUDGET) as running, _counting_restarts(running):
        with endless_stream(running.port) as first:
            (conversation,) = running.gateway.conversations
            slots = running.gateway.server.slots.pool
            epoch, slot = conversation.budgeted.epoch, slots.slot_of(conversation.id)
            assert epoch is not None and slot is not None
            _break_connection(running, injector)
            # Any request makes the proxy check which process the server is.
            ChatClient(running.port, "other").say("Hello.")
            assert (conversation.budgeted.epoch, slots.slot_of(conversation.id)) == (epoch, slot)
            second = ChatClient(running.port, "endless")
            second.messages.append({"role": "user", "content": "hello"})
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(second.post)
                until(lambda: slots.queued == 1, "the second turn waits for the first")
                assert conversation.in_use == 2 and not answer.done()
                first.disconnect()
                assert answer.result().status == 200
        assert _n_restarts(running) == 0
        assert running.metric("evoke_upstream_errors_total", kind="upstream_unavailable") == 1


def test_a_conversation_keeps_its_state_when_a_connection_breaks(injector: FaultInjector) -> None:
    with proxy(injector.port, policy__budget=BUDGET) as running, _counting_restarts(running):
        client = ChatClient(running.port, "kept")
        for number in range(7):
            client.say(f"Turn {number}. {FILLER}")
            running.wait_for_background()
            _break_connection(running, injector)
        accounting = client.say("Go on.").accounting
        assert accounting["marker"] == "ok" and accounting["decoded"] < 30
        assert accounting["resident_before"] + accounting["recovered"] > BUDGET / 2
        assert _n_restarts(running) == 0
        assert running.metric("evoke_sessions") >= 1


def test_a_request_that_fails_in_planning_and_forwarding_counts_as_one_error(
    injector: FaultInjector,
) -> None:
    with proxy(injector.port, policy__budget=BUDGET) as running, _counting_restarts(running):
        client = ChatClient(running.port, "kept")
        client.say("Hello.")
        running.wait_for_background()
        injector.break_at(b"POST ")
        client.messages.append({"role": "user", "content": "Go on."})
        answer = client.post()
        injector.break_at(b"")
        assert answer.status == 503
        running.wait_for_background()
        samples = running.gateway.metrics.upstream_errors.collect()[0].samples
        assert sum(sample.value for sample in samples if sample.name.endswith("_total")) == 1
        assert client.post().status == 200 and _n_restarts(running) == 0


def test_a_failed_request_whose_slot_cannot_be_polled_counts_as_one_error(
    injector: FaultInjector,
) -> None:
    with proxy(injector.port, policy__budget=BUDGET) as running, _counting_restarts(running):
        client = ChatClient(running.port, "kept")
        client.say("Hello.")
        running.wait_for_background()
        injector.break_at(b"POST /v1/chat/completions", b"GET /slots/")
        client.messages.append({"role": "user", "content": "Go on."})
        assert client.post().status == 503
        running.wait_for_background()
        injector.break_at()
        samples = running.gateway.metrics.upstream_errors.collect()[0].samples
        assert sum(sample.value for sample in samples if sample.name.endswith("_total")) == 1


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


# A path whose body is forwarded while it arrives, not read before.
STREAMED = b"/no/such/call"


def _attack(port: int) -> None:
    """Send requests that llama-server refuses, breaks off or answers in an unusual way."""
    for method, target, headers, body in HOSTILE:
        with contextlib.suppress(OSError, http.client.HTTPException):
            ask(port, method, target, body, headers)
    for path in (b"/tokenize", STREAMED):
        for rest in (
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"Content-Length: 500000\r\n\r\n{",
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
        ):
            _send_raw(port, b"POST %b HTTP/1.1\r\nHost: a\r\n%b" % (path, rest))


def _send_raw(port: int, data: bytes) -> None:
    """Send bytes, wait 0.3 s for an answer, and disconnect."""
    import socket

    with socket.create_connection(("127.0.0.1", port), timeout=0.3) as client:
        client.sendall(data)
        with contextlib.suppress(OSError):
            client.recv(65536)


def test_no_request_of_a_client_counts_as_a_restart_of_llama_server() -> None:
    with llama_server(server_binary(patched=True), *OPTIONS) as port:
        with proxy(port, policy__budget=BUDGET) as running, _counting_restarts(running):
            client = ChatClient(running.port, "kept")
            for number in range(6):
                client.say(f"Turn {number}. {FILLER}")
            for _ in range(3):
                _attack(running.port)
                running.wait_for_background()
                accounting = client.say("Go on.").accounting
                assert accounting["marker"] == "ok" and accounting["decoded"] < 30
            assert _n_restarts(running) == 0
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


@pytest.mark.parametrize("path", [b"/tokenize", STREAMED])
def test_an_aborted_upload_does_not_count_as_an_upstream_error(
    stock_port: int, path: bytes
) -> None:
    with proxy(stock_port) as running, _counting_restarts(running):
        head = b"POST %b HTTP/1.1\r\nHost: a\r\n" % path
        for rest in (
            b"Content-Length: 500000\r\n\r\n" + b"a" * 100_000,
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\nzzz\r\n",
        ):
            _send_raw(running.port, head + rest)
        running.wait_for_background()
        samples = running.gateway.metrics.upstream_errors.collect()[0].samples
        assert [sample for sample in samples if sample.value and "_total" in sample.name] == []
        assert _n_restarts(running) == 0


def test_a_restart_between_two_turns_is_detected_before_planning() -> None:
    """The rendering of the prompt has another instance id."""
    port = free_port()
    with contextlib.ExitStack() as first:
        first.enter_context(llama_server(server_binary(patched=True), *OPTIONS, port=port))
        with proxy(port, policy__budget=BUDGET) as running, _counting_restarts(running):
            client = ChatClient(running.port, "kept")
            for number in range(6):
                client.say(f"Turn {number}. {FILLER}")
            running.wait_for_background()
            os.kill(process_on(port), signal.SIGKILL)
            first.close()
            with llama_server(server_binary(patched=True), *OPTIONS, port=port):
                accounting = client.say("Go on.").accounting
                assert accounting["marker"] == "ok" and accounting["n_resident_peak"] <= BUDGET
                assert _n_restarts(running) == 1
                assert running.metric("evoke_plan_failures_total", reason="unknown_block") == 0
                for _ in range(2):
                    assert client.say("Go on.").accounting["decoded"] < 30
                assert _n_restarts(running) == 1


def test_a_restarted_stock_server_is_detected_by_its_task_counter(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    deployment = Deployment(tmp_path_factory.mktemp("slots"), "", ("--cache-ram", "0"))
    port = free_port()
    with contextlib.ExitStack() as first:
        first.enter_context(deployment.server(port))
        with deployment.proxy(port, look_ahead=False) as running, _counting_restarts(running):
            placement = running.gateway.server.strategies.snapshots._placement
            forget, detected = placement.forget_contents, list[bool]()

            def recording_forget() -> None:
                detected.append(True)
                forget()

            placement.forget_contents = recording_forget  # type: ignore[method-assign]
            chat = long_chat(300)
            chat.ask(running.port, "So what is it?")
            running.wait_for_background()
            chat.add_reply()
            with contextlib.suppress(OSError, http.client.HTTPException):
                ask(running.port, "GET", "/health", headers={"X-Large": "a" * 50_000})
            cached, new = chat.ask(running.port, "And now?")
            assert cached > new and _n_restarts(running) == 0 and not detected
            running.wait_for_background()
            chat.add_reply()
            first.close()
            with deployment.server(port):
                before = decoded(port)
                cached, new = chat.ask(running.port, "And after that?")
                assert cached > new and decoded(port) - before < 100, "it was not restored"
                running.wait_for_background()
                assert len(detected) == 1


@contextmanager
def _checking_exclusivity(running: RunningProxy) -> Iterator[Counter[str]]:
    """Check that no two turns of a session, and no two requests of a slot, run at once.

    Yields the number of turns by session.
    """
    queue, upstream = running.gateway.server.slots, running.gateway.upstream
    acquire, returned, original_open = queue.acquire, queue.returned, upstream.open
    exchange = queue.exchange
    sessions, turns, violations = dict[int, str](), Counter[str](), list[str]()
    slots = set[int]()

    async def checked_acquire(session: str, *args: Any, **kwargs: Any) -> SlotLease:
        lease = await acquire(session, *args, **kwargs)
        if session in sessions.values() or lease.slot in sessions:
            violations.append(session)
        sessions[lease.slot] = session
        turns[session] += 1
        return lease

    def checked_exchange(lease: SlotLease, slot: int) -> bool:
        previous = lease.slot
        if not exchange(lease, slot):
            return False
        sessions[slot] = sessions.pop(previous)
        return True

    def checked_returned(slot: int) -> None:
        sessions.pop(slot)
        returned(slot)

    @asynccontextmanager
    async def checked_open(
        method: str, target: str, headers: Any, body: Any = None
    ) -> AsyncIterator[Any]:
        slot = -1
        if target == "/v1/chat/completions" and isinstance(body, bytes):
            slot = json.loads(body).get("id_slot", -1)
        if slot in slots:
            violations.append(f"slot {slot}")
        slots.update({slot} - {-1})
        try:
            async with original_open(method, target, headers, body) as reply:
                yield reply
        finally:
            slots.discard(slot)

    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(queue, "acquire", checked_acquire)
        patched.setattr(queue, "returned", checked_returned)
        patched.setattr(queue, "exchange", checked_exchange)
        patched.setattr(upstream, "open", checked_open)
        yield turns
        running.wait_for_background()
    assert violations == [] and not sessions


@contextmanager
def _stock(folder: Path) -> Iterator[tuple[FaultInjector, dict[str, object]]]:
    """Start a stock server; yields a fault injector in front of it, and settings for snapshots."""
    settings = {f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()}
    settings |= {"snapshots__directory": str(folder), "snapshots__min_tokens": 32}
    deployment = Deployment(folder, "", ("-np", "2", "--no-cache-idle-slots"))
    with deployment.server() as port, fault_injector(port) as injector:
        yield injector, settings


@pytest.mark.parametrize(("kind", "seed"), [("patched", 1), ("patched", 2), ("stock", 3)])
def test_turns_of_a_session_never_run_concurrently(
    injector: FaultInjector, kind: str, seed: int, tmp_path: Path
) -> None:
    """Connections of these and other requests break, and clients disconnect."""
    with contextlib.ExitStack() as servers:
        settings: dict[str, object] = {"policy__budget": BUDGET}
        call = b"action=block-plan"
        if kind == "stock":
            injector, settings = servers.enter_context(_stock(tmp_path))
            call = b"action=save"
        _check_interleaved_turns(injector, call, settings, seed)


def _check_interleaved_turns(
    injector: FaultInjector, call: bytes, settings: dict[str, object], seed: int
) -> None:
    """Run turns of three sessions with two clients each, while connections break.

    Args:
        call: The request of the proxy whose connection also breaks.
    """
    names = [f"session-{number}-{seed}" for number in range(3)]
    rng = random.Random(seed)

    def turns(name: str, client_rng: random.Random) -> None:
        client = ChatClient(running.port, name)
        for number in range(8):
            text = f"{name}: {FILLER if client_rng.random() < 0.5 else number}"
            body = client.body(messages=[*client.messages, {"role": "user", "content": text}])
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
            connection.request("POST", "/v1/chat/completions", body, client.headers)
            if client_rng.random() < 0.3:  # disconnect, and send the next turn at once
                connection.close()
                continue
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.getresponse().read()
            connection.close()

    def break_connections() -> None:
        while not done.is_set():
            injector.break_at(b"GET /v1/models?break")
            ask(running.port, "GET", "/v1/models?break")
            injector.break_at(call if rng.random() < 0.2 else b"")
            done.wait(rng.random() / 5)
        injector.break_at(b"")

    done = threading.Event()
    with proxy(injector.port, **settings) as running, _counting_restarts(running):
        with _checking_exclusivity(running) as turns_of, ThreadPoolExecutor(8) as pool:
            breaking = pool.submit(break_connections)
            futures = [
                pool.submit(turns, name, random.Random(f"{seed}{name}{number}"))
                for name in names
                for number in range(2)
            ]
            for future in futures:
                future.result()
            done.set()
            breaking.result()
        running.wait_for_background()
        assert max(turns_of.values()) > 2 and _n_restarts(running) == 0
        for name in names:
            assert ChatClient(running.port, name).say("Still there?").text
        running.wait_for_background()
        assert "*" not in repr(running.gateway.server.slots.pool), "a slot was not released"


def test_planning_waits_until_a_slot_used_by_another_client_is_idle(
    patched_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a proxy was killed, when llama-server still runs its request."""
    with proxy(patched_port, policy__budget=BUDGET) as running:
        client = ChatClient(running.port, "kept")
        client.say(FILLER)
        running.wait_for_background()
        polls, plans = list[object](), list[object]()
        slot, run = BlockApi.slot, BlockApi.run

        async def recording_slot(*args: Any, **kwargs: Any) -> Any:
            polls.append(args)
            return await slot(*args, **kwargs)

        async def recording_run(*args: Any) -> Any:
            plans.append(args)
            return await run(*args)

        monkeypatch.setattr(BlockApi, "slot", recording_slot)
        monkeypatch.setattr(BlockApi, "run", recording_run)
        with endless_stream(patched_port) as stream, ThreadPoolExecutor(1) as pool:
            answering = pool.submit(client.say, "Go on.")
            until(lambda: len(polls) > 2 or plans)
            assert not plans, "a plan ran in a busy slot"
            stream.disconnect()
            accounting = answering.result().accounting
        assert accounting["marker"] == "ok" and accounting["n_resident_peak"] <= BUDGET
        samples = running.gateway.metrics.degraded.collect()[0].samples
        assert not any(sample.value for sample in samples if sample.name.endswith("_total"))


def test_a_client_gets_a_refusal_that_comes_before_the_end_of_its_upload() -> None:
    """llama-server answers 401 before it has read the body, and closes the connection."""
    body = b'{"content":"' + b"a" * 20_000_000 + b'"}'
    with llama_server(server_binary(patched=False), "-np", "1", "--api-key", "right") as port:
        with proxy(port) as running, _counting_restarts(running):
            for target in ("/tokenize", "/completion", "/no/such/path") * 4:
                answer = ask(running.port, "POST", target, body, {"Authorization": "Bearer wrong"})
                assert answer.status == 401 and b"Invalid API Key" in answer.body
            samples = running.gateway.metrics.upstream_errors.collect()[0].samples
            assert [sample for sample in samples if sample.value and "_total" in sample.name] == []
            assert _n_restarts(running) == 0
