"""Side requests and subagents do not disturb the conversation that runs beside them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conversation import FILLER, ChatClient, events
from harness import RunningProxy, ask, proxy
from stock_deployment import Deployment

from evoke_proxy.adapters.metrics import TOKEN_KINDS

JSON = {"Content-Type": "application/json"}
BUDGET = 320
TITLE = {
    "messages": [{"role": "user", "content": f"### Task:\nGenerate a 3 word title.\n{FILLER}"}],
    "max_tokens": 8,
}
PROMPT = {"prompt": f"def sort(items): {FILLER}", "n_predict": 4, "max_tokens": 4}
INFILL = {"input_prefix": "def sort(items):", "input_suffix": "return items", "n_predict": 4}
SIDE_REQUESTS = [
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
    body = ask(running.port, "GET", "/evoke/sessions").body
    sessions: list[dict[str, Any]] = json.loads(body)["sessions"]
    return sessions


def _is_never_degraded(running: RunningProxy) -> bool:
    stages = ("session", "slot", "decide", "plan", "render", "seat", "splice")
    return sum(running.metric("evoke_degraded_total", stage=stage) for stage in stages) == 0


@pytest.mark.parametrize("budget", [BUDGET, None])
def test_a_conversation_gets_the_only_slot_back_after_a_side_request(
    patched_port: int, budget: int | None
) -> None:
    with proxy(patched_port, policy__budget=budget) as running:
        client = ChatClient(running.port)
        for number in range(4):
            client.say(f"Number {number}. {FILLER}")
        for path, body in SIDE_REQUESTS:
            side_answer = ask(running.port, "POST", path, json.dumps(body).encode(), JSON)
            assert side_answer.status == 200 or path == "/infill", side_answer.body
            client.messages.append({"role": "user", "content": "Go on."})
            reply = json.loads(client.post().body)
            client.messages.append(reply["choices"][0]["message"])
            accounting = reply["timings"]["evoke"]
            assert accounting["marker"] == "ok"
            assert accounting["decoded"] < 64, path
            assert budget is None or accounting["n_resident_peak"] <= budget
        assert [session["slot"] for session in _sessions(running)] == [0]
        assert _is_never_degraded(running)


def test_a_side_request_uses_a_free_slot_and_leaves_it_free(two_slots_port: int) -> None:
    with proxy(two_slots_port, policy__budget=BUDGET) as running:
        client = ChatClient(running.port, "talk")
        client.say(f"Hello. {FILLER}")
        slot = _sessions(running)[0]["slot"]
        for path, body in SIDE_REQUESTS[:4] + SIDE_REQUESTS[6:8]:
            ask(running.port, "POST", path, json.dumps(body).encode(), JSON)
            turn = client.say("Go on.")
            assert turn.accounting["recovered"] == 0, path
            assert turn.accounting["decoded"] < 64, path
        sessions = _sessions(running)
        assert [(session["name"], session["slot"]) for session in sessions] == [("talk", slot)]
        second = ChatClient(running.port, "second")
        second.say(f"Something else. {FILLER}")
        assert client.say("Go on.").accounting["recovered"] == 0
        assert {session["slot"] for session in _sessions(running)} == {0, 1}
        assert _is_never_degraded(running)


def test_saved_blocks_of_a_side_request_are_dropped(patched_port: int) -> None:
    ask(patched_port, "POST", "/slots/0?action=block-drop", b'{"all":true}')
    with proxy(patched_port, policy__budget=BUDGET) as running:
        client = ChatClient(running.port, "talk")
        client.say(FILLER)
        long = {"messages": [{"role": "user", "content": f"### Task: title of {FILLER * 9}"}]}
        body = json.dumps(long | {"max_tokens": 8}).encode()
        reply = ask(running.port, "POST", "/v1/chat/completions", body, JSON)
        accounting = json.loads(reply.body)["timings"]["evoke"]
        assert accounting["n_prompt"] > BUDGET >= accounting["n_resident_peak"]
        client.say("Go on.")
        running.wait_for_background()
        session_id = _sessions(running)[0]["id"]
        blocks = json.loads(ask(patched_port, "GET", "/slots/0/blocks").body)["blocks"]
        assert {block["name"].partition("/")[0] for block in blocks} == {session_id}


def _tokens(running: RunningProxy) -> dict[str, float]:
    return {kind: running.metric("evoke_tokens_total", kind=kind) for kind in TOKEN_KINDS}


def _prompt_of(reply: dict[str, Any]) -> int:
    """The tokens of the prompt that a reply states, in any dialect."""
    usage = reply["usage"]
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
def test_the_tokens_of_side_requests_are_counted_beside_those_of_the_sessions(
    patched: bool, patched_port: int, tmp_path: Path
) -> None:
    """All prompts that the replies state are counted once; the sessions have only their own."""
    with ExitStack() as stack:
        deployment = Deployment(tmp_path)
        port = patched_port if patched else stack.enter_context(deployment.server())
        folder = "" if patched else str(tmp_path)
        running = stack.enter_context(proxy(port, snapshots__directory=folder))
        client = ChatClient(running.port)
        n_turns = n_side = 0
        for path, body in SIDE_REQUESTS[:4]:
            client.messages.append({"role": "user", "content": f"Go on. {FILLER}"})
            reply = json.loads(client.post().body)
            client.messages.append(reply["choices"][0]["message"])
            n_turns += _prompt_of(reply)
            before = _tokens(running)
            answer = ask(running.port, "POST", path, json.dumps(body).encode(), JSON)
            assert answer.status == 200, answer.body
            if body.get("stream"):
                (end,) = [each for each in events(answer.body) if each.get("timings")]
                expected = end["timings"]["cache_n"] + end["timings"]["prompt_n"]
            else:
                expected = _prompt_of(json.loads(answer.body))
            n_side += expected
            counted = _tokens(running)
            assert sum(counted.values()) - sum(before.values()) == expected > 0, path
            assert counted["decoded"] > before["decoded"]
        assert sum(_tokens(running).values()) == n_turns + n_side
        assert running.metric("evoke_ttft_seconds_count", path="side") == 4
        (session,) = _sessions(running)
        details = json.loads(ask(running.port, "GET", f"/evoke/sessions/{session['id']}").body)
        assert sum(turn["prompt"] for turn in details["history"]) == n_turns


def test_subagents_that_share_an_id_are_separate_sessions(two_slots_port: int) -> None:
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
        assert [session["name"] for session in sessions] == ["shared", "shared"]
        assert {session["slot"] for session in sessions} == {0, 1}


def test_conversations_with_the_same_user_id_are_separate_sessions(two_slots_port: int) -> None:
    with proxy(two_slots_port, policy__budget=BUDGET) as running:
        fields = {"user": "ann", "max_tokens": 80}
        clients = [ChatClient(running.port, None, fields) for _ in range(2)]
        for number in range(3):
            for topic, client in enumerate(clients):
                turn = client.say(f"Topic {topic}, {number}. {FILLER}")
                assert number == 0 or turn.accounting["decoded"] < 160
        sessions = _sessions(running)
        assert [(session["name"], session["turns"]) for session in sessions] == [(None, 3)] * 2


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
def test_the_session_id_of_each_client_is_its_name_in_the_list_of_sessions(
    patched_proxy: RunningProxy, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2})
    request = json.dumps(json.loads(body) | fields).encode()
    answer = ask(patched_proxy.port, "POST", "/v1/chat/completions", request, JSON | headers)
    assert answer.status == 200
    names = [str(session["name"])[:7] for session in _sessions(patched_proxy)]
    assert names == ["the-one"]
