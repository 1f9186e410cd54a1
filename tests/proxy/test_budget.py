"""Sessions with a budget on a real patched llama-server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conversation import ENDLESS, FILLER, ChatClient, TurnResult, endless_stream, events
from harness import RunningProxy, ask, llama_server, proxy, server_binary, server_counter

from evoke_proxy.demo.processes import free_port

BUDGET = 320


def _balances(turn: TurnResult) -> bool:
    """Whether the token accounting of a turn sums to its prompt."""
    kinds = ("resident_before", "recovered", "decoded", "omitted")
    return bool(sum(turn.accounting[kind] for kind in kinds) == turn.accounting["n_prompt"])


def test_a_long_session_stays_in_its_budget(patched_proxy: RunningProxy) -> None:
    client = ChatClient(patched_proxy.port, "long", {"evoke_budget": BUDGET})
    turns = [client.say(f"Turn {number}. {FILLER}") for number in range(9)]
    assert turns[-1].accounting["n_prompt"] > 4 * BUDGET
    for turn in turns:
        assert turn.accounting["marker"] == "ok"
        assert turn.accounting["n_resident_peak"] <= BUDGET
        assert _balances(turn)
        assert turn.headers["x-evoke-session"] == "long"
        assert turn.headers["x-evoke-policy"] == "evoke"
    evicted = sum(turn.blocks("x-evoke-evicted") for turn in turns)
    auto = sum(len(turn.accounting["auto_evicted"]) for turn in turns)
    assert evicted > 5
    assert patched_proxy.metric("evoke_blocks_evicted_total") == evicted + auto
    decoded = sum(turn.accounting["decoded"] for turn in turns)
    assert patched_proxy.metric("evoke_tokens_total", kind="decoded") == decoded
    assert patched_proxy.metric("evoke_resident_tokens") == turns[-1].accounting["n_resident"]
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert patched_proxy.metric(untouched) == 0
    assert f"tokens={turns[-1].accounting['omitted']}" == turns[-1].headers["x-evoke-omitted"]


def test_a_question_recovers_the_blocks_it_is_about(patched_proxy: RunningProxy) -> None:
    client = ChatClient(patched_proxy.port, "back", {"evoke_budget": BUDGET})
    client.say("The access code of the Meridian vault is 7741.")
    for number in range(7):
        client.say(f"Turn {number}. {FILLER}")
    turn = client.say("What is the access code of the Meridian vault?")
    assert turn.blocks("x-evoke-recovered") > 0
    assert turn.accounting["recovered"] > 0
    assert turn.accounting["n_resident_peak"] <= BUDGET
    assert patched_proxy.metric("evoke_blocks_recovered_total") > 0


def test_the_discard_policy_recovers_nothing(patched_proxy: RunningProxy) -> None:
    client = ChatClient(
        patched_proxy.port, "gone", {"evoke_budget": BUDGET, "evoke_policy": "discard"}
    )
    client.say("The access code of the Meridian vault is 7741.")
    for number in range(7):
        client.say(f"Turn {number}. {FILLER}")
    turn = client.say("What is the access code of the Meridian vault?")
    assert turn.accounting["recovered"] == 0
    assert turn.accounting["omitted"] > 0


@pytest.mark.parametrize("fields", [{}, {"evoke_policy": "no_eviction", "evoke_budget": BUDGET}])
def test_nothing_is_evicted_without_a_budget(
    patched_proxy: RunningProxy, fields: dict[str, object]
) -> None:
    client = ChatClient(patched_proxy.port, "all", fields)
    turns = [client.say(f"Turn {number}. {FILLER}") for number in range(5)]
    assert turns[-1].accounting["n_prompt"] > 1.5 * BUDGET
    assert all(turn.accounting["omitted"] == 0 and _balances(turn) for turn in turns)
    assert patched_proxy.metric("evoke_budget_breach_total") == 0


def test_the_truncate_policy_sends_a_prompt_within_the_budget(patched_proxy: RunningProxy) -> None:
    client = ChatClient(
        patched_proxy.port, "cut", {"evoke_policy": "truncate", "evoke_budget": BUDGET}
    )
    turns = [client.say(f"Turn {number}. {FILLER}") for number in range(6)]
    assert all(turn.accounting["n_prompt"] <= BUDGET for turn in turns)
    assert turns[-1].headers["x-evoke-policy"] == "truncate"
    patched_proxy.wait_until_idle()
    sessions = json.loads(ask(patched_proxy.port, "GET", "/evoke/sessions").body)["sessions"]
    assert [(session["name"], session["turns"]) for session in sessions] == [("cut", 6)]


def test_only_clients_that_use_fields_of_the_proxy_get_its_headers(
    patched_port: int, patched_proxy: RunningProxy
) -> None:
    ChatClient(patched_port).say("hello")  # later requests find the same cached prefix
    client = ChatClient(patched_proxy.port)
    turn = client.say("hello")
    assert [name for name in turn.headers if name.startswith("x-evoke")] == []
    direct = ChatClient(patched_port).say("hello")
    assert direct.text == turn.text


def test_a_stream_has_the_same_text_as_an_answer_that_is_not_streamed(
    patched_proxy: RunningProxy,
) -> None:
    client = ChatClient(patched_proxy.port, "stream")
    client.messages.append({"role": "user", "content": f"Hello. {FILLER}"})
    client.post()  # later requests find the same cached prefix
    whole = json.loads(client.post().body)["choices"][0]["message"]["content"]
    streamed = client.post(stream=True).body
    deltas = [event["choices"][0]["delta"] for event in events(streamed) if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole
    assert streamed.endswith(b"data: [DONE]\n\n")


def test_a_session_is_identified_by_its_tokens(patched_proxy: RunningProxy) -> None:
    client = ChatClient(patched_proxy.port, None, {"evoke_budget": BUDGET})
    first = client.say(FILLER)
    second = client.say("And then?")
    assert first.headers["x-evoke-session"] == second.headers["x-evoke-session"]
    assert second.accounting["decoded"] < second.accounting["n_prompt"] / 2


def test_a_session_continues_in_a_slot_that_another_session_used(
    patched_proxy: RunningProxy,
) -> None:
    fields = {"evoke_budget": BUDGET}
    first, second = (ChatClient(patched_proxy.port, name, fields) for name in ("one", "other"))
    for number in range(4):
        first.say(f"Number {number}. {FILLER}")
        last = second.say(f"Something else {number}, entirely. {FILLER}")
    returned = first.say("Go on.")
    assert returned.accounting["marker"] == last.accounting["marker"] == "ok"
    assert returned.accounting["recovered"] > 0
    assert returned.accounting["decoded"] < 64
    assert patched_proxy.metric("evoke_degraded_total", stage="plan") == 0


@pytest.mark.parametrize("neighbour", [None, 1200, "unmanaged"])
def test_rows_of_the_previous_session_are_no_budget_breach_of_the_next(
    patched_proxy: RunningProxy, neighbour: int | str | None
) -> None:
    budgeted = ChatClient(patched_proxy.port, "mine", {"evoke_budget": BUDGET})
    fields = {"evoke": False} if neighbour == "unmanaged" else {"evoke_budget": neighbour}
    other = ChatClient(patched_proxy.port, "other", fields)
    for number in range(5):
        # The common beginning of both prompts stays in the slot, as rows of the other session.
        other.say(f"{FILLER} {FILLER} And again, {number}.")
        slot = json.loads(ask(patched_proxy.port, "GET", "/slots/0/blocks").body)
        turn = budgeted.say(f"{FILLER} Turn {number}.")
        assert turn.accounting["marker"] == "ok"
        assert turn.accounting["n_resident"] <= turn.accounting["n_resident_peak"] <= BUDGET
    assert slot["n_resident"] > 2 * BUDGET
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert patched_proxy.metric(untouched) == 0


def test_a_request_without_a_plan_does_not_disturb_the_session_in_its_slot(
    patched_proxy: RunningProxy,
) -> None:
    client = ChatClient(patched_proxy.port, "mixed", {"evoke_budget": BUDGET})
    for number in range(5):
        client.say(f"Turn {number}. {FILLER}")
    unmanaged = ChatClient(patched_proxy.port).say("Who are you?", evoke=False)
    assert unmanaged.accounting == {}
    assert patched_proxy.metric("evoke_bypass_total", reason="disabled") == 1
    turn = client.say("Go on.")
    assert turn.accounting["marker"] == "ok"
    assert turn.accounting["n_resident_peak"] <= BUDGET


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"evoke": False}, "disabled"), ({"cache_prompt": False}, "cache_prompt"), ({"n": 2}, "n")],
)
def test_requests_that_cannot_have_a_budget_bypass_it(
    patched_proxy: RunningProxy, fields: dict[str, object], reason: str
) -> None:
    client = ChatClient(patched_proxy.port, "by", {"evoke_budget": BUDGET})
    client.messages.append({"role": "user", "content": FILLER})
    answer = client.post(**fields)
    # With one slot, llama-server answers n > 1 with an error.
    assert answer.status == (400 if reason == "n" else 200)
    assert [name for name in answer.headers if name.startswith("x-evoke")] == []
    assert patched_proxy.metric("evoke_bypass_total", reason=reason) == 1


def test_blocks_whose_copies_were_lost_are_decoded(
    patched_port: int, patched_proxy: RunningProxy
) -> None:
    client = ChatClient(patched_proxy.port, "vanished", {"evoke_budget": BUDGET})
    client.say("The access code of the Meridian vault is 7741.")
    for number in range(7):
        client.say(f"Turn {number}. {FILLER}")
    patched_proxy.wait_for_background()
    dropped = ask(patched_port, "POST", "/slots/0?action=block-drop", b'{"all":true}')
    assert json.loads(dropped.body)["n_dropped"] > 0
    turn = client.say("What is the access code of the Meridian vault?")
    assert turn.accounting["marker"] == "ok"
    assert turn.accounting["recovered"] == 0
    assert patched_proxy.metric("evoke_plan_failures_total", reason="unknown_block") == 1
    assert patched_proxy.metric("evoke_degraded_total", stage="plan") == 0


def test_pins_beyond_their_share_of_the_budget_are_refused(patched_proxy: RunningProxy) -> None:
    client = ChatClient(patched_proxy.port, "pins", {"evoke_budget": BUDGET})
    client.messages.append({"role": "user", "content": FILLER * 3, "evoke_keep": "pin"})
    answer = client.post()
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["code"] == "evoke_pin_budget_exceeded"
    del client.messages[-1]
    assert client.say("hello").accounting["marker"] == "ok"


def test_a_request_is_answered_503_with_retry_after_if_the_queue_is_full(patched_port: int) -> None:
    with proxy(patched_port, limits__queue=0) as running:
        with endless_stream(running.port):
            refused = ChatClient(running.port, "other")
            refused.messages.append({"role": "user", "content": "hello"})
            answer = refused.post()
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert json.loads(answer.body)["error"]["code"] == "slots_busy"


def test_a_client_that_disconnects_releases_its_slot_after_a_turn(
    patched_port: int, patched_proxy: RunningProxy
) -> None:
    client = ChatClient(patched_proxy.port, "leaver", {"evoke_budget": BUDGET})
    client.say("My favorite number is 68285.")
    client.say(FILLER)
    before = server_counter(patched_port, "tokens_predicted_total")
    messages = [*client.messages, {"role": "user", "content": "And now very long."}]
    with endless_stream(patched_proxy.port, "leaver", messages=messages, evoke_budget=BUDGET):
        pass
    turn = client.say("What is my favorite number?")
    n_generated = server_counter(patched_port, "tokens_predicted_total") - before
    assert n_generated < ENDLESS, "the answer was generated to its end"
    assert turn.accounting["marker"] == "ok" and "68285" in turn.text
    assert turn.accounting["n_resident_peak"] <= BUDGET
    assert patched_proxy.metric("evoke_requests_total", endpoint="/v1/chat/completions", code="499")


def test_forgotten_sessions_leave_no_blocks_behind(patched_port: int) -> None:
    ask(patched_port, "POST", "/slots/0?action=block-drop", b'{"all":true}')
    with proxy(patched_port, limits__sessions=1) as running:
        for name in ("first", "second", "third"):
            client = ChatClient(running.port, name, {"evoke_budget": BUDGET})
            for number in range(4):
                client.say(f"{name} {number}. {FILLER}")
        running.wait_for_background()
        sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        assert [session["name"] for session in sessions] == ["third"]
        blocks = json.loads(ask(patched_port, "GET", "/slots/0/blocks").body)["blocks"]
        assert blocks
        assert {block["name"].partition("/")[0] for block in blocks} == {sessions[0]["id"]}


def test_each_of_two_sessions_has_its_own_slot(two_slots_port: int) -> None:
    with proxy(two_slots_port, policy__budget=BUDGET) as running:
        clients = [ChatClient(running.port, name) for name in ("left", "right")]
        for number in range(5):
            turns = [client.say(f"{client.session} {number}. {FILLER}") for client in clients]
        # A session that had lost its slot would have all its rows recovered, and none resident.
        assert all(turn.accounting["resident_before"] > 0 for turn in turns)
        sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        assert {session["slot"] for session in sessions} == {0, 1}
        third = ChatClient(running.port, "third").say(FILLER)
        assert third.accounting["marker"] == "ok"
        assert clients[0].say("Go on.").accounting["decoded"] < 64


def test_a_session_continues_after_a_detected_restart_of_the_server() -> None:
    binary, options = server_binary(patched=True), ("-np", "1", "--evoke-ram", "64")
    port = free_port()
    with proxy(port) as running:
        client = ChatClient(running.port, "restart", {"evoke_budget": BUDGET})
        with llama_server(binary, *options, port=port):
            for number in range(5):
                client.say(f"Turn {number}. {FILLER}")
        assert client.post().status == 503
        with llama_server(binary, *options, port=port):
            turn = client.say("Go on.")
            assert turn.accounting["marker"] == "ok"
            assert turn.accounting["n_resident_peak"] <= BUDGET
            assert turn.accounting["recovered"] == 0


def test_a_session_continues_after_an_undetected_loss_of_its_rows_and_copies(
    tmp_path: Path,
) -> None:
    binary = server_binary(patched=True)
    options = ("-np", "1", "--evoke-ram", "64", "--slot-save-path", str(tmp_path))
    with llama_server(binary, *options) as port, proxy(port) as running:
        client = ChatClient(running.port, "restart", {"evoke_budget": BUDGET})
        for number in range(5):
            client.say(f"Turn {number}. {FILLER}")
        assert ask(port, "POST", "/slots/0?action=erase").status == 200
        dropped = ask(port, "POST", "/slots/0?action=block-drop", b'{"all":true}')
        assert json.loads(dropped.body)["n_dropped"] > 0
        turn = client.say("Go on.")
        assert turn.accounting["marker"] == "ok"
        assert turn.accounting["n_resident_peak"] <= BUDGET
        assert running.metric("evoke_degraded_total", stage="plan") == 0


def test_requests_directly_after_a_stream_are_answered(patched_proxy: RunningProxy) -> None:
    # llama-server closes the connection after a streamed answer without a Connection header.
    client = ChatClient(patched_proxy.port, "quick")
    client.messages.append({"role": "user", "content": "hello"})
    for _ in range(40):
        answer = client.post(stream=True, max_tokens=2)
        assert answer.status == 200
    assert patched_proxy.metric("evoke_degraded_total", stage="render") == 0


def test_calls_to_a_server_with_a_key_use_the_key_of_the_client_or_the_configured_one() -> None:
    binary, options = server_binary(patched=True), ("-np", "1", "--evoke-ram", "64")
    body = b'{"messages":[{"role":"user","content":"hello"}],"max_tokens":2}'
    with llama_server(binary, *options, "--api-key", "k1") as port, proxy(port) as running:
        answers = [
            ask(running.port, "POST", "/v1/chat/completions", body, headers)
            for headers in ({}, {"Authorization": "Bearer k1"})
        ]
        assert [answer.status for answer in answers] == [401, 200]
        assert "evoke" in json.loads(answers[1].body)["timings"]
        assert ask(running.port, "GET", "/evoke/ready").status == 200
        with proxy(port, upstream__api_key="k1") as keyed:
            assert ask(keyed.port, "GET", "/evoke/ready").status == 200
            # The configured key is for calls of the proxy only, not for clients without a key.
            assert ask(keyed.port, "POST", "/v1/chat/completions", body).status == 401
