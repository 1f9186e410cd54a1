"""Audits: answers are compared with those without eviction, and no request pays for it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from conversation import ChatClient
from fault_injector import fault_injector
from harness import RunningProxy, ask, llama_server, proxy, server_binary, until

from evoke_proxy.config import load
from evoke_proxy.core.request.forced_answer import Step, forced_chat, read_steps
from evoke_proxy.errors import ConfigError

BUDGET = 384
STORY = "The old sailor reads a letter near the quiet harbor. A grey cat sleeps on the warm stone. "
RESULTS = "evoke_audits_total"
OPTIONS = ("-c", "8192", "--evoke-ram", "64")
# The beginnings of calls that only an audit makes.
JSON = {"Content-Type": "application/json"}
PREFILL, FORCED = b'"n_predict":0', b'"n_probs":1'


@contextmanager
def _audited(slots: int = 2, share: float = 1.0) -> Iterator[tuple[int, RunningProxy]]:
    with llama_server(server_binary(patched=True), "-np", str(slots), *OPTIONS) as upstream:
        with proxy(upstream, audit__share=share) as running:
            yield upstream, running


def _talk(client: ChatClient, turns: int) -> None:
    for number in range(turns):
        client.say(f"Number {number}. {STORY * 6}")


def _count(running: RunningProxy, result: str) -> float:
    return running.metric(RESULTS, result=result)


def _sessions(running: RunningProxy) -> list[dict[str, Any]]:
    found = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
    return [row for row in found if row["live"]]


def test_an_answer_is_compared_with_that_without_eviction() -> None:
    with _audited() as (upstream, running):
        client = ChatClient(running.port, "audited", {"evoke_budget": BUDGET})
        client.say("My code name is pink hippo.")
        _talk(client, 8)
        client.say("What is my code name?")
        until(lambda: _count(running, "done") >= 1, "an audit", 60)
        running.wait_for_background()
        (row,) = _sessions(running)
        assert row["audit"]["audits"] >= 1
        assert abs(row["audit"]["change"]) < 1
        overview = json.loads(ask(running.port, "GET", "/evoke/overview").body)
        (found,) = overview["audits"]
        assert found["budget"] == BUDGET and found["audits"] == row["audit"]["audits"]
        assert f"{BUDGET} tokens changed" in found["text"]
        # The slot of the audit is empty again, that of the conversation is as it was.
        states = [json.loads(ask(upstream, "GET", f"/slots/{n}/blocks").body) for n in (0, 1)]
        residents = sorted(state["n_resident"] for state in states)
        assert residents[0] <= 1 and residents[1] == row["resident"]
        turn = client.say("Thank you.")
        assert turn.accounting["marker"] == "ok" and turn.accounting["decoded"] < 80
        assert running.metric("evoke_budget_breaches_total") == 0


def test_a_fact_that_stays_evicted_changes_the_answer() -> None:
    with _audited() as (_, running):
        client = ChatClient(running.port, "lost", {"evoke_budget": BUDGET, "evoke_recall": "none"})
        client.say("My code name is pink hippo.")
        _talk(client, 8)
        running.wait_for_background()
        before = _count(running, "done")
        answer = client.say("What is my code name?").text
        assert "pink hippo" not in answer
        until(lambda: _count(running, "done") > before, "an audit", 60)
        running.wait_for_background()
        assert running.metric("evoke_audit_other_answers_total") >= 1
        # The answer that was given without the fact is hardly possible with it.
        (row,) = _sessions(running)
        assert row["audit"]["others"] >= 1 and row["audit"]["change"] > 0.1


def test_no_turn_is_audited_by_default() -> None:
    with _audited(share=0.0) as (_, running):
        client = ChatClient(running.port, "plain", {"evoke_budget": BUDGET})
        _talk(client, 5)
        time.sleep(1.5)
        running.wait_for_background()
        audits = ask(running.port, "GET", "/metrics").body.decode()
        counts = [line for line in audits.splitlines() if line.startswith(RESULTS)]
        assert counts and all(line.endswith(" 0.0") for line in counts)


def test_a_conversation_never_loses_its_slot_to_an_audit() -> None:
    with _audited(slots=1) as (_, running):
        client = ChatClient(running.port, "only", {"evoke_budget": BUDGET})
        _talk(client, 6)
        until(lambda: _count(running, "no_slot") >= 1, "an audit", 60)
        assert _count(running, "done") == 0


def test_a_request_preempts_an_audit() -> None:
    """Requests that arrive during audits get their slot at once, and wait for one step at most."""
    waits: dict[float, list[float]] = {0.0: [], 1.0: []}
    interrupted = queued_s = 0.0
    for share in waits:
        with _audited(share=share) as (upstream, running):
            client = ChatClient(running.port, "busy", {"evoke_budget": BUDGET})
            _talk(client, 14)
            for number in range(8):
                if share:
                    time.sleep(1.05 + 0.03 * number)  # an audit begins after a second
                else:
                    running.wait_for_background()
                began = time.perf_counter()
                client.say(f"Well, {number}?")
                waits[share].append(time.perf_counter() - began)
            interrupted += _count(running, "interrupted")
            queued_s += running.metric("evoke_queue_wait_seconds_sum")
            running.wait_for_background()
            state = json.loads(ask(upstream, "GET", "/slots").body)
            assert not any(slot["is_processing"] for slot in state)
    assert interrupted > 0 and queued_s < 0.1
    # Wall times of a busy machine: three times as long would be a step of half a second.
    assert statistics.median(waits[1.0]) < 3 * statistics.median(waits[0.0]) + 0.25


def test_the_change_is_that_of_the_given_answer_in_a_server_without_a_budget() -> None:
    """The expectation: log probabilities that clients were told, with the budget and without."""
    with _audited() as (_, running):
        client = ChatClient(running.port, "lost", {"evoke_budget": BUDGET, "evoke_recall": "none"})
        client.say("My code name is pink hippo.")
        _talk(client, 8)
        running.wait_for_background()
        done, total = _count(running, "done"), _total_change(running)
        client.messages.append({"role": "user", "content": "What is my code name?"})
        given = json.loads(client.post(logprobs=True, top_logprobs=1).body)
        until(lambda: _count(running, "done") == done + 1, "an audit", 60)
        change = _total_change(running) - total
    steps = given["choices"][0]["logprobs"]["content"]
    tokens = [step["id"] for step in steps]
    with llama_server(server_binary(patched=True), "-np", "1", *OPTIONS) as whole:
        body = {"messages": client.messages, **forced_chat(tokens, 1)}
        answer = ask(whole, "POST", "/v1/chat/completions", json.dumps(body).encode(), JSON)
    expected = read_steps(json.loads(answer.body), tokens)
    assert expected is not None and len(tokens) > 2
    # Some decodes are of other batches, which rounds differently.
    assert change == pytest.approx(_mean([step["logprob"] for step in steps], expected), abs=0.02)
    assert abs(change) > 0.1


def _total_change(running: RunningProxy) -> float:
    """The sum of the changes of all audits."""
    (row,) = _sessions(running)
    return row["audit"]["change"] * row["audit"]["audits"] if row["audit"] else 0.0


def _mean(given: Sequence[float], whole: Sequence[Step]) -> float:
    """The mean change of a log probability."""
    return sum(given) / len(given) - sum(step.logprob for step in whole) / len(whole)


def _residents(upstream: int) -> list[int]:
    """The resident rows of each slot, fewest first."""
    states = [json.loads(ask(upstream, "GET", f"/slots/{n}/blocks").body) for n in (0, 1)]
    return sorted(state["n_resident"] for state in states)


@pytest.mark.parametrize("call", [PREFILL, FORCED])
def test_stopping_the_proxy_ends_an_audit(call: bytes) -> None:
    with llama_server(server_binary(patched=True), "-np", "2", *OPTIONS) as upstream:
        with fault_injector(upstream) as injector:
            with proxy(injector.port, audit__share=1.0) as running:
                client = ChatClient(running.port, "stopped", {"evoke_budget": BUDGET})
                client.say("My code name is pink hippo.")
                stop: Future[None] = Future()
                injector.run_at(call, lambda: stop.set_result(None))
                _talk(client, 12)
                stop.result(30)
                metrics = running.gateway.metrics.registry
            assert metrics.get_sample_value(RESULTS, {"result": "interrupted"}) >= 1
            assert metrics.get_sample_value(RESULTS, {"result": "done"}) == 0
        # llama-server is not awaited: it may decode some more tokens of the cancelled call.
        assert _residents(upstream)[0] <= 8


@pytest.mark.parametrize("call", [PREFILL, FORCED])
def test_deleting_a_session_ends_its_audit(call: bytes) -> None:
    """After the answer, no slot has rows of the session."""
    with llama_server(server_binary(patched=True), "-np", "2", *OPTIONS) as upstream:
        with (
            fault_injector(upstream) as injector,
            proxy(injector.port, audit__share=1.0) as running,
            ThreadPoolExecutor(1) as thread,
        ):
            client = ChatClient(running.port, "deleted", {"evoke_budget": BUDGET})
            client.say("My code name is pink hippo.")
            (row,) = _sessions(running)
            path = f"/evoke/sessions/{row['id']}"
            began: Future[Future[Any]] = Future()
            delete = lambda: thread.submit(ask, running.port, "DELETE", path)  # noqa: E731
            injector.run_at(call, lambda: began.set_result(delete()))
            _talk(client, 12)
            answer = began.result(30).result(30)
            assert _residents(upstream)[1] <= 1
            assert answer.status == 200 and json.loads(answer.body)["left"] == []
            assert _count(running, "done") == 0 and _count(running, "interrupted") >= 1


def test_an_audit_leaves_the_cells_that_requests_need_where_slots_share_them() -> None:
    found = {}
    for cells in (1920, 4096):
        options = ("-np", "2", "-kvu", "-c", str(cells), "--evoke-ram", "64")
        with llama_server(server_binary(patched=True), *options) as upstream:
            with proxy(upstream, audit__share=1.0) as running:
                client = ChatClient(running.port, "shared", {"evoke_budget": BUDGET})
                _talk(client, 8)
                running.wait_for_background()
                found[cells] = {name: _count(running, name) > 0 for name in ("done", "no_cells")}
    assert found == {
        1920: {"done": False, "no_cells": True},
        4096: {"done": True, "no_cells": False},
    }


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(ConfigError, match=r"audit\.share"):
        load(None, {}, {"audit.share": share})
