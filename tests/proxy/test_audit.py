"""Audits: answers are compared with those without eviction, and no request pays for it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conversation import ChatClient
from harness import RunningProxy, ask, llama_server, proxy, server_binary, until

from evoke_proxy.config import load
from evoke_proxy.errors import ConfigError

BUDGET = 384
STORY = "The old sailor reads a letter near the quiet harbor. A grey cat sleeps on the warm stone. "
RESULTS = "evoke_audits_total"


@contextmanager
def _audited(slots: int = 2, share: float = 1.0) -> Iterator[tuple[int, RunningProxy]]:
    options = ("-np", str(slots), "-c", "8192", "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as upstream:
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
                time.sleep(1.05 + 0.03 * number)  # an audit begins after a second
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


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(ConfigError, match=r"audit\.share"):
        load(None, {}, {"audit.share": share})
