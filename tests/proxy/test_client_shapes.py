"""Clients that do not send a growing list of messages: transcripts, a clock, a sliding window."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from client_shapes import SHAPES, converse, script
from harness import ask, llama_server, proxy, server_binary

BUDGET = 512


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a patched llama-server, which serves unmarked requests as a stock one does."""
    options = ("-np", "1", "-c", "8192", "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


@pytest.mark.parametrize("shape", SHAPES)
def test_a_budget_decodes_little_more_than_an_unlimited_cache(port: int, shape: str) -> None:
    conversation = script(0, fillers=10, facts=4)
    direct = converse(port, shape, conversation, {})
    with proxy(port, policy__budget=BUDGET) as running:
        ours = converse(running.port, shape, conversation, {})
        assert running.metric("evoke_budget_breach_total") == 0
        assert running.metric("evoke_plan_failures_total", reason="books_differ") == 0
    assert direct["peak"] > 3 * BUDGET >= 3 * ours["peak"]
    assert ours["decoded"] <= 1.1 * direct["decoded"]
    assert ours["right"] >= direct["right"] >= 3


def test_the_turns_of_a_transcript_are_the_blocks_of_its_conversation(port: int) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        converse(running.port, "transcript", script(1, fillers=4, facts=2), {})
        conversations = [each for server in running.servers for each in server.conversations]
        conversation = max(conversations, key=lambda each: each.n_turns)
        names = [
            block.display_name.partition("#")[0] for block in conversation.session.layout.blocks
        ]
        assert list(dict.fromkeys(names))[:4] == ["system", "user:1", "assistant:2", "user:3"]
        # The first request, with one turn of the user, is no transcript yet.
        assert conversation.n_turns == 7


def test_a_conversation_goes_on_after_a_transcript_that_the_user_pasted(port: int) -> None:
    pasted = "".join(f"User: And river {i}?\nAssistant: It is long, {i}.\n" for i in range(6))
    note = "<system-reminder>\nNote: a.py was modified. {}\n</system-reminder>"
    asked = [f"{pasted}User: Which one is the longest?"]
    asked += [f"And the second?\n{note.format('It is changed. ' * 9)}", "Thanks."]
    said, messages = list[dict[str, str]](), list[list[int]]()
    with proxy(port, policy__budget=BUDGET) as running:
        for text in asked:
            said.append({"role": "user", "content": text})
            body = json.dumps({"messages": said, "max_tokens": 4}).encode()
            answer = json.loads(ask(running.port, "POST", "/v1/chat/completions", body).body)
            said.append(
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
            )
            (conversation,) = [each for one in running.servers for each in one.conversations]
            messages.append(conversation.session.layout.blocks.messages.tolist())
        assert running.metric("evoke_degraded_total") == 0
    assert messages[0][-1] > 4, "the turns of the transcript are messages"
    assert all(found == sorted(found) for found in messages) and messages[2][-1] == 4


def test_a_clock_is_recognized_and_its_cost_is_reported(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        ours = converse(running.port, "clock", script(2, fillers=6, facts=2), {}, "clock")
        n_changes = 9  # every request but the first
        labels = {"cause": "date_line"}
        assert running.metric("evoke_prefix_divergence_total", **labels) == n_changes
        tokens = running.metric("evoke_prefix_divergence_tokens_total", **labels)
        assert 0.5 * ours["decoded"] < tokens < ours["decoded"]
        (session,) = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        assert session["turns"] == n_changes + 1
        assert session["drift"]["cause"] == "date_line" and session["drift"]["message"] == 0
        assert (session["drift"]["count"], session["drift"]["tokens"]) == (n_changes, tokens)
    remedies = [text for text in caplog.messages if "normalise.dates_h" in text]
    assert len(remedies) == 1


def test_the_clock_of_the_first_request_stays_where_dates_are_normalised(port: int) -> None:
    conversation = script(2, fillers=6, facts=2)
    with proxy(port, policy__budget=BUDGET, normalise__dates_h=24) as running:
        clock = converse(running.port, "clock", conversation, {}, "clock")
        chat = converse(running.port, "chat", conversation, {}, "chat")
    assert clock["decoded"] <= 1.1 * chat["decoded"]
