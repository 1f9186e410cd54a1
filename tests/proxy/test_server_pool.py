"""Several llama-servers behind one proxy: routing, failover, draining."""

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
from conversation import FILLER, ChatClient, endless
from fake_upstream import Exchange, fake_upstream, response
from fault_injector import wire
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
from stock_deployment import QUICK, Deployment, decoded

from bench.random_models import SHAPES, ensure
from evoke_proxy.demo.processes import free_port

JSON = {"Content-Type": "application/json"}
LONG = " ".join(f"w{number % 211}" for number in range(160))
EAGER = {"pool__health_interval_s": 0.2, "pool__backoff_s": 0.2, "pool__backoff_max_s": 0.4}


@dataclass(slots=True)
class Pair:
    """Servers by name, each to be killed and started again where it was."""

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
def _two(start: Callable[[int], Any]) -> Iterator[Pair]:
    deployment = Pair(start)
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
    (found,) = [row for row in rows if row["name"] == name]
    return dict(found)


def _drain(running: RunningProxy, name: str, draining: bool) -> dict[str, Any]:
    body = json.dumps({"draining": draining}).encode()
    answer = ask(running.port, "PATCH", f"/evoke/servers/{name}", body, JSON)
    assert answer.status == 200, answer.body
    return dict(json.loads(answer.body))


def _at(answer: Answer) -> str:
    return answer.headers["x-evoke-server"]


def _restored(running: RunningProxy) -> float:
    return running.metric("evoke_snapshot_restores_total", result="useful")


def _cached(answer: Answer) -> float:
    """The share of the prompt that was not decoded."""
    timings = json.loads(answer.body)["timings"]
    return float(timings["cache_n"] / (timings["cache_n"] + timings["prompt_n"]))


def test_conversations_continue_at_another_server_when_theirs_dies(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.mkdir()
    kept = Deployment(slots, "", ("--cache-ram", "0"))
    settings = {f"snapshots__{key}": value for key, value in QUICK.items()}
    settings |= {"snapshots__directory": str(slots), "snapshots__min_tokens": 64}
    settings |= {"snapshots__look_ahead": False, **EAGER}
    with _two(kept.server) as deployment, pool(deployment.ports, **settings) as running:
        port = running.port
        # Of conversations that nobody has bound yet each server gets its share; they stay.
        talks: dict[str, list[dict[str, Any]]] = {name: [] for name in ("", "s1", "s2", "s3")}
        at = {}
        for name, messages in talks.items():
            at[name] = _at(_say(port, messages, f"{name}: {LONG}", name))
            running.settled()
        assert sorted(at.values()) == ["a", "a", "b", "b"]
        for name, messages in talks.items():
            assert _at(_say(port, messages, "Go on.", name)) == at[name]
            running.settled()

        # Killed between two turns: the next is the other's, from the snapshot.
        gone = at["s1"]
        deployment.kill(gone)
        other = deployment.other(gone)
        before = decoded(deployment.ports[other])
        answer = _say(port, talks["s1"], "And then?", "s1")
        assert _at(answer) == other and _cached(answer) > 0.5
        timings = json.loads(answer.body)["timings"]
        n_prompt = timings["cache_n"] + timings["prompt_n"]
        assert decoded(deployment.ports[other]) - before < n_prompt / 2
        assert _restored(running) >= 1
        assert running.metric("evoke_server_failovers_total", server=gone) >= 1
        running.settled()
        asked = {"messages": talks["s1"][:-1], "max_tokens": 12, "temperature": 0}
        alone = json.dumps(asked | {"ignore_eos": True, "cache_prompt": False}).encode()
        said = ask(deployment.ports[other], "POST", "/v1/chat/completions", alone, JSON)
        content = json.loads(said.body)["choices"][0]["message"]["content"]
        assert content == talks["s1"][-1]["content"]
        (row,) = [s for s in _sessions(running) if s["name"] == "s1"]
        assert row["server"] == other and row["turns"] == 3, "it is the same session"

        # Its breaker opens, is tried again and again, and closes when it is back.
        until(lambda: _server(running, gone)["breaker"] == "open")
        assert ask(port, "GET", "/evoke/ready").status == 200
        deployment.up(gone)
        until(lambda: _server(running, gone)["breaker"] == "closed")
        assert running.metric("evoke_server_breaker_openings_total", server=gone) >= 1
        assert running.metric("evoke_server_up", server=gone) == 1
        assert _at(_say(port, talks["s1"], "Still there?", "s1")) == other, "it stays where it is"
        running.settled()

        # One that drains gets nobody, and who is there leaves with what was saved.
        assert _drain(running, other, True)["draining"]
        restored = _restored(running)
        answer = _say(port, talks["s1"], "And now?", "s1")
        assert _at(answer) == gone and _cached(answer) > 0.5 and _restored(running) > restored
        assert running.metric("evoke_sessions_moved_total", reason="drained") == 1
        assert _at(_say(port, [], f"A new one. {LONG}")) == gone
        assert not _drain(running, other, False)["draining"]

        for name in ("a", "b"):
            deployment.kill(name)
        _check_all_down(running)


def _sessions(running: RunningProxy) -> list[dict[str, Any]]:
    return list(json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"])


def _check_all_down(running: RunningProxy) -> None:
    """Both servers are down."""
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
def mixed(stock_port: int, patched_port: int) -> Iterator[RunningProxy]:
    """A stock server, a patched one, and one that serves something else."""

    async def foreign(exchange: Exchange) -> None:
        told = {"/health": b"{}", "/v1/models": b'{"data":[{"id":"x","meta":{"n_params":7}}]}'}
        path = exchange.head.split()[1].decode()
        await exchange.say(response(told.get(path, b"[]"), b"application/json"))

    with fake_upstream(foreign) as other:
        ports = {"stock": stock_port, "patched": patched_port, "foreign": other.port}
        with pool(ports, **EAGER) as running:
            yield running


def test_a_server_of_another_model_gets_no_requests(mixed: RunningProxy) -> None:
    assert _server(mixed, "foreign")["foreign"] and not _server(mixed, "foreign")["takes"]
    assert _server(mixed, "stock")["takes"] and _server(mixed, "patched")["takes"]
    assert mixed.metric("evoke_server_foreign", server="foreign") == 1
    ready = json.loads(ask(mixed.port, "GET", "/evoke/ready").body)
    assert ready["status"] == "ready" and ready["mode"] == "mixed"
    assert "foreign serves another model" in ready["checks"]["upstream"]["detail"]
    status = json.loads(ask(mixed.port, "GET", "/evoke/status").body)
    assert [server["name"] for server in status["servers"]] == ["stock", "patched", "foreign"]


def _small(name: str, loading: set[str], n_params: Mapping[str, int]) -> Any:
    """A server of so many parameters, 7 unless it is said; it breaks off what it is asked for."""
    busy = response(b'{"error":{"message":"Loading model"}}', status=b"503 Service Unavailable")

    async def behave(exchange: Exchange) -> None:
        path = exchange.head.split()[1].decode()
        if path == "/break":
            exchange.writer.close()
            return
        models = {"data": [{"id": "x", "meta": {"n_params": n_params.get(name, 7)}}]}
        said = json.dumps(models).encode() if path == "/v1/models" else b"{}"
        await exchange.say(busy if name in loading else response(said, b"application/json"))

    return fake_upstream(behave)


def test_a_server_that_failed_is_identified_before_it_is_used() -> None:
    loading, n_params = {"a"}, dict[str, int]()
    with _small("a", loading, n_params) as a, _small("b", loading, n_params) as b:
        with pool({"a": a.port, "b": b.port}, **EAGER) as running:
            until(lambda: _server(running, "a")["breaker"] == "open")
            a.props = b'{"total_slots":3}'  # as it comes back
            loading.clear()
            until(lambda: _server(running, "a")["takes"])
            assert _server(running, "a")["slots"] == 3
            n_params["a"] = 8  # between two checks, of which it misses none
            broken = ask(running.port, "GET", "/break", headers={"X-Evoke-Server": "a"})
            assert broken.status == 503
            until(lambda: _server(running, "a")["foreign"])
            assert _server(running, "b")["takes"] and not _server(running, "a")["takes"]


def test_a_server_that_loads_its_model_gets_no_requests() -> None:
    """It answers, and says 503: nobody is to be told that while another is there."""
    loading: set[str] = set()
    with _small("a", loading, {}) as a, _small("b", loading, {}) as b:
        b.props = b'{"total_slots":1,"is_sleeping":true}'
        with pool({"a": a.port, "b": b.port}, **EAGER) as running:
            body = b'{"messages":[{"role":"user","content":"Hi"}]}'
            named = JSON | {"X-Evoke-Session": "mine"}

            def at(target: str) -> str:
                answer = ask(running.port, "POST", target, body, named)
                assert answer.status == 200
                return _at(answer)

            assert at("/v1/chat/completions") == "a"
            loading.add("a")
            for target in ("/v1/chat/completions", "/v1/chat/completions/input_tokens"):
                assert at(target) == "b"
            own = ask(running.port, "GET", "/slots", headers={"X-Evoke-Server": "a"})
            assert own.status == 503 and _at(own) == "a"
            until(lambda: _server(running, "a")["breaker"] == "open")
            heads = [exchange.head.split()[1] for exchange in b.requests]
            assert b"/lora-adapters" not in heads, "it sleeps"
            loading.add("b")
            told = ask(running.port, "GET", "/slots")
            assert told.status == 503 and _at(told) == "b", "that is of one, whichever it is"
            refused = ask(running.port, "POST", "/v1/chat/completions", body, named)
            assert refused.status == 503 and b"no_server" in refused.body


def test_concurrent_requests_are_distributed_over_servers(mixed: RunningProxy) -> None:
    """Nobody waits while a server is idle."""
    with endless(mixed.port, "one") as one, endless(mixed.port, "other") as other:
        seen = [each.answer.headers["x-evoke-server"] for each in (one, other)]
        assert all(_server(mixed, name)["in_flight"] for name in seen)
    assert sorted(seen) == ["patched", "stock"]
    mixed.quiet()


def test_calls_about_one_server_must_name_it(mixed: RunningProxy) -> None:
    for name in ("stock", "patched"):
        answer = ask(mixed.port, "GET", "/props", headers={"X-Evoke-Server": name})
        assert _at(answer) == name
        assert ("evoke" in json.loads(answer.body)) == (name == "patched")
    assert _at(ask(mixed.port, "GET", "/slots")) in ("stock", "patched")
    refused = ask(mixed.port, "POST", "/slots/0?action=erase", b"{}", JSON)
    assert refused.status == 400 and json.loads(refused.body)["error"]["code"] == "server_needed"
    named = JSON | {"X-Evoke-Server": "patched"}
    erased = ask(mixed.port, "POST", "/slots/0?action=erase", b"{}", named)
    assert _at(erased) == "patched" and erased.status in (200, 501)
    unknown = ask(mixed.port, "GET", "/props", headers={"X-Evoke-Server": "none"})
    assert unknown.status == 404
    assert ask(mixed.port, "PATCH", "/evoke/servers/none", b'{"draining":true}', JSON).status == 404


def test_metrics_of_all_servers_are_merged(mixed: RunningProxy) -> None:
    text = ask(mixed.port, "GET", "/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    of = [s.labels["server"] for s in families["llamacpp:requests_processing"].samples]
    assert sorted(of) == ["patched", "stock"]
    (up,) = families["evoke_upstream_up"].samples
    assert up.value == 1
    assert {s.labels["server"] for s in families["evoke_server_up"].samples} == {
        *("stock", "patched", "foreign")
    }


def test_the_page_lists_servers_and_drains_one(mixed: RunningProxy) -> None:
    program = browser()
    if program is None:
        pytest.skip("there is no Chromium here; on Debian: apt-get install chromium")
    assert asyncio.run(_seen(mixed, program)) == []


async def _seen(running: RunningProxy, program: str) -> Sequence[str]:
    """What the browser complained of."""
    text = "document.querySelector('#servers')?.innerText"
    button = "document.querySelector('#servers [data-server=stock]')"
    async with tab(program) as page:
        await page.look(360, 740)
        await page.open(f"http://127.0.0.1:{running.port}/evoke/")
        await page.until(f"{text}?.includes('serves another model')")
        assert await page.value("document.documentElement.scrollWidth") == 360
        for words, drains in (("Resume", True), ("Drain", False)):
            await page.value(f"{button}.click()")
            await page.until(f"{button}?.innerText === '{words}'")
            shown = await asyncio.to_thread(_server, running, "stock")
            assert shown["draining"] is drains and shown["takes"] is not drains
        return page.complaints


def test_a_migrated_session_keeps_its_budget_and_decodes_its_holes() -> None:
    def start(port: int) -> Any:
        options = ("-np", "1", "--evoke-ram", "64", "--slots")
        return llama_server(server_binary(patched=True), *options, port=port)

    with _two(start) as pair, pool(pair.ports, **EAGER) as running:
        talk = ChatClient(running.port, "held", {"evoke_budget": 320, "evoke_pinned": False})
        for number in range(5):
            said = talk.say(f"Turn {number}. {FILLER}")
        assert said.accounting["omitted"] > 0
        home = said.headers["x-evoke-server"]
        body = json.dumps({"budget": 384}).encode()
        (row,) = _sessions(running)
        assert ask(running.port, "PATCH", f"/evoke/sessions/{row['id']}", body, JSON).status == 200

        pair.kill(home)
        said = talk.say("What was that about?")
        assert said.headers["x-evoke-server"] == pair.other(home)
        assert said.accounting["resident_before"] == said.accounting["recovered"] == 0
        _balanced(said.accounting)
        _balanced(talk.say("And then?").accounting)
        (after,) = _sessions(running)
        assert (after["id"], after["turns"], after["own_budget"]) == (row["id"], 7, True)
        assert after["server"] == pair.other(home) and after["limit"] == 384

        pair.up(home)
        until(lambda: _server(running, home)["takes"])
        said, alone, _ = _answered_by_the_other(pair, running, pair.kill)
        assert said == alone


def test_requests_that_wait_at_a_hanging_server_fail_over() -> None:
    def start(port: int) -> Any:
        return llama_server(server_binary(patched=False), "-np", "1", "--slots", port=port)

    def hang(name: str) -> None:
        os.kill(process_on(pair.ports[name]), signal.SIGSTOP)

    with _two(start) as pair, pool(pair.ports, **EAGER, pool__health_timeout_s=0.5) as running:
        try:
            said, alone, in_vain_s = _answered_by_the_other(pair, running, hang)
            assert said == alone
            assert running.metric("evoke_ttft_seconds_sum", path="relay") > in_vain_s > 1.0
        finally:
            for port in pair.ports.values():
                os.kill(process_on(port), signal.SIGCONT)


def test_a_request_fails_over_when_its_server_dies_after_the_head(patched_port: int) -> None:
    """The reply gets `usage.evoke`, so nothing of it is sent before it is complete."""
    with ExitStack() as stack:
        lines = {name: stack.enter_context(wire(patched_port)) for name in ("a", "b")}
        ports = {name: line.port for name, line in lines.items()}
        running = stack.enter_context(pool(ports, policy__budget=384))
        messages: list[dict[str, Any]] = []
        home = _at(_say(running.port, messages, f"Hello. {LONG}", "cut"))
        running.settled()
        lines[home].cut_reply_to(b"POST /v1/chat/completions")
        answer = _say(running.port, messages, "Go on.", "cut")
        assert lines[home].struck.is_set()
        assert {_at(answer), home} == {"a", "b"} and "evoke" in json.loads(answer.body)["usage"]
        assert running.metric("evoke_server_failovers_total", server=home) == 1


def test_a_migrated_hybrid_session_is_restored_from_its_snapshot(tmp_path: Path) -> None:
    def start(port: int) -> Any:
        options = ["-np", "1", "--evoke-ram", "64", "--slot-save-path", str(tmp_path)]
        model = ensure(SHAPES["tiny-jamba"])
        return llama_server(server_binary(patched=True), *options, port=port, model=model)

    settings = {"snapshots__directory": str(tmp_path), "policy__budget": 384, **EAGER}
    with _two(start) as pair, pool(pair.ports, **settings) as running:
        talk = ChatClient(running.port, "held")
        for number in range(5):
            said = talk.say(f"Turn {number}. {FILLER}")
        assert said.accounting["omitted"] > 0
        running.settled()
        home = said.headers["x-evoke-server"]
        pair.kill(home)
        said = talk.say("And now?")
        assert said.headers["x-evoke-server"] == pair.other(home)
        assert said.accounting["decoded"] < 30 and said.accounting["omitted"] > 0
        _balanced(said.accounting)
        assert _restored(running) == 1


def _balanced(accounting: Any) -> None:
    kinds = ("decoded", "recovered", "resident_before", "omitted")
    assert sum(accounting[kind] for kind in kinds) == accounting["n_prompt"]
    assert accounting["n_resident_peak"] <= 384


def _answered_by_the_other(
    pair: Pair, running: RunningProxy, fail: Callable[[str], None]
) -> tuple[str, str, float]:
    """One fails while it decodes a prompt, and the answer is the other's: what it said, what that
    says when it is asked directly, and for how many seconds the first was waited for."""
    messages: list[dict[str, Any]] = []
    said: list[Answer] = []
    asking = threading.Thread(
        target=lambda: said.append(_say(running.port, messages, f"{LONG} " * 8 + "So?", "long"))
    )
    asking.start()
    until(lambda: any(_server(running, name)["in_flight"] for name in pair.ports))
    (home,) = [name for name in pair.ports if _server(running, name)["in_flight"]]
    until(lambda: json.loads(ask(pair.ports[home], "GET", "/slots").body)[0]["is_processing"])
    began = time.monotonic()
    fail(home)
    until(lambda: not _server(running, home)["in_flight"])
    in_vain_s = time.monotonic() - began
    asking.join()
    assert _at(said[0]) == pair.other(home)
    asked = {"messages": messages[:-1], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    alone = json.dumps({**asked, "cache_prompt": False}).encode()
    direct = ask(pair.ports[pair.other(home)], "POST", "/v1/chat/completions", alone, JSON)
    content = json.loads(direct.body)["choices"][0]["message"]["content"]
    return messages[-1]["content"], content, in_vain_s
