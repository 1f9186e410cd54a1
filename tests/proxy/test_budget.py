"""Budgeted sessions on a real patched llama-server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conversation import ENDLESS, FILLER, ChatClient, TurnResult, endless, events
from harness import RunningProxy, ask, counted, llama_server, proxy, server_binary

from evoke_proxy.demo.processes import free_port

BUDGET = 320


def _balances(said: TurnResult) -> bool:
    kinds = ("resident_before", "recovered", "decoded", "omitted")
    return bool(sum(said.accounting[kind] for kind in kinds) == said.accounting["n_prompt"])


def test_a_long_session_stays_in_its_budget(patched_proxy: RunningProxy) -> None:
    talk = ChatClient(patched_proxy.port, "long", {"evoke_budget": BUDGET})
    turns = [talk.say(f"Turn {number}. {FILLER}") for number in range(9)]
    assert turns[-1].accounting["n_prompt"] > 4 * BUDGET
    for said in turns:
        assert said.accounting["marker"] == "ok"
        assert said.accounting["n_resident_peak"] <= BUDGET
        assert _balances(said)
        assert said.headers["x-evoke-session"] == "long"
        assert said.headers["x-evoke-policy"] == "evoke"
    evicted = sum(said.blocks("x-evoke-evicted") for said in turns)
    auto = sum(len(said.accounting["auto_evicted"]) for said in turns)
    assert evicted > 5
    assert patched_proxy.metric("evoke_blocks_evicted_total") == evicted + auto
    decoded = sum(said.accounting["decoded"] for said in turns)
    assert patched_proxy.metric("evoke_tokens_total", kind="decoded") == decoded
    assert patched_proxy.metric("evoke_resident_tokens") == turns[-1].accounting["n_resident"]
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert patched_proxy.metric(untouched) == 0
    assert f"tokens={turns[-1].accounting['omitted']}" == turns[-1].headers["x-evoke-omitted"]


def test_a_question_recovers_the_blocks_it_is_about(patched_proxy: RunningProxy) -> None:
    talk = ChatClient(patched_proxy.port, "back", {"evoke_budget": BUDGET})
    talk.say("The access code of the Meridian vault is 7741.")
    for number in range(7):
        talk.say(f"Turn {number}. {FILLER}")
    said = talk.say("What is the access code of the Meridian vault?")
    assert said.blocks("x-evoke-recovered") > 0
    assert said.accounting["recovered"] > 0
    assert said.accounting["n_resident_peak"] <= BUDGET
    assert patched_proxy.metric("evoke_blocks_recovered_total") > 0


def test_discard_never_recovers(patched_proxy: RunningProxy) -> None:
    talk = ChatClient(
        patched_proxy.port, "gone", {"evoke_budget": BUDGET, "evoke_policy": "discard"}
    )
    talk.say("The access code of the Meridian vault is 7741.")
    for number in range(7):
        talk.say(f"Turn {number}. {FILLER}")
    said = talk.say("What is the access code of the Meridian vault?")
    assert said.accounting["recovered"] == 0
    assert said.accounting["omitted"] > 0


@pytest.mark.parametrize("fields", [{}, {"evoke_policy": "no_eviction", "evoke_budget": BUDGET}])
def test_nothing_is_evicted_without_a_budget(
    patched_proxy: RunningProxy, fields: dict[str, object]
) -> None:
    talk = ChatClient(patched_proxy.port, "all", fields)
    turns = [talk.say(f"Turn {number}. {FILLER}") for number in range(5)]
    assert turns[-1].accounting["n_prompt"] > 1.5 * BUDGET
    assert all(said.accounting["omitted"] == 0 and _balances(said) for said in turns)
    assert patched_proxy.metric("evoke_budget_breach_total") == 0


def test_truncate_sends_less(patched_proxy: RunningProxy) -> None:
    talk = ChatClient(
        patched_proxy.port, "cut", {"evoke_policy": "truncate", "evoke_budget": BUDGET}
    )
    turns = [talk.say(f"Turn {number}. {FILLER}") for number in range(6)]
    assert all(said.accounting["n_prompt"] <= BUDGET for said in turns)
    assert turns[-1].headers["x-evoke-policy"] == "truncate"
    patched_proxy.quiet()
    sessions = json.loads(ask(patched_proxy.port, "GET", "/evoke/sessions").body)["sessions"]
    assert [(known["name"], known["turns"]) for known in sessions] == [("cut", 6)]


def test_headers_of_the_proxy_are_sent_only_to_clients_that_use_its_fields(
    patched_port: int, patched_proxy: RunningProxy
) -> None:
    ChatClient(patched_port).say("hello")  # from now on both find the same prefix cached
    talk = ChatClient(patched_proxy.port)
    said = talk.say("hello")
    assert [name for name in said.headers if name.startswith("x-evoke")] == []
    direct = ChatClient(patched_port).say("hello")
    assert direct.text == said.text


def test_a_stream_has_the_same_text_as_a_complete_answer(patched_proxy: RunningProxy) -> None:
    talk = ChatClient(patched_proxy.port, "stream")
    talk.messages.append({"role": "user", "content": f"Hello. {FILLER}"})
    talk.post()  # from now on both find the same prefix cached
    whole = json.loads(talk.post().body)["choices"][0]["message"]["content"]
    streamed = talk.post(stream=True).body
    deltas = [event["choices"][0]["delta"] for event in events(streamed) if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole
    assert streamed.endswith(b"data: [DONE]\n\n")


def test_a_session_is_identified_by_its_tokens(patched_proxy: RunningProxy) -> None:
    talk = ChatClient(patched_proxy.port, None, {"evoke_budget": BUDGET})
    first = talk.say(FILLER)
    second = talk.say("And then?")
    assert first.headers["x-evoke-session"] == second.headers["x-evoke-session"]
    assert second.accounting["decoded"] < second.accounting["n_prompt"] / 2


def test_a_session_continues_in_a_slot_that_another_session_used(
    patched_proxy: RunningProxy,
) -> None:
    fields = {"evoke_budget": BUDGET}
    one, other = (ChatClient(patched_proxy.port, name, fields) for name in ("one", "other"))
    for number in range(4):
        one.say(f"Number {number}. {FILLER}")
        mine = other.say(f"Something else {number}, entirely. {FILLER}")
    back = one.say("Go on.")
    assert back.accounting["marker"] == mine.accounting["marker"] == "ok"
    assert back.accounting["recovered"] > 0
    assert back.accounting["decoded"] < 64
    assert patched_proxy.metric("evoke_degraded_total", stage="plan") == 0


@pytest.mark.parametrize("neighbour", [None, 1200, "unmanaged"])
def test_rows_of_the_previous_session_count_as_no_breach_of_the_next(
    patched_proxy: RunningProxy, neighbour: int | str | None
) -> None:
    mine = ChatClient(patched_proxy.port, "mine", {"evoke_budget": BUDGET})
    fields = {"evoke": False} if neighbour == "unmanaged" else {"evoke_budget": neighbour}
    other = ChatClient(patched_proxy.port, "other", fields)
    for number in range(5):
        # What both begin with stays in the slot and is theirs.
        other.say(f"{FILLER} {FILLER} And again, {number}.")
        slot = json.loads(ask(patched_proxy.port, "GET", "/slots/0/blocks").body)
        said = mine.say(f"{FILLER} Turn {number}.")
        assert said.accounting["marker"] == "ok"
        assert said.accounting["n_resident"] <= said.accounting["n_resident_peak"] <= BUDGET
    assert slot["n_resident"] > 2 * BUDGET
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert patched_proxy.metric(untouched) == 0


def test_a_request_of_another_session_in_between_costs_only_time(
    patched_proxy: RunningProxy,
) -> None:
    talk = ChatClient(patched_proxy.port, "mixed", {"evoke_budget": BUDGET})
    for number in range(5):
        talk.say(f"Turn {number}. {FILLER}")
    stranger = ChatClient(patched_proxy.port).say("Who are you?", evoke=False)
    assert stranger.accounting == {}
    assert patched_proxy.metric("evoke_bypass_total", reason="disabled") == 1
    said = talk.say("Go on.")
    assert said.accounting["marker"] == "ok"
    assert said.accounting["n_resident_peak"] <= BUDGET


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"evoke": False}, "disabled"), ({"cache_prompt": False}, "cache_prompt"), ({"n": 2}, "n")],
)
def test_requests_that_cannot_have_a_budget_bypass_it(
    patched_proxy: RunningProxy, fields: dict[str, object], reason: str
) -> None:
    talk = ChatClient(patched_proxy.port, "by", {"evoke_budget": BUDGET})
    talk.messages.append({"role": "user", "content": FILLER})
    answer = talk.post(**fields)
    # with one slot n > 1 is an error, and llama-server's own to make
    assert answer.status == (400 if reason == "n" else 200)
    assert [name for name in answer.headers if name.startswith("x-evoke")] == []
    assert patched_proxy.metric("evoke_bypass_total", reason=reason) == 1


def test_blocks_with_lost_copies_are_decoded_again(
    patched_port: int, patched_proxy: RunningProxy
) -> None:
    talk = ChatClient(patched_proxy.port, "vanished", {"evoke_budget": BUDGET})
    talk.say("The access code of the Meridian vault is 7741.")
    for number in range(7):
        talk.say(f"Turn {number}. {FILLER}")
    patched_proxy.settled()
    dropped = ask(patched_port, "POST", "/slots/0?action=block-drop", b'{"all":true}')
    assert json.loads(dropped.body)["n_dropped"] > 0
    said = talk.say("What is the access code of the Meridian vault?")
    assert said.accounting["marker"] == "ok"
    assert said.accounting["recovered"] == 0
    assert patched_proxy.metric("evoke_plan_failures_total", reason="unknown_block") == 1
    assert patched_proxy.metric("evoke_degraded_total", stage="plan") == 0


def test_pins_over_the_cap_are_refused(patched_proxy: RunningProxy) -> None:
    talk = ChatClient(patched_proxy.port, "pins", {"evoke_budget": BUDGET})
    talk.messages.append({"role": "user", "content": FILLER * 3, "evoke_keep": "pin"})
    answer = talk.post()
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["code"] == "evoke_pin_budget_exceeded"
    del talk.messages[-1]
    assert talk.say("hello").accounting["marker"] == "ok"


def test_a_full_queue_is_503_with_retry_after(patched_port: int) -> None:
    with proxy(patched_port, limits__queue=0) as running:
        with endless(running.port):
            refused = ChatClient(running.port, "other")
            refused.messages.append({"role": "user", "content": "hello"})
            answer = refused.post()
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert json.loads(answer.body)["error"]["code"] == "slots_busy"


def test_a_client_that_disconnects_releases_its_slot_after_a_turn(
    patched_port: int, patched_proxy: RunningProxy
) -> None:
    talk = ChatClient(patched_proxy.port, "leaver", {"evoke_budget": BUDGET})
    talk.say("My favorite number is 68285.")
    talk.say(FILLER)
    made = counted(patched_port, "tokens_predicted_total")
    messages = [*talk.messages, {"role": "user", "content": "And now very long."}]
    with endless(patched_proxy.port, "leaver", messages=messages, evoke_budget=BUDGET):
        pass
    said = talk.say("What is my favorite number?")
    assert counted(patched_port, "tokens_predicted_total") - made < ENDLESS, "made to its end"
    assert said.accounting["marker"] == "ok" and "68285" in said.text
    assert said.accounting["n_resident_peak"] <= BUDGET
    assert patched_proxy.metric("evoke_requests_total", endpoint="/v1/chat/completions", code="499")


def test_forgotten_sessions_leave_no_blocks_behind(patched_port: int) -> None:
    ask(patched_port, "POST", "/slots/0?action=block-drop", b'{"all":true}')
    with proxy(patched_port, limits__sessions=1) as running:
        for name in ("first", "second", "third"):
            talk = ChatClient(running.port, name, {"evoke_budget": BUDGET})
            for number in range(4):
                talk.say(f"{name} {number}. {FILLER}")
        running.settled()
        sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        assert [known["name"] for known in sessions] == ["third"]
        blocks = json.loads(ask(patched_port, "GET", "/slots/0/blocks").body)["blocks"]
        assert blocks
        assert {block["name"].partition("/")[0] for block in blocks} == {sessions[0]["id"]}


def test_two_sessions_have_a_slot_each(two_slots_port: int) -> None:
    with proxy(two_slots_port, policy__budget=BUDGET) as running:
        talks = [ChatClient(running.port, name) for name in ("left", "right")]
        for number in range(5):
            turns = [talk.say(f"{talk.session} {number}. {FILLER}") for talk in talks]
        # one that had lost its slot would find every row of its own recovered, none still there
        assert all(said.accounting["resident_before"] > 0 for said in turns)
        sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        assert {known["slot"] for known in sessions} == {0, 1}
        third = ChatClient(running.port, "third").say(FILLER)
        assert third.accounting["marker"] == "ok"
        assert talks[0].say("Go on.").accounting["decoded"] < 64


def test_a_restarted_server_is_detected() -> None:
    binary, options = server_binary(patched=True), ("-np", "1", "--evoke-ram", "64")
    port = free_port()
    with proxy(port) as running:
        talk = ChatClient(running.port, "restart", {"evoke_budget": BUDGET})
        with llama_server(binary, *options, port=port):
            for number in range(5):
                talk.say(f"Turn {number}. {FILLER}")
        assert talk.post().status == 503
        with llama_server(binary, *options, port=port):
            said = talk.say("Go on.")
            assert said.accounting["marker"] == "ok"
            assert said.accounting["n_resident_peak"] <= BUDGET
            assert said.accounting["recovered"] == 0


def test_an_undetected_restart_costs_only_time(tmp_path: Path) -> None:
    binary = server_binary(patched=True)
    options = ("-np", "1", "--evoke-ram", "64", "--slot-save-path", str(tmp_path))
    with llama_server(binary, *options) as port, proxy(port) as running:
        talk = ChatClient(running.port, "restart", {"evoke_budget": BUDGET})
        for number in range(5):
            talk.say(f"Turn {number}. {FILLER}")
        assert ask(port, "POST", "/slots/0?action=erase").status == 200
        dropped = ask(port, "POST", "/slots/0?action=block-drop", b'{"all":true}')
        assert json.loads(dropped.body)["n_dropped"] > 0
        said = talk.say("Go on.")
        assert said.accounting["marker"] == "ok"
        assert said.accounting["n_resident_peak"] <= BUDGET
        assert running.metric("evoke_degraded_total", stage="plan") == 0


def test_requests_directly_after_a_stream_are_answered(patched_proxy: RunningProxy) -> None:
    # llama-server closes the connection of a streamed answer without saying so.
    talk = ChatClient(patched_proxy.port, "quick")
    talk.messages.append({"role": "user", "content": "hello"})
    for _ in range(40):
        answer = talk.post(stream=True, max_tokens=2)
        assert answer.status == 200
    assert patched_proxy.metric("evoke_degraded_total", stage="render") == 0


def test_calls_to_a_server_with_a_key_carry_the_clients_or_the_configured_key() -> None:
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
            # the configured key is for our own calls: it opens nothing for strangers
            assert ask(keyed.port, "POST", "/v1/chat/completions", body).status == 401
