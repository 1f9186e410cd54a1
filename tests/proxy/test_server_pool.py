"""Several llama-servers behind one proxy: routing, failover, draining, metrics, the admin page."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from chromium import browser, tab
from conversation import FILLER, ChatClient, endless_stream
from fake_upstream import Exchange, fake_upstream, response
from fault_injector import fault_injector
from harness import (
    Answer,
    RunningProxy,
    ask,
    llama_server,
    pool,
    process_on,
    server_binary,
    until,
)
from prometheus_client.parser import text_string_to_metric_families
from stock_deployment import SAVE_ALWAYS, Deployment, decoded

from bench.random_models import SHAPES, ensure
from evoke_proxy.demo.processes import free_port

JSON = {"Content-Type": "application/json"}
LONG = " ".join(f"w{number % 211}" for number in range(160))
# Short health checks and backoffs.
EAGER = {"pool__health_interval_s": 0.2, "pool__backoff_s": 0.2, "pool__backoff_max_s": 0.4}


@dataclass(slots=True)
class ServerPair:
    """Two servers by name, each of which can be killed and restarted on its port.

    Attributes:
        start: Starts a server on a port.
        ports: The port of each server.
        running: The running servers.
    """

    start: Callable[[int], Any]
    ports: dict[str, int] = field(default_factory=dict)
    running: dict[str, ExitStack] = field(default_factory=dict)

    def up(self, name: str) -> None:
        self.running[name] = ExitStack()
        self.ports[name] = self.running[name].enter_context(self.start(self.ports.get(name, 0)))

    def kill(self, name: str) -> None:
        os.kill(process_on(self.ports[name]), signal.SIGKILL)
        self.running.pop(name).close()

    def other(self, name: str) -> str:
        (other,) = self.ports.keys() - {name}
        return other


@contextmanager
def _start_pair(start: Callable[[int], Any]) -> Iterator[ServerPair]:
    deployment = ServerPair(start)
    starting = [threading.Thread(target=deployment.up, args=(name,)) for name in ("a", "b")]
    deployment.ports = {"a": free_port(), "b": free_port()}
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    try:
        yield deployment
    finally:
        for name in list(deployment.running):
            deployment.running[name].close()


def _say(port: int, messages: list[dict[str, Any]], text: str, session: str = "") -> Answer:
    messages.append({"role": "user", "content": text})
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = JSON | ({"X-Evoke-Session": session} if session else {})
    answer = ask(port, "POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    assert answer.status == 200, answer.body
    content = json.loads(answer.body)["choices"][0]["message"]["content"]
    messages.append({"role": "assistant", "content": content})
    return answer


def _server(running: RunningProxy, name: str) -> dict[str, Any]:
    rows = json.loads(ask(running.port, "GET", "/evoke/servers").body)["servers"]
    (row,) = [row for row in rows if row["name"] == name]
    return dict(row)


def _drain(running: RunningProxy, name: str, draining: bool) -> dict[str, Any]:
    body = json.dumps({"draining": draining}).encode()
    answer = ask(running.port, "PATCH", f"/evoke/servers/{name}", body, JSON)
    assert answer.status == 200, answer.body
    return dict(json.loads(answer.body))


def _server_name(answer: Answer) -> str:
    """Return the name of the server that gave an answer."""
    return answer.headers["x-evoke-server"]


def _n_restored(running: RunningProxy) -> float:
    return running.metric("evoke_snapshot_restores_total", result="useful")


def _cached_share(answer: Answer) -> float:
    """Return the share of the prompt that was not decoded."""
    timings = json.loads(answer.body)["timings"]
    return float(timings["cache_n"] / (timings["cache_n"] + timings["prompt_n"]))


def test_conversations_continue_at_another_server_when_theirs_dies(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.mkdir()
    stock = Deployment(slots, "", ("--cache-ram", "0"))
    settings = {f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()}
    settings |= {"snapshots__directory": str(slots), "snapshots__min_tokens": 64}
    settings |= {"snapshots__look_ahead": False, **EAGER}
    with _start_pair(stock.server) as deployment, pool(deployment.ports, **settings) as running:
        port = running.port
        # New conversations are distributed evenly, and each stays at its server.
        histories: dict[str, list[dict[str, Any]]] = {name: [] for name in ("", "s1", "s2", "s3")}
        at = {}
        for name, messages in histories.items():
            at[name] = _server_name(_say(port, messages, f"{name}: {LONG}", name))
            running.wait_for_background()
        assert sorted(at.values()) == ["a", "a", "b", "b"]
        for name, messages in histories.items():
            assert _server_name(_say(port, messages, "Go on.", name)) == at[name]
            running.wait_for_background()

        # After its server is killed, a conversation continues at the other from its snapshot.
        killed = at["s1"]
        deployment.kill(killed)
        other = deployment.other(killed)
        before = decoded(deployment.ports[other])
        answer = _say(port, histories["s1"], "And then?", "s1")
        assert _server_name(answer) == other and _cached_share(answer) > 0.5
        timings = json.loads(answer.body)["timings"]
        n_prompt = timings["cache_n"] + timings["prompt_n"]
        assert decoded(deployment.ports[other]) - before < n_prompt / 2
        assert _n_restored(running) >= 1
        assert running.metric("evoke_server_failovers_total", server=killed) >= 1
        running.wait_for_background()
        fields = {"messages": histories["s1"][:-1], "max_tokens": 12, "temperature": 0}
        body = json.dumps(fields | {"ignore_eos": True, "cache_prompt": False}).encode()
        direct = ask(deployment.ports[other], "POST", "/v1/chat/completions", body, JSON)
        content = json.loads(direct.body)["choices"][0]["message"]["content"]
        assert content == histories["s1"][-1]["content"]
        (row,) = [s for s in _sessions(running) if s["name"] == "s1"]
        assert row["server"] == other and row["turns"] == 3, "it became another session"

        # The breaker of the killed server opens, and closes once the server runs again.
        until(lambda: _server(running, killed)["breaker"] == "open")
        assert ask(port, "GET", "/evoke/ready").status == 200
        deployment.up(killed)
        until(lambda: _server(running, killed)["breaker"] == "closed")
        assert running.metric("evoke_server_breaker_openings_total", server=killed) >= 1
        assert running.metric("evoke_server_up", server=killed) == 1
        assert _server_name(_say(port, histories["s1"], "Still there?", "s1")) == other, (
            "the conversation moved back"
        )
        running.wait_for_background()

        # A draining server gets no requests. Its conversations move, restored from snapshots.
        assert _drain(running, other, True)["draining"]
        restored = _n_restored(running)
        answer = _say(port, histories["s1"], "And now?", "s1")
        assert (
            _server_name(answer) == killed
            and _cached_share(answer) > 0.5
            and _n_restored(running) > restored
        )
        assert running.metric("evoke_sessions_moved_total", reason="drained") == 1
        assert _server_name(_say(port, [], f"A new one. {LONG}")) == killed
        assert not _drain(running, other, False)["draining"]

        for name in ("a", "b"):
            deployment.kill(name)
        _check_all_down(running)


def _sessions(running: RunningProxy) -> list[dict[str, Any]]:
    return list(json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"])


def _check_all_down(running: RunningProxy) -> None:
    """Check errors and readiness while both servers are down."""
    until(lambda: all(_server(running, name)["breaker"] == "open" for name in ("a", "b")))
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        answer = ask(running.port, "POST", path, body, JSON)
        assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
        error = json.loads(answer.body)
        if path == "/v1/messages":
            assert error["type"] == "error" and error["error"]["type"] == "overloaded_error"
        else:
            assert error["error"]["code"] == "no_server"
        assert "0 of 2 llama-servers" in error["error"]["message"]
    ready = ask(running.port, "GET", "/evoke/ready")
    assert ready.status == 503 and json.loads(ready.body)["failed"] == ["upstream"]


@pytest.fixture(scope="module")
def mixed_pool(stock_port: int, patched_port: int) -> Iterator[RunningProxy]:
    """A proxy in front of a stock server, a patched one, and one that serves another model."""

    async def serve_other_model(exchange: Exchange) -> None:
        bodies = {"/health": b"{}", "/v1/models": b'{"data":[{"id":"x","meta":{"n_params":7}}]}'}
        path = exchange.head.split()[1].decode()
        await exchange.send(response(bodies.get(path, b"[]"), b"application/json"))

    with fake_upstream(serve_other_model) as other:
        ports = {"stock": stock_port, "patched": patched_port, "foreign": other.port}
        with pool(ports, **EAGER) as running:
            yield running


def test_a_server_of_another_model_gets_no_requests(mixed_pool: RunningProxy) -> None:
    assert _server(mixed_pool, "foreign")["foreign"] and not _server(mixed_pool, "foreign")["takes"]
    assert _server(mixed_pool, "stock")["takes"] and _server(mixed_pool, "patched")["takes"]
    assert mixed_pool.metric("evoke_server_foreign", server="foreign") == 1
    ready = json.loads(ask(mixed_pool.port, "GET", "/evoke/ready").body)
    assert ready["status"] == "ready" and ready["mode"] == "mixed"
    assert "foreign serves another model" in ready["checks"]["upstream"]["detail"]
    status = json.loads(ask(mixed_pool.port, "GET", "/evoke/status").body)
    assert [server["name"] for server in status["servers"]] == ["stock", "patched", "foreign"]


def _fake_server(name: str, loading: set[str], n_params: Mapping[str, int]) -> Any:
    """Start a fake server that can load its model, and that closes the connection for `/break`.

    Args:
        name: Its name in `loading` and `n_params`.
        loading: The names of servers that answer 503 because they are loading.
        n_params: The number of parameters of each server's model, 7 by default.
    """
    busy = response(b'{"error":{"message":"Loading model"}}', status=b"503 Service Unavailable")

    async def behave(exchange: Exchange) -> None:
        path = exchange.head.split()[1].decode()
        if path == "/break":
            exchange.writer.close()
            return
        models = {"data": [{"id": "x", "meta": {"n_params": n_params.get(name, 7)}}]}
        body = json.dumps(models).encode() if path == "/v1/models" else b"{}"
        await exchange.send(busy if name in loading else response(body, b"application/json"))

    return fake_upstream(behave)


def test_a_server_that_failed_is_identified_again_before_it_gets_requests() -> None:
    loading, n_params = {"a"}, dict[str, int]()
    with _fake_server("a", loading, n_params) as a, _fake_server("b", loading, n_params) as b:
        with pool({"a": a.port, "b": b.port}, **EAGER) as running:
            until(lambda: _server(running, "a")["breaker"] == "open")
            a.props = b'{"total_slots":3}'  # it returns with other slots
            loading.clear()
            until(lambda: _server(running, "a")["takes"])
            assert _server(running, "a")["slots"] == 3
            n_params["a"] = 8  # another model, without a failed health check
            broken = ask(running.port, "GET", "/break", headers={"X-Evoke-Server": "a"})
            assert broken.status == 503
            until(lambda: _server(running, "a")["foreign"])
            assert _server(running, "b")["takes"] and not _server(running, "a")["takes"]


def test_a_server_that_loads_its_model_gets_no_requests() -> None:
    """While it loads it answers 503, which clients get only if no other server is available."""
    loading: set[str] = set()
    with _fake_server("a", loading, {}) as a, _fake_server("b", loading, {}) as b:
        b.props = b'{"total_slots":1,"is_sleeping":true}'
        with pool({"a": a.port, "b": b.port}, **EAGER) as running:
            body = b'{"messages":[{"role":"user","content":"Hi"}]}'
            headers = JSON | {"X-Evoke-Session": "mine"}

            def at(target: str) -> str:
                answer = ask(running.port, "POST", target, body, headers)
                assert answer.status == 200
                return _server_name(answer)

            assert at("/v1/chat/completions") == "a"
            loading.add("a")
            for target in ("/v1/chat/completions", "/v1/chat/completions/input_tokens"):
                assert at(target) == "b"
            named = ask(running.port, "GET", "/slots", headers={"X-Evoke-Server": "a"})
            assert named.status == 503 and _server_name(named) == "a"
            until(lambda: _server(running, "a")["breaker"] == "open")
            heads = [exchange.head.split()[1] for exchange in b.requests]
            assert b"/lora-adapters" not in heads, "this request wakes a sleeping server"
            loading.add("b")
            slots = ask(running.port, "GET", "/slots")
            assert slots.status == 503 and _server_name(slots) == "b", (
                "any server may answer this path"
            )
            refused = ask(running.port, "POST", "/v1/chat/completions", body, headers)
            assert refused.status == 503 and b"no_server" in refused.body


def test_concurrent_requests_are_distributed_over_servers(mixed_pool: RunningProxy) -> None:
    """No request waits while a server is idle."""
    with (
        endless_stream(mixed_pool.port, "one") as first,
        endless_stream(mixed_pool.port, "other") as second,
    ):
        names = [each.answer.headers["x-evoke-server"] for each in (first, second)]
        assert all(_server(mixed_pool, name)["in_flight"] for name in names)
    assert sorted(names) == ["patched", "stock"]
    mixed_pool.wait_until_idle()


def test_requests_that_change_one_server_must_name_it(mixed_pool: RunningProxy) -> None:
    for name in ("stock", "patched"):
        answer = ask(mixed_pool.port, "GET", "/props", headers={"X-Evoke-Server": name})
        assert _server_name(answer) == name
        assert ("evoke" in json.loads(answer.body)) == (name == "patched")
    assert _server_name(ask(mixed_pool.port, "GET", "/slots")) in ("stock", "patched")
    refused = ask(mixed_pool.port, "POST", "/slots/0?action=erase", b"{}", JSON)
    assert refused.status == 400 and json.loads(refused.body)["error"]["code"] == "server_needed"
    named = JSON | {"X-Evoke-Server": "patched"}
    erased = ask(mixed_pool.port, "POST", "/slots/0?action=erase", b"{}", named)
    assert _server_name(erased) == "patched" and erased.status in (200, 501)
    unknown = ask(mixed_pool.port, "GET", "/props", headers={"X-Evoke-Server": "none"})
    assert unknown.status == 404
    assert (
        ask(mixed_pool.port, "PATCH", "/evoke/servers/none", b'{"draining":true}', JSON).status
        == 404
    )


def test_metrics_of_all_servers_are_merged(mixed_pool: RunningProxy) -> None:
    text = ask(mixed_pool.port, "GET", "/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    servers = [s.labels["server"] for s in families["llamacpp:requests_processing"].samples]
    assert sorted(servers) == ["patched", "stock"]
    (up,) = families["evoke_upstream_up"].samples
    assert up.value == 1
    assert {s.labels["server"] for s in families["evoke_server_up"].samples} == {
        *("stock", "patched", "foreign")
    }


def test_the_page_lists_servers_and_drains_one(mixed_pool: RunningProxy) -> None:
    program = browser()
    if program is None:
        pytest.skip("needs Chromium; on Debian: apt-get install chromium")
    assert asyncio.run(_drain_and_resume_on_page(mixed_pool, program)) == []


async def _drain_and_resume_on_page(running: RunningProxy, program: str) -> Sequence[str]:
    """Drain and resume a server on the admin page; returns the errors of the page."""
    text = "document.querySelector('#servers')?.innerText"
    button = "document.querySelector('#servers [data-server=stock]')"
    async with tab(program) as page:
        await page.set_viewport(360, 740)
        await page.open(f"http://127.0.0.1:{running.port}/evoke/")
        await page.wait_for(f"{text}?.includes('serves another model')")
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        for words, drains in (("Resume", True), ("Drain", False)):
            await page.evaluate(f"{button}.click()")
            await page.wait_for(f"{button}?.innerText === '{words}'")
            server = await asyncio.to_thread(_server, running, "stock")
            assert server["draining"] is drains and server["takes"] is not drains
        return page.errors


def test_a_migrated_session_keeps_its_budget_and_decodes_what_was_omitted() -> None:
    def start(port: int) -> Any:
        options = ("-np", "1", "--evoke-ram", "64", "--slots")
        return llama_server(server_binary(patched=True), *options, port=port)

    with _start_pair(start) as pair, pool(pair.ports, **EAGER) as running:
        client = ChatClient(running.port, "held", {"evoke_budget": 320, "evoke_pinned": False})
        for number in range(5):
            turn = client.say(f"Turn {number}. {FILLER}")
        assert turn.accounting["omitted"] > 0
        home = turn.headers["x-evoke-server"]
        body = json.dumps({"budget": 384}).encode()
        (row,) = _sessions(running)
        assert ask(running.port, "PATCH", f"/evoke/sessions/{row['id']}", body, JSON).status == 200

        pair.kill(home)
        turn = client.say("What was that about?")
        assert turn.headers["x-evoke-server"] == pair.other(home)
        assert turn.accounting["resident_before"] == turn.accounting["recovered"] == 0
        _check_accounting(turn.accounting)
        _check_accounting(client.say("And then?").accounting)
        (after,) = _sessions(running)
        assert (after["id"], after["turns"], after["own_budget"]) == (row["id"], 7, True)
        assert after["server"] == pair.other(home) and after["limit"] == 384

        pair.up(home)
        until(lambda: _server(running, home)["takes"])
        answer, direct, _ = _answer_after_failover(pair, running, pair.kill)
        assert answer == direct


def test_requests_that_wait_at_a_hanging_server_fail_over() -> None:
    def start(port: int) -> Any:
        return llama_server(server_binary(patched=False), "-np", "1", "--slots", port=port)

    def hang(name: str) -> None:
        os.kill(process_on(pair.ports[name]), signal.SIGSTOP)

    with (
        _start_pair(start) as pair,
        pool(pair.ports, **EAGER, pool__health_timeout_s=0.5) as running,
    ):
        try:
            answer, direct, wasted_s = _answer_after_failover(pair, running, hang)
            assert answer == direct
            assert running.metric("evoke_ttft_seconds_sum", path="relay") > wasted_s > 1.0
        finally:
            for port in pair.ports.values():
                os.kill(process_on(port), signal.SIGCONT)


def test_a_request_fails_over_when_its_server_dies_after_the_head(patched_port: int) -> None:
    """The proxy adds `usage.evoke` to the reply, so it sends nothing before it is complete."""
    with ExitStack() as stack:
        injectors = {n: stack.enter_context(fault_injector(patched_port)) for n in ("a", "b")}
        ports = {name: injector.port for name, injector in injectors.items()}
        running = stack.enter_context(pool(ports, policy__budget=384))
        messages: list[dict[str, Any]] = []
        home = _server_name(_say(running.port, messages, f"Hello. {LONG}", "cut"))
        running.wait_for_background()
        injectors[home].cut_reply_to(b"POST /v1/chat/completions")
        answer = _say(running.port, messages, "Go on.", "cut")
        assert injectors[home].fired.is_set()
        assert {_server_name(answer), home} == {"a", "b"} and "evoke" in json.loads(answer.body)[
            "usage"
        ]
        assert running.metric("evoke_server_failovers_total", server=home) == 1


def test_a_migrated_hybrid_session_is_restored_from_its_snapshot(tmp_path: Path) -> None:
    def start(port: int) -> Any:
        options = ["-np", "1", "--evoke-ram", "64", "--slot-save-path", str(tmp_path)]
        model = ensure(SHAPES["tiny-jamba"])
        return llama_server(server_binary(patched=True), *options, port=port, model=model)

    settings = {"snapshots__directory": str(tmp_path), "policy__budget": 384, **EAGER}
    with _start_pair(start) as pair, pool(pair.ports, **settings) as running:
        client = ChatClient(running.port, "held")
        for number in range(5):
            turn = client.say(f"Turn {number}. {FILLER}")
        assert turn.accounting["omitted"] > 0
        running.wait_for_background()
        home = turn.headers["x-evoke-server"]
        pair.kill(home)
        turn = client.say("And now?")
        assert turn.headers["x-evoke-server"] == pair.other(home)
        assert turn.accounting["decoded"] < 30 and turn.accounting["omitted"] > 0
        _check_accounting(turn.accounting)
        assert _n_restored(running) == 1


def _check_accounting(accounting: Any) -> None:
    kinds = ("decoded", "recovered", "resident_before", "omitted")
    assert sum(accounting[kind] for kind in kinds) == accounting["n_prompt"]
    assert accounting["n_resident_peak"] <= 384


def _answer_after_failover(
    pair: ServerPair, running: RunningProxy, fail: Callable[[str], None]
) -> tuple[str, str, float]:
    """Make a server fail while it decodes a prompt, so that the other one answers.

    Returns the answer, the answer of the other server to the same direct request, and the seconds
    between the failure and its detection.
    """
    messages: list[dict[str, Any]] = []
    answers: list[Answer] = []
    text = f"{LONG} " * 8 + "So?"
    request = threading.Thread(
        target=lambda: answers.append(_say(running.port, messages, text, "long"))
    )
    request.start()
    until(lambda: any(_server(running, name)["in_flight"] for name in pair.ports))
    (home,) = [name for name in pair.ports if _server(running, name)["in_flight"]]
    until(lambda: json.loads(ask(pair.ports[home], "GET", "/slots").body)[0]["is_processing"])
    began = time.monotonic()
    fail(home)
    until(lambda: not _server(running, home)["in_flight"])
    wasted_s = time.monotonic() - began
    request.join()
    assert _server_name(answers[0]) == pair.other(home)
    fields = {"messages": messages[:-1], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**fields, "cache_prompt": False}).encode()
    direct = ask(pair.ports[pair.other(home)], "POST", "/v1/chat/completions", body, JSON)
    content = json.loads(direct.body)["choices"][0]["message"]["content"]
    return messages[-1]["content"], content, wasted_s
