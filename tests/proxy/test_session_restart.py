"""A session with a budget continues after a restart of llama-server, the proxy, or both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from admin_client import admin_call, fact_block
from conversation import ChatClient
from harness import RunningProxy, ask
from restartable import (
    BUDGET,
    KINDS,
    TURNS,
    deployment,
    turn,
    wait_for_background,
)

from bench.random_models import chat_template

HYBRID = "tiny-jamba"
# After a restart rows may be in other cells, so that sums are rounded differently, depending on the
# CPU. Where two tokens are almost equally likely, a grammar forces the answer, so that both
# conversations stay the same. The largest difference of a log probability observed so far is 0.07,
# of a token of 4 %.
ROUNDING = 0.1
# The policy chooses among short ends of messages by what is resident, which depends on when the
# background tasks of the last turn ended.
MAX_OMITTED_DIFFERENCE = 8
FORCED = {"grammar": 'root ::= "N"'}
# The log probabilities of the 20 most likely tokens, by position in the answer and token id.
TokenLogprobs = dict[tuple[int, int], float]


def assert_equally_likely(actual: TokenLogprobs, expected: TokenLogprobs, tolerance: float) -> None:
    """Assert that both list the same tokens with the same log probabilities, up to the tolerance.

    A token that only one of them lists must be as unlikely as the last token of the other list.
    """
    assert {position for position, _ in actual} == {position for position, _ in expected}
    for first, second in ((actual, expected), (expected, actual)):
        for (position, token), logprob in first.items():
            if (position, token) in second:
                assert second[position, token] == pytest.approx(logprob, abs=tolerance)
            else:
                last = min(value for (other, _), value in second.items() if other == position)
                assert logprob <= last + tolerance


def resident(port: int) -> object:
    """Return the ranges of rows that are resident in the slot."""
    return json.loads(ask(port, "GET", "/slots/0/blocks").body)["resident"]


def test_a_session_continues_after_a_restart_of_server_proxy_or_both(tmp_path: Path) -> None:
    events = ["server", "proxy", "both"]
    texts = [*TURNS, "What is my favorite number?", "Go on.", "And once more?"]
    with deployment(tmp_path / "restarted") as restarted, deployment(tmp_path / "never") as control:
        clients = [ChatClient(0, "chat") for _ in range(2)]
        for number, text in enumerate(texts):
            event = events[number - len(TURNS)] if number >= len(TURNS) else ""
            if event:
                restarted.start(event)
            wait_for_background(restarted, control)
            assert restarted.running is not None and control.running is not None
            fields = FORCED if event and "number" not in text else {}
            restarted_turn = turn(clients[0], restarted.running.port, text, **fields)
            control_turn = turn(clients[1], control.running.port, text, **fields)
            if event and not fields:
                assert control_turn["margin"] > 0.2, "a rounding difference might change the answer"
            # The same rows are resident, although in other cells.
            assert resident(restarted.port) == resident(control.port)
            assert restarted_turn["text"] == control_turn["text"]
            assert_equally_likely(
                restarted_turn["likely"], control_turn["likely"], ROUNDING if event else 0
            )
            assert restarted_turn["n_resident_peak"] <= BUDGET and restarted_turn["marker"] == "ok"
            assert sum(restarted_turn[kind] for kind in KINDS) == restarted_turn["n_prompt"]
            reused = [
                accounting["recovered"] + accounting["resident_before"]
                for accounting in (restarted_turn, control_turn)
            ]
            assert restarted_turn["decoded"] == control_turn["decoded"] and reused[0] == reused[1]
            if event in ("server", "both"):
                assert restarted_turn["decoded"] < 20 and restarted_turn["resident_before"] == 0
            for name in ("evoke_degraded_total", "evoke_budget_breach_total"):
                assert not restarted.running.metric(name)
        assert "68285" in clients[0].messages[2 * len(TURNS) + 2]["content"]


def test_sessions_with_the_same_text_continue_after_the_server_is_killed(tmp_path: Path) -> None:
    """One file has the rows of a text that several sessions have saved, under all their names."""
    with deployment(tmp_path) as restarted:
        clients = [ChatClient(0, name) for name in ("first", "second")]
        for client in clients:
            for text in TURNS:
                assert restarted.running is not None
                turn(client, restarted.running.port, text)
            wait_for_background(restarted)
        restarted.start("server")
        assert restarted.running is not None
        for client in reversed(clients):
            continued = turn(client, restarted.running.port, "What is my favorite number?")
            assert continued["decoded"] < 40 and continued["recovered"] > 0, client.session


def apply_operator_changes(running: RunningProxy, budget: int) -> None:
    """Pin the only session and its block with the fact, and set the session's budget."""
    (session,) = admin_call(running, "GET", "sessions")["sessions"]
    path = f"sessions/{session['id']}"
    admin_call(running, "PATCH", path, {"pinned": True, "budget": budget})
    block = fact_block(admin_call(running, "GET", path))
    span = {"p0": block["p0"], "p1": block["p1"]}
    admin_call(running, "POST", f"{path}/blocks", {"action": "pin"} | span)


def test_changes_by_an_operator_survive_a_restart_of_the_proxy(tmp_path: Path) -> None:
    session_budget = BUDGET - 64
    with deployment(tmp_path / "restarted") as restarted, deployment(tmp_path / "never") as control:
        clients = [ChatClient(0, "chat") for _ in range(2)]
        for text in TURNS:
            for each, client in zip((restarted, control), clients, strict=True):
                wait_for_background(each)
                assert each.running is not None
                turn(client, each.running.port, text)
        for each in (restarted, control):
            wait_for_background(each)
            assert each.running is not None
            apply_operator_changes(each.running, session_budget)
        fact_blocks = []
        for event in ("both", "proxy"):
            restarted.start(event)
            wait_for_background(restarted, control)
            assert restarted.running is not None and control.running is not None
            (session,) = admin_call(restarted.running, "GET", "sessions")["sessions"]
            assert (
                session["pinned"] and session["own_budget"] and session["limit"] == session_budget
            )
            restarted_turn = turn(clients[0], restarted.running.port, "Go on.", **FORCED)
            control_turn = turn(clients[1], control.running.port, "Go on.", **FORCED)
            assert resident(restarted.port) == resident(control.port)
            assert (
                restarted_turn["text"] == control_turn["text"]
                and restarted_turn["decoded"] == control_turn["decoded"]
            )
            assert (
                restarted_turn["n_resident_peak"] <= session_budget
                and restarted_turn["marker"] == "ok"
            )
            wait_for_background(restarted)
            path = f"sessions/{session['id']}"
            fact_blocks.append(fact_block(admin_call(restarted.running, "GET", path)))
        assert all(block["pinned"] and block["state"] == "resident" for block in fact_blocks)


@pytest.mark.parametrize("shape", [HYBRID, "tiny-gemma"])
def test_a_slot_is_restored_from_its_file_when_copies_do_not_suffice(
    shape: str, tmp_path: Path
) -> None:
    """Saved blocks lack recurrent states and sliding windows, which only the slot's file has."""
    with (
        deployment(tmp_path / "restarted", shape) as restarted,
        deployment(tmp_path / "n", shape) as control,
    ):
        clients = [ChatClient(0, "chat") for _ in range(2)]
        for number, text in enumerate([*TURNS[:6], "Go on.", "And once more?", "And then?"]):
            if number in (6, 7):
                restarted.start("server" if number == 6 else "both")
            if number == 8:  # another conversation takes its slot
                wait_for_background(restarted)
                assert restarted.running is not None
                turn(ChatClient(0, "other"), restarted.running.port, TURNS[1])
            wait_for_background(restarted, control)
            assert restarted.running is not None and control.running is not None
            fields = FORCED if number >= 6 else {}
            restarted_turn = turn(clients[0], restarted.running.port, text, **fields)
            control_turn = turn(clients[1], control.running.port, text, **fields)
            assert restarted_turn["text"] == control_turn["text"]
            assert_equally_likely(restarted_turn["likely"], control_turn["likely"], 0.05)
            for accounting in (restarted_turn, control_turn):
                assert accounting["n_resident_peak"] <= BUDGET and accounting["marker"] == "ok"
                assert sum(accounting[kind] for kind in KINDS) == accounting["n_prompt"]
            assert restarted_turn["decoded"] == control_turn["decoded"]
            assert (
                abs(restarted_turn["omitted"] - control_turn["omitted"]) <= MAX_OMITTED_DIFFERENCE
            )
        assert restarted_turn["omitted"] > 300 and restarted_turn["decoded"] < 20
        assert restarted.running.metric("evoke_snapshot_restores_total", result="useful") == 2
        for name in ("evoke_degraded_total", "evoke_budget_breach_total"):
            assert not restarted.running.metric(name)


@pytest.mark.parametrize("shape", ["tiny-qwen35", "tiny-gpt-oss"])
@pytest.mark.parametrize("event", ["server", "proxy", "both"])
def test_after_a_restart_only_new_text_is_decoded_with_a_template_that_thinks(
    shape: str, event: str, tmp_path: Path
) -> None:
    """The slot is saved after its next turn was decoded ahead, where that leaves the prompt."""
    template = ("--chat-template-file", str(chat_template("Qwen3.5-4B")))
    fields = {"max_tokens": 24, "chat_template_kwargs": {"enable_thinking": False}}
    with deployment(tmp_path, shape, template) as restarted:
        client = ChatClient(0, "chat", fields)
        for text in TURNS:
            assert restarted.running is not None
            turn(client, restarted.running.port, text)
        restarted.start(event)
        after = turn(client, restarted.running.port, "And now?")
        assert after["n_prompt"] > 2 * BUDGET and after["decoded"] < 64
        assert sum(after[kind] for kind in KINDS) == after["n_prompt"]
