"""Requests that name a slot or need several get them, without loss of other sessions' rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from comparison import comparable
from conversation import FILLER, ChatClient, endless_stream, events
from harness import Answer, RunningProxy, ask, llama_server, proxy, server_binary, until

BUDGET = 320
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def shared_cells_port() -> Iterator[int]:
    """The port of a patched server whose two slots share their cells."""
    binary = server_binary(patched=True)
    with llama_server(binary, "-np", "2", "-kvu", "--evoke-ram", "64") as port:
        yield port


@pytest.fixture(params=["two_slots_port", "shared_cells_port"])
def port(request: pytest.FixtureRequest) -> int:
    """A server with two slots."""
    chosen: int = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
def running_proxy(port: int) -> Iterator[RunningProxy]:
    """A new proxy in front of the server."""
    with proxy(port, policy__budget=BUDGET) as running:
        yield running


def _fill_slots(running: RunningProxy) -> list[ChatClient]:
    """Run a conversation in each slot; the rows of their last answers are not saved yet."""
    clients = [ChatClient(running.port, name) for name in ("left", "right")]
    for number in range(3):
        for client in clients:
            client.say(f"{client.session} {number}. {FILLER}")
    assert sorted(_slots(running).values()) == [0, 1]
    return clients


def _slots(running: RunningProxy) -> dict[str, int]:
    running.wait_until_idle()
    sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
    return {session["name"]: session["slot"] for session in sessions}


def _check_all_recovered(running: RunningProxy, client: ChatClient) -> None:
    """Send a turn, which must decode only new text and recover all other rows."""
    turn = client.say("Go on.")
    assert turn.accounting["marker"] == "ok"
    assert turn.accounting["decoded"] < 40
    assert turn.accounting["recovered"] > turn.accounting["resident_before"] == 0
    assert running.metric("evoke_degraded_total", stage="plan") == 0
    assert running.metric("evoke_degraded_total", stage="seat") == 0


def test_an_answer_that_the_client_has_changed_is_no_failed_plan() -> None:
    """After the slot was given to another conversation, only llama-server notices it."""
    with llama_server(server_binary(patched=True), "-np", "1", "--evoke-ram", "64") as port:
        with proxy(port, policy__budget=BUDGET) as running:
            clients = [ChatClient(running.port, name) for name in ("left", "right")]
            for number in range(4):
                for client in clients:
                    turn = client.say(f"{client.session} {number}. {FILLER}")
                    assert number == 0 or turn.accounting["recovered"] > 0
                    client.messages[-1]["content"] = f"Changed, indeed, {number}."
            assert running.metric("evoke_plan_failures_total", reason="stale_block") == 0


def _post(port: int, path: str, **body: Any) -> Answer:
    return ask(port, "POST", path, json.dumps({"temperature": 0, **body}).encode(), JSON)


HELLO = [{"role": "user", "content": "Hello."}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_for_several_answers_loses_no_rows_of_others(
    running_proxy: RunningProxy, stream: bool
) -> None:
    clients = _fill_slots(running_proxy)
    fields = {"messages": HELLO, "max_tokens": 4, "n": 2, "stream": stream}
    answer = _post(running_proxy.port, "/v1/chat/completions", **fields)
    assert answer.status == 200
    bodies = list(events(answer.body)) if stream else [json.loads(answer.body)]
    choices = {choice["index"] for body in bodies for choice in body["choices"]}
    assert choices == {0, 1}
    assert running_proxy.metric("evoke_bypass_total", reason="n") == 1
    for client in clients:
        _check_all_recovered(running_proxy, client)


def test_a_request_for_several_answers_can_name_a_slot(running_proxy: RunningProxy) -> None:
    clients = _fill_slots(running_proxy)
    fields = {"prompt": "The river", "n_predict": 3, "n_cmpl": 2, "id_slot": 1}
    answer = _post(running_proxy.port, "/completion", **fields)
    assert [each["id_slot"] for each in json.loads(answer.body)] == [1, 0]
    for client in clients:
        _check_all_recovered(running_proxy, client)


def test_a_request_for_more_answers_than_slots_is_refused_by_the_server(
    port: int, running_proxy: RunningProxy
) -> None:
    fields = {"messages": HELLO, "max_tokens": 4, "n": 3}
    direct = _post(port, "/v1/chat/completions", **fields)
    proxied = _post(running_proxy.port, "/v1/chat/completions", **fields)
    assert direct.status == 400
    assert comparable(proxied) == comparable(direct)


def test_a_batch_of_prompts_loses_no_rows_of_others(port: int, running_proxy: RunningProxy) -> None:
    prompts = ["The river", "A mountain", "My house"]
    fields = {"prompt": prompts, "max_tokens": 3}
    direct = json.loads(_post(port, "/v1/completions", **fields).body)
    clients = _fill_slots(running_proxy)
    batch = json.loads(_post(running_proxy.port, "/v1/completions", **fields).body)
    texts = [[choice["text"] for choice in reply["choices"]] for reply in (direct, batch)]
    assert texts[0] == texts[1]
    for client in clients:
        _check_all_recovered(running_proxy, client)


@pytest.mark.parametrize("slot", [0, 1])
def test_a_raw_prompt_uses_the_slot_that_its_request_names(
    running_proxy: RunningProxy, slot: int
) -> None:
    clients = _fill_slots(running_proxy)
    for prompt in ("The river", [5, 6, 7], ["The river"]):
        answer = _post(running_proxy.port, "/completion", prompt=prompt, n_predict=3, id_slot=slot)
        reply = json.loads(answer.body)
        assert (reply[0] if isinstance(reply, list) else reply)["id_slot"] == slot
    before = _slots(running_proxy)
    for client in clients:
        accounting = client.say("Go on.").accounting
        assert accounting["decoded"] < 40
        assert (accounting["resident_before"] == 0) == (before[str(client.session)] == slot)


def test_a_conversation_uses_the_slot_that_its_request_names(running_proxy: RunningProxy) -> None:
    clients = _fill_slots(running_proxy)
    before = _slots(running_proxy)
    left, right = clients
    slot = before["right"]
    moved = left.say("Go on.", id_slot=slot)
    assert _slots(running_proxy) == {"left": slot, "right": None}
    assert moved.accounting["marker"] == "ok"
    assert moved.accounting["decoded"] < 40
    assert moved.accounting["recovered"] > 0
    assert moved.accounting["resident_before"] == 0
    assert left.say("Go on.", id_slot=slot).accounting["resident_before"] > 0
    _check_all_recovered(running_proxy, right)
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert running_proxy.metric(untouched) == 0


@pytest.mark.parametrize("slot", [7, -1, None, "0", 10**30])
def test_a_slot_that_does_not_exist_is_ignored(running_proxy: RunningProxy, slot: object) -> None:
    client = ChatClient(running_proxy.port, "any", {"id_slot": slot})
    client.say("hello")
    assert client.say("Go on.").accounting["resident_before"] > 0
    raw = _post(running_proxy.port, "/completion", prompt="The river", n_predict=3, id_slot=slot)
    assert raw.status == 200


def test_a_request_waits_for_the_slot_it_names(running_proxy: RunningProxy) -> None:
    raw = {"prompt": "A", "n_predict": 3, "id_slot": 1}
    with endless_stream(running_proxy.port, id_slot=1) as stream, ThreadPoolExecutor(1) as pool:
        other = ChatClient(running_proxy.port, "beside")
        assert other.say("hello").accounting["marker"] == "ok"
        waiting = pool.submit(_post, running_proxy.port, "/completion", **raw)
        until(lambda: running_proxy.gateway.server.slots.pool.queued)
        assert other.say("Go on.").accounting["marker"] == "ok" and not waiting.done()
        stream.disconnect()
        assert json.loads(waiting.result().body)["id_slot"] == 1
        assert not [each for each in running_proxy.gateway.conversations if each.in_use]


def test_a_request_that_cannot_lease_all_its_slots_releases_the_others(port: int) -> None:
    with proxy(port, policy__budget=BUDGET, limits__queue_timeout_s=0.3) as running:
        with endless_stream(running.port, id_slot=1):
            fields = {"messages": HELLO, "max_tokens": 4, "n": 2}
            refused = _post(running.port, "/v1/chat/completions", **fields)
            assert (refused.status, "retry-after" in refused.headers) == (503, True)
            other = ChatClient(running.port, "beside", {"id_slot": 0})
            assert other.say("hello").accounting["marker"] == "ok"
            assert [each for each in running.gateway.conversations if each.in_use]
