"""A new proxy process continues sessions of an earlier one if they are the same conversation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, llama_server, proxy, server_binary

from bench.random_models import SHAPES, ensure

BUDGET = 448
FACT, QUESTION, NUMBER = "My favorite number is 68285.", "What is my favorite number?", "68285"
TURNS = [FACT, *(f"Turn {number}. {FILLER}" for number in range(6))]
# More tokens than a question with its template, fewer than a turn.
MAX_NEW_TOKENS = 40
ONE_OR_TWO_SLOTS = pytest.mark.parametrize("n_slots", [1, 2])


@dataclass(slots=True)
class TenantClient(ChatClient):
    """A client of a tenant, which is identified by its key."""

    key: str = "one"
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}

    def turn(self, running: RunningProxy, text: str) -> dict[str, Any]:
        """Send a turn; returns its token accounting, its text and the id of its session."""
        self.port = running.port
        turn = self.say(text, evoke_priority=1.0)
        running.wait_for_background()
        assert turn.accounting["marker"] == "ok"
        return {**turn.accounting, "text": turn.text, "session": turn.headers["x-evoke-session"]}


@pytest.fixture
def port(n_slots: int) -> Iterator[int]:
    options = ("-np", str(n_slots), "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


def run_conversation(
    running: RunningProxy, key: str = "one", fact: str = FACT
) -> tuple[TenantClient, str]:
    """Run a conversation of several turns; returns its client and the id of its session."""
    client = TenantClient(0, key=key)
    for text in (fact, *TURNS[1:]):
        accounting = client.turn(running, text)
    return client, accounting["session"]


@ONE_OR_TWO_SLOTS
def test_conversations_continue_with_their_slots_and_copies(port: int, n_slots: int) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        first_client, first_id = run_conversation(running)
        second_client, second_id = run_conversation(running, fact="My favorite number is 41937.")
    with proxy(port, policy__budget=BUDGET) as running:
        for client, id, number in (
            (second_client, second_id, "41937"),
            (first_client, first_id, NUMBER),
        ):
            accounting = client.turn(running, QUESTION)
            assert accounting["session"] == id
            assert number in accounting["text"]
            assert accounting["decoded"] <= MAX_NEW_TOKENS, accounting
            assert accounting["omitted"] > 0
        # The second proxy has now resumed both.
        assert first_client.turn(running, "Thank you.")["session"] == first_id
        assert running.metric("evoke_plan_failures_total", reason="stale_block") == 0


@pytest.mark.parametrize("n_slots", [1])
def test_another_conversation_with_the_same_beginning_recovers_no_rows_decoded_behind_holes(
    port: int, n_slots: int
) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        _, id = run_conversation(running)
    with proxy(port, policy__budget=BUDGET) as running:
        client = TenantClient(0)
        client.messages += [
            {"role": "user", "content": FACT},
            {"role": "assistant", "content": "Something else."},
        ]
        accounting = client.turn(running, f"Another subject. {FILLER}")
        assert accounting["session"] != id
        assert accounting["recovered"] == 0


@pytest.mark.parametrize("n_slots", [1])
def test_a_tenant_does_not_continue_the_session_of_another(port: int, n_slots: int) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        first_client, id = run_conversation(running)
    with proxy(port, policy__budget=BUDGET) as running:
        other = TenantClient(0, key="two", messages=list(first_client.messages))
        accounting = other.turn(running, QUESTION)
        assert accounting["session"] != id
        # Only rows before the first hole may be reused.
        assert accounting["recovered"] == 0
        resumed = first_client.turn(running, QUESTION)
        assert resumed["session"] == id
        assert resumed["decoded"] <= MAX_NEW_TOKENS + 32, resumed


@pytest.mark.parametrize("n_slots", [1])
def test_a_conversation_with_a_compacted_history_is_a_new_session(port: int, n_slots: int) -> None:
    """It shares little with the earlier history, and its fact is recalled from the summary."""
    with proxy(port, policy__budget=BUDGET) as running:
        first_client, id = run_conversation(running)
    with proxy(port, policy__budget=BUDGET) as running:
        first_client.messages = [
            first_client.messages[0],
            {"role": "user", "content": f"Summary: {FACT}"},
        ]
        first_client.messages.append({"role": "assistant", "content": "I see."})
        accounting = first_client.turn(running, QUESTION)
        assert accounting["session"] != id
        assert NUMBER in accounting["text"]


@pytest.mark.parametrize("shape", ["tiny-jamba", "tiny-gemma"])
def test_sessions_of_hybrid_and_sliding_window_models_continue_in_their_slot(shape: str) -> None:
    """Their copies cannot restore a slot, but the slot still has the session's rows."""
    model = ensure(SHAPES[shape])
    options = ("-np", "1", "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options, model=model) as port:
        with proxy(port, policy__budget=BUDGET) as running:
            first_client, id = run_conversation(running)
        with proxy(port, policy__budget=BUDGET) as running:
            accounting = first_client.turn(running, QUESTION)
    assert accounting["session"] == id
    assert accounting["decoded"] <= MAX_NEW_TOKENS
    assert accounting["omitted"] > 0 and accounting["recovered"] > 0
