"""Requests that name a slot or need several get them, and other sessions lose no rows."""

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
    """The port of a server whose two slots share their cells."""
    binary = server_binary(patched=True)
    with llama_server(binary, "-np", "2", "-kvu", "--evoke-ram", "64") as port:
        yield port


@pytest.fixture(params=["two_slots_port", "shared_cells_port"])
def port(request: pytest.FixtureRequest) -> int:
    """A server with two slots."""
    chosen: int = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
def two_slots(port: int) -> Iterator[RunningProxy]:
    """A proxy of its own in front of it."""
    with proxy(port, policy__budget=BUDGET) as running:
        yield running


def _conversations(running: RunningProxy) -> list[ChatClient]:
    """One in each slot, with rows of its last answer that have no copy yet."""
    talks = [ChatClient(running.port, name) for name in ("left", "right")]
    for number in range(3):
        for talk in talks:
            talk.say(f"{talk.session} {number}. {FILLER}")
    assert sorted(_slots(running).values()) == [0, 1]
    return talks


def _slots(running: RunningProxy) -> dict[str, int]:
    running.wait_until_idle()
    sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
    return {known["name"]: known["slot"] for known in sessions}


def _lost_nothing(running: RunningProxy, talk: ChatClient) -> None:
    """The next turn decodes what is new in it, and the budget holds."""
    said = talk.say("Go on.")
    assert said.accounting["marker"] == "ok"
    assert said.accounting["decoded"] < 40
    assert said.accounting["recovered"] > said.accounting["resident_before"] == 0
    assert running.metric("evoke_degraded_total", stage="plan") == 0
    assert running.metric("evoke_degraded_total", stage="seat") == 0


def _post(port: int, path: str, **body: Any) -> Answer:
    return ask(port, "POST", path, json.dumps({"temperature": 0, **body}).encode(), JSON)


HELLO = [{"role": "user", "content": "Hello."}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_for_several_answers_loses_no_rows_of_others(
    two_slots: RunningProxy, stream: bool
) -> None:
    talks = _conversations(two_slots)
    fields = {"messages": HELLO, "max_tokens": 4, "n": 2, "stream": stream}
    answer = _post(two_slots.port, "/v1/chat/completions", **fields)
    assert answer.status == 200
    bodies = list(events(answer.body)) if stream else [json.loads(answer.body)]
    choices = {choice["index"] for body in bodies for choice in body["choices"]}
    assert choices == {0, 1}
    assert two_slots.metric("evoke_bypass_total", reason="n") == 1
    for talk in talks:
        _lost_nothing(two_slots, talk)


def test_several_answers_from_a_named_slot(two_slots: RunningProxy) -> None:
    talks = _conversations(two_slots)
    fields = {"prompt": "The river", "n_predict": 3, "n_cmpl": 2, "id_slot": 1}
    answer = _post(two_slots.port, "/completion", **fields)
    assert [said["id_slot"] for said in json.loads(answer.body)] == [1, 0]
    for talk in talks:
        _lost_nothing(two_slots, talk)


def test_more_answers_than_slots_are_refused_by_the_server(
    port: int, two_slots: RunningProxy
) -> None:
    fields = {"messages": HELLO, "max_tokens": 4, "n": 3}
    direct = _post(port, "/v1/chat/completions", **fields)
    proxied = _post(two_slots.port, "/v1/chat/completions", **fields)
    assert direct.status == 400
    assert comparable(proxied) == comparable(direct)


def test_a_batch_of_prompts_loses_no_rows_of_others(port: int, two_slots: RunningProxy) -> None:
    prompts = ["The river", "A mountain", "My house"]
    fields = {"prompt": prompts, "max_tokens": 3}
    direct = json.loads(_post(port, "/v1/completions", **fields).body)
    talks = _conversations(two_slots)
    batch = json.loads(_post(two_slots.port, "/v1/completions", **fields).body)
    texts = [[choice["text"] for choice in said["choices"]] for said in (direct, batch)]
    assert texts[0] == texts[1]
    for talk in talks:
        _lost_nothing(two_slots, talk)


@pytest.mark.parametrize("slot", [0, 1])
def test_a_raw_prompt_in_a_named_slot(two_slots: RunningProxy, slot: int) -> None:
    talks = _conversations(two_slots)
    for prompt in ("The river", [5, 6, 7], ["The river"]):
        answer = _post(two_slots.port, "/completion", prompt=prompt, n_predict=3, id_slot=slot)
        said = json.loads(answer.body)
        assert (said[0] if isinstance(said, list) else said)["id_slot"] == slot
    before = _slots(two_slots)
    for talk in talks:
        rows = talk.say("Go on.").accounting
        assert rows["decoded"] < 40
        assert (rows["resident_before"] == 0) == (before[str(talk.session)] == slot)


def test_a_conversation_uses_the_slot_that_its_request_names(two_slots: RunningProxy) -> None:
    talks = _conversations(two_slots)
    before = _slots(two_slots)
    mine, other = talks
    there = before["right"]
    moved = mine.say("Go on.", id_slot=there)
    assert _slots(two_slots) == {"left": there, "right": None}
    assert moved.accounting["marker"] == "ok"
    assert moved.accounting["decoded"] < 40
    assert moved.accounting["recovered"] > 0
    assert moved.accounting["resident_before"] == 0
    assert mine.say("Go on.", id_slot=there).accounting["resident_before"] > 0
    _lost_nothing(two_slots, other)
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert two_slots.metric(untouched) == 0


@pytest.mark.parametrize("named", [7, -1, None, "0", 10**30])
def test_an_unknown_slot_is_ignored(two_slots: RunningProxy, named: object) -> None:
    talk = ChatClient(two_slots.port, "any", {"id_slot": named})
    talk.say("hello")
    assert talk.say("Go on.").accounting["resident_before"] > 0
    raw = _post(two_slots.port, "/completion", prompt="The river", n_predict=3, id_slot=named)
    assert raw.status == 200


def test_a_request_waits_for_the_slot_it_names(two_slots: RunningProxy) -> None:
    raw = {"prompt": "A", "n_predict": 3, "id_slot": 1}
    with endless_stream(two_slots.port, id_slot=1) as slow, ThreadPoolExecutor(1) as pool:
        beside = ChatClient(two_slots.port, "beside")
        assert beside.say("hello").accounting["marker"] == "ok"
        asked = pool.submit(_post, two_slots.port, "/completion", **raw)
        until(lambda: two_slots.gateway.server.slots.pool.queued)
        assert beside.say("Go on.").accounting["marker"] == "ok" and not asked.done()
        slow.disconnect()
        assert json.loads(asked.result().body)["id_slot"] == 1
        assert not [known for known in two_slots.gateway.conversations if known.in_use]


def test_a_request_that_cannot_lease_all_its_slots_releases_those_it_has(port: int) -> None:
    with proxy(port, policy__budget=BUDGET, limits__queue_timeout_s=0.3) as running:
        with endless_stream(running.port, id_slot=1):
            fields = {"messages": HELLO, "max_tokens": 4, "n": 2}
            refused = _post(running.port, "/v1/chat/completions", **fields)
            assert (refused.status, "retry-after" in refused.headers) == (503, True)
            beside = ChatClient(running.port, "beside", {"id_slot": 0})
            assert beside.say("hello").accounting["marker"] == "ok"
            assert [known for known in running.gateway.conversations if known.in_use]
