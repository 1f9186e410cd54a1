"""Side requests and subagents do not change the conversation beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask, proxy

JSON = {"Content-Type": "application/json"}
BUDGET = 320
TITLE = {
    "messages": [{"role": "user", "content": f"### Task:\nGenerate a 3 word title.\n{FILLER}"}],
    "max_tokens": 8,
}
PROMPT = {"prompt": f"def sort(items): {FILLER}", "n_predict": 4, "max_tokens": 4}
INFILL = {"input_prefix": "def sort(items):", "input_suffix": "return items", "n_predict": 4}
ASIDE = [
    ("/v1/chat/completions", TITLE),
    ("/v1/chat/completions", TITLE | {"stream": True}),
    ("/v1/messages", TITLE),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}),
    ("/v1/chat/completions", TITLE | {"evoke": False}),
    ("/v1/chat/completions", TITLE | {"cache_prompt": False}),
    ("/v1/completions", PROMPT),
    ("/completion", PROMPT | {"stream": True}),
    ("/infill", INFILL),
]


def _sessions(running: RunningProxy) -> list[dict[str, Any]]:
    running.wait_until_idle()
    found: list[dict[str, Any]] = json.loads(ask(running.port, "GET", "/evoke/sessions").body)[
        "sessions"
    ]
    return found


def _no_fault(running: RunningProxy) -> bool:
    stages = ("session", "slot", "decide", "plan", "render", "seat", "splice")
    return sum(running.metric("evoke_degraded_total", stage=stage) for stage in stages) == 0


@pytest.mark.parametrize("budget", [BUDGET, None])
def test_a_side_request_restores_the_only_slot(patched_port: int, budget: int | None) -> None:
    with proxy(patched_port, policy__budget=budget) as running:
        talk = ChatClient(running.port)
        for number in range(4):
            talk.say(f"Number {number}. {FILLER}")
        for path, body in ASIDE:
            aside = ask(running.port, "POST", path, json.dumps(body).encode(), JSON)
            assert aside.status == 200 or path == "/infill", aside.body
            talk.messages.append({"role": "user", "content": "Go on."})
            reply = json.loads(talk.post().body)
            talk.messages.append(reply["choices"][0]["message"])
            accounting = reply["timings"]["evoke"]
            assert accounting["marker"] == "ok"
            assert accounting["decoded"] < 64, path
            assert budget is None or accounting["n_resident_peak"] <= budget
        assert [known["slot"] for known in _sessions(running)] == [0]
        assert _no_fault(running)


def test_a_side_request_uses_a_spare_slot_that_stays_free(two_slots_port: int) -> None:
    with proxy(two_slots_port, policy__budget=BUDGET) as running:
        talk = ChatClient(running.port, "talk")
        talk.say(f"Hello. {FILLER}")
        slot = _sessions(running)[0]["slot"]
        for path, body in ASIDE[:4] + ASIDE[6:8]:
            ask(running.port, "POST", path, json.dumps(body).encode(), JSON)
            said = talk.say("Go on.")
            assert said.accounting["recovered"] == 0, path
            assert said.accounting["decoded"] < 64, path
        assert [(known["name"], known["slot"]) for known in _sessions(running)] == [("talk", slot)]
        second = ChatClient(running.port, "second")
        second.say(f"Something else. {FILLER}")
        assert talk.say("Go on.").accounting["recovered"] == 0
        assert {known["slot"] for known in _sessions(running)} == {0, 1}
        assert _no_fault(running)


def test_copies_of_a_side_request_are_dropped(patched_port: int) -> None:
    ask(patched_port, "POST", "/slots/0?action=block-drop", b'{"all":true}')
    with proxy(patched_port, policy__budget=BUDGET) as running:
        talk = ChatClient(running.port, "talk")
        talk.say(FILLER)
        long = {"messages": [{"role": "user", "content": f"### Task: title of {FILLER * 9}"}]}
        body = json.dumps(long | {"max_tokens": 8}).encode()
        reply = ask(running.port, "POST", "/v1/chat/completions", body, JSON)
        accounting = json.loads(reply.body)["timings"]["evoke"]
        assert accounting["n_prompt"] > BUDGET >= accounting["n_resident_peak"]
        talk.say("Go on.")
        running.wait_for_background()
        own = _sessions(running)[0]["id"]
        blocks = json.loads(ask(patched_port, "GET", "/slots/0/blocks").body)["blocks"]
        assert {block["name"].partition("/")[0] for block in blocks} == {own}


def test_subagents_that_share_an_id_are_branches(two_slots_port: int) -> None:
    with proxy(two_slots_port, policy__budget=800) as running:
        system = {"role": "system", "content": f"You are an agent. {FILLER * 4}"}
        tools = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
        agents = [
            ChatClient(running.port, None, {"prompt_cache_key": "shared", "tools": tools}, [system])
            for _ in range(2)
        ]
        for agent, task in zip(agents, ("Look at the left.", "Look at the right."), strict=True):
            agent.say(f"{task} {FILLER}")
        for number in range(3):
            for agent in agents:
                accounting = agent.say(f"Step {number}.").accounting
                assert accounting["decoded"] < 64
                assert accounting["recovered"] == 0
        sessions = _sessions(running)
        assert [known["name"] for known in sessions] == ["shared", "shared"]
        assert {known["slot"] for known in sessions} == {0, 1}


def test_the_id_of_a_person_does_not_join_conversations(two_slots_port: int) -> None:
    with proxy(two_slots_port, policy__budget=BUDGET) as running:
        fields = {"user": "ann", "max_tokens": 80}
        talks = [ChatClient(running.port, None, fields) for _ in range(2)]
        for number in range(3):
            for topic, talk in enumerate(talks):
                said = talk.say(f"Topic {topic}, {number}. {FILLER}")
                assert number == 0 or said.accounting["decoded"] < 160
        sessions = _sessions(running)
        assert [(known["name"], known["turns"]) for known in sessions] == [(None, 3)] * 2


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"X-Claude-Code-Session-Id": "the-one"}, {}),
        ({}, {"metadata": {"user_id": "user_1_account_2_session_the-one-0"}}),
        ({"x-session-affinity": "the-one"}, {}),
        ({"session_id": "the-one"}, {"prompt_cache_key": "less"}),
        ({"X-OpenWebUI-Chat-Id": "the-one"}, {"user": "ann"}),
        ({"X-Conversation-Id": "the-one"}, {}),
        ({"x-litellm-session-id": "the-one"}, {}),
        ({}, {"prompt_cache_key": "the-one"}),
    ],
)
def test_names_of_clients_are_in_the_list_of_sessions(
    patched_proxy: RunningProxy, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2})
    given = json.dumps(json.loads(body) | fields).encode()
    answer = ask(patched_proxy.port, "POST", "/v1/chat/completions", given, JSON | headers)
    assert answer.status == 200
    assert [str(known["name"])[:7] for known in _sessions(patched_proxy)] == ["the-one"]
