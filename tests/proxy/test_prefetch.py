"""POST /evoke/prefetch brings back what the draft of a message needs, before it is sent."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from admin_client import (
    BUDGET,
    QUESTION,
    ask_for_fact,
    conversation_with_evicted_fact,
    fact_block,
)
from conversation import ChatClient, endless_stream
from harness import (
    Answer,
    RunningProxy,
    ask,
    llama_server,
    pool,
    server_binary,
    until,
)
from tenant_keys import KEYS, proxy_with_keys

from evoke_proxy.adapters.llama.block_api import BlockApi, PlanCall
from evoke_proxy.core.policy.prefetch import loading_steps
from evoke_proxy.engine.server.session_worker import SessionWorker
from evoke_proxy.engine.strategies.budgeted import prefetch
from evoke_proxy.errors import PlanRefused

INTERVAL_S = 0.3
NO_BLOCKS = {"blocks": 0, "tokens": 0}


def send_draft(client: ChatClient, text: str = QUESTION, **headers: str) -> Answer:
    """Send a draft of the client's next message; waits so that it is not too soon."""
    time.sleep(INTERVAL_S)
    draft = [*client.messages, {"role": "user", "content": text}]
    body = client.body(messages=draft)
    return ask(client.port, "POST", "/evoke/prefetch", body, client.headers | headers)


def prefetched(client: ChatClient, text: str = QUESTION, **headers: str) -> dict[str, Any]:
    """Send a draft; returns the answer, which must have status 200."""
    answer = send_draft(client, text, **headers)
    assert answer.status == 200, answer.body
    result: dict[str, Any] = json.loads(answer.body)
    return result


def shown(running: RunningProxy, name: str) -> dict[str, Any]:
    """The session with this name, as the admin API shows it."""
    running.wait_until_idle()
    sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
    (row,) = [each for each in sessions if each["name"] == name]
    session: dict[str, Any] = json.loads(
        ask(running.port, "GET", f"/evoke/sessions/{row['id']}").body
    )
    return session


def test_a_message_recovers_nothing_after_its_draft_and_is_answered_alike(
    patched_proxy: RunningProxy,
) -> None:
    without = ask_for_fact(conversation_with_evicted_fact(patched_proxy.port, "without"))
    client = conversation_with_evicted_fact(patched_proxy.port, "with")
    before = shown(patched_proxy, "with")
    assert fact_block(before)["state"] == "saved_ram"
    evicted_before = patched_proxy.metric("evoke_blocks_evicted_total")

    result = prefetched(client)
    assert result["reason"] == "" and result["recovered"] == result["needed"] != NO_BLOCKS
    assert result["resident"] <= result["budget"] == 320

    after = shown(patched_proxy, "with")
    assert fact_block(after)["state"] == "resident"
    for key in ("turns", "tokens", "name", "history"):
        assert after[key] == before[key], key
    assert after["resident"] == result["resident"]
    assert after["totals"]["resident"] <= 320
    assert patched_proxy.metric("evoke_prefetched_tokens_total") == result["recovered"]["tokens"]
    assert patched_proxy.metric("evoke_prefetches_total", result="done") == 1
    assert patched_proxy.metric("evoke_blocks_evicted_total") > evicted_before

    again = prefetched(client)
    assert again["reason"] == "" and again["needed"] == again["recovered"] == NO_BLOCKS

    turn = client.say(QUESTION)
    assert turn.headers["x-evoke-recovered"] == "blocks=0;tokens=0"
    # llama-server counts rows since the previous answer.
    assert turn.accounting["recovered"] == result["recovered"]["tokens"]
    assert turn.accounting["n_resident_peak"] <= 320
    assert turn.accounting["decoded"] == without.accounting["decoded"]
    assert turn.text == without.text
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert patched_proxy.metric(untouched) == 0
    assert patched_proxy.metric("evoke_plan_failures_total") == 0


def test_a_long_question_is_planned_in_a_thread(
    patched_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its words is looked up: hundreds take longer than the event loop may be blocked."""
    client = conversation_with_evicted_fact(patched_proxy.port, "asking")
    run, in_thread = SessionWorker.run, list[bool]()

    def recorded(self: SessionWorker, conversation: Any, long: bool, work: Any) -> Any:
        in_thread.append(long)
        return run(self, conversation, long, work)

    monkeypatch.setattr(SessionWorker, "run", recorded)
    assert prefetched(client)["reason"] == "" and in_thread and not any(in_thread)
    in_thread.clear()
    words = " ".join(f"wo{a}{b}" for a in "abcdefghi" for b in "jklmnopqr")
    assert prefetched(client, words)["reason"] == "" and in_thread and all(in_thread)
    in_thread.clear()
    client.say(words)
    assert in_thread and all(in_thread)


def test_drafts_that_take_too_much_time_come_too_soon(
    patched_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = conversation_with_evicted_fact(patched_proxy.port, "greedy")
    monkeypatch.setattr(prefetch, "_SHARE", 1e-6)
    assert prefetched(client)["reason"] == ""
    assert prefetched(client)["reason"] == "too_soon"


def test_another_message_than_the_draft_is_answered(patched_proxy: RunningProxy) -> None:
    """The session has not taken the draft for a turn, and recovers what it needs after all."""
    client = conversation_with_evicted_fact(patched_proxy.port, "changed")
    assert prefetched(client, "What was turn 1 about? The quick brown fox?")["reason"] == ""
    assert ask_for_fact(client).accounting["n_resident_peak"] <= 320
    assert shown(patched_proxy, "changed")["turns"] == 8
    assert patched_proxy.metric("evoke_plan_failures_total") == 0


def test_a_busy_slot_an_unknown_conversation_and_a_hurry_are_named(
    patched_proxy: RunningProxy,
) -> None:
    client = conversation_with_evicted_fact(patched_proxy.port, "busy")
    stranger = ChatClient(patched_proxy.port, "stranger")
    stranger.messages.append({"role": "assistant", "content": "Nobody has said this before."})
    assert prefetched(stranger)["reason"] == "unknown_conversation"
    assert prefetched(client)["reason"] == ""
    body = client.body(messages=[*client.messages, {"role": "user", "content": "again"}])
    soon = ask(client.port, "POST", "/evoke/prefetch", body, client.headers)
    assert json.loads(soon.body)["reason"] == "too_soon"
    with endless_stream(patched_proxy.port, "other"):
        displaced = prefetched(client)
        assert displaced["reason"] == "not_in_slot" and displaced["recovered"] == NO_BLOCKS
    patched_proxy.wait_until_idle()
    client.say(QUESTION)
    with endless_stream(patched_proxy.port, "endless"):
        running = ChatClient(patched_proxy.port, "endless")
        running.messages.append({"role": "user", "content": "hello"})
        busy = prefetched(running)
        assert busy["reason"] == "slot_busy" and busy["recovered"] == NO_BLOCKS


def test_a_request_waits_only_for_the_copy_in_progress(
    patched_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step copies one block and takes a second; the request comes in the first of them."""
    client = conversation_with_evicted_fact(patched_proxy.port, "preempting")
    copying, run_plan, steps = threading.Event(), BlockApi.run_plan, list[int]()

    async def slow_run_plan(self: BlockApi, call: PlanCall) -> int:
        if call.plan.reason == "prefetch":
            steps.append(len(call.plan.loads))
            copying.set()
            await asyncio.sleep(1.0)
        return await run_plan(self, call)

    monkeypatch.setattr(BlockApi, "run_plan", slow_run_plan)
    monkeypatch.setattr(prefetch, "loading_steps", partial(loading_steps, step_tokens=1))
    draft = f"{QUESTION} And what were turn 0 and turn 1 about, in detail?"
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(prefetched, client, draft)
        assert copying.wait(10)
        turn = client.say(QUESTION)
        result = answer.result()
    assert steps == [1] and result["reason"] == "interrupted"
    assert result["recovered"]["blocks"] == 1 < result["needed"]["blocks"]
    assert turn.accounting["marker"] == "ok" and turn.accounting["n_resident_peak"] <= 320
    assert patched_proxy.metric("evoke_degraded_total") == 0


def test_a_step_ends_and_is_recorded_when_the_client_disconnects(
    patched_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = conversation_with_evicted_fact(patched_proxy.port, "leaving")
    copying, run_plan, loaded = threading.Event(), BlockApi.run_plan, list[int]()

    async def slow_run_plan(self: BlockApi, call: PlanCall) -> int:
        if call.plan.reason != "prefetch":
            return await run_plan(self, call)
        copying.set()
        await asyncio.sleep(0.5)
        epoch = await run_plan(self, call)
        loaded.append(sum(len(load.span) for load in call.plan.loads))
        return epoch

    monkeypatch.setattr(BlockApi, "run_plan", slow_run_plan)
    draft = [*client.messages, {"role": "user", "content": QUESTION}]
    connection = http.client.HTTPConnection("127.0.0.1", patched_proxy.port, timeout=10)
    connection.request("POST", "/evoke/prefetch", client.body(messages=draft), client.headers)
    assert copying.wait(10)
    connection.close()
    until(lambda: loaded, "the step ends")
    patched_proxy.wait_for_background()
    assert len(loaded) == 1, "steps follow although the client has disconnected"
    assert patched_proxy.metric("evoke_prefetched_tokens_total") == loaded[0] > 0
    session = shown(patched_proxy, "leaving")
    assert session["resident"] == session["totals"]["resident"]
    turn = client.say(QUESTION)
    assert turn.accounting["marker"] == "ok" and turn.accounting["n_resident_peak"] <= BUDGET
    assert turn.headers["x-evoke-recovered"] == "blocks=0;tokens=0"
    assert patched_proxy.metric("evoke_plan_failures_total") == 0


def test_a_refused_step_and_a_time_limit_are_named_and_change_no_turn(
    patched_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = conversation_with_evicted_fact(patched_proxy.port, "refused")
    run_plan = BlockApi.run_plan

    async def refusing_run_plan(self: BlockApi, call: PlanCall) -> int:
        if call.plan.reason == "prefetch":
            raise PlanRefused("block_not_found", "no such block")
        return await run_plan(self, call)

    with monkeypatch.context() as patch:
        patch.setattr(BlockApi, "run_plan", refusing_run_plan)
        assert prefetched(client)["reason"] == "refused"
    with monkeypatch.context() as patch:
        patch.setattr(prefetch, "_TIME_LIMIT_S", 0.0)
        assert prefetched(client)["reason"] == "time_limit"
    with monkeypatch.context() as patch:
        patch.setattr(prefetch, "_MAX_OF_TENANT", 0)
        assert prefetched(client)["reason"] == "too_many"
    ask_for_fact(client)
    assert patched_proxy.metric("evoke_degraded_total") == 0
    for reason in ("refused", "time_limit", "too_many"):
        assert patched_proxy.metric("evoke_prefetches_total", result=reason) == 1


def test_drafts_that_no_budget_can_serve_are_named(patched_proxy: RunningProxy) -> None:
    client = conversation_with_evicted_fact(patched_proxy.port, "long")
    assert prefetched(client, "Grass is green. " * 4000)["reason"] == "too_long"
    client.fields = {**client.fields, "n": 2}
    assert prefetched(client)["reason"] == "bypass"


def test_a_draft_goes_to_the_server_of_its_conversation_in_a_pool(patched_port: int) -> None:
    with (
        llama_server(server_binary(patched=True), "-np", "1", "--evoke-ram", "64") as other_port,
        pool({"a": patched_port, "b": other_port}) as running,
    ):
        first = conversation_with_evicted_fact(running.port, "first")
        second = conversation_with_evicted_fact(running.port, "second")
        for client in (first, second):
            result = prefetched(client)
            assert result["reason"] == "" and result["recovered"]["tokens"] > 0
            turn = client.say(QUESTION)
            assert turn.headers["x-evoke-recovered"] == "blocks=0;tokens=0"
        stranger = ChatClient(running.port, "stranger")
        stranger.messages[0]["content"] = "Another system prompt, of another conversation."
        assert prefetched(stranger)["reason"] == "unknown_conversation"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"not json", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"{}", "draft_invalid"),
        (b'{"messages": []}', "draft_invalid"),
        (b'{"messages": [{"role": "user"}]}', "draft_invalid"),
        (b'{"messages": [], "evoke_other": 1}', "evoke_field_unknown"),
    ],
)
def test_a_bad_body_is_refused(patched_proxy: RunningProxy, body: bytes, code: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = ask(patched_proxy.port, "POST", "/evoke/prefetch", body, headers)
    assert answer.status == 400, answer.body
    assert json.loads(answer.body)["error"]["code"] == code
    assert patched_proxy.metric("evoke_upstream_errors_total") == 0


def test_a_tenant_gets_nothing_of_another_and_a_key_is_needed(
    patched_port: int, tmp_path: Path
) -> None:
    with proxy_with_keys(patched_port, tmp_path) as running:
        client = ChatClient(running.port, "mine")
        keys = {name: {"Authorization": f"Bearer {key}"} for name, key in KEYS.items()}
        client.messages.append({"role": "user", "content": "hello"})
        path = "/v1/chat/completions"
        own = client.headers | keys["alice"]
        assert ask(running.port, "POST", path, client.body(), own).status == 200
        client.messages.append({"role": "assistant", "content": "Hello."})
        running.wait_until_idle()
        assert prefetched(client, **keys["alice"])["reason"] == ""
        assert prefetched(client, **keys["bob"])["reason"] == "unknown_conversation"
        refused = send_draft(client)
        assert refused.status == 401
        assert json.loads(refused.body)["error"]["code"] == "invalid_api_key"


def test_an_unpatched_server_says_that_it_cannot(stock_proxy: RunningProxy) -> None:
    client = ChatClient(stock_proxy.port, "stock")
    result = prefetched(client)
    assert result["reason"] == "unsupported" and result["recovered"] == NO_BLOCKS
