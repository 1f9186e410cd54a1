"""Which sessions of an earlier proxy process a new one continues, and which it leaves alone."""

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
FEW = 40
BOTH = pytest.mark.parametrize("n_slots", [1, 2])


@dataclass(slots=True)
class Person(ChatClient):
    """A client with credentials, which make a tenant."""

    key: str = "one"
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}

    def turn(self, running: RunningProxy, text: str) -> dict[str, Any]:
        """The token accounting of a turn, and the id of its session."""
        self.port = running.port
        said = self.say(text, evoke_priority=1.0)
        running.wait_for_background()
        assert said.accounting["marker"] == "ok"
        return {**said.accounting, "text": said.text, "session": said.headers["x-evoke-session"]}


@pytest.fixture
def port(n_slots: int) -> Iterator[int]:
    options = ("-np", str(n_slots), "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


def told(running: RunningProxy, key: str = "one", fact: str = FACT) -> tuple[Person, str]:
    """A conversation of several turns, and the id of its session."""
    person = Person(0, key=key)
    for text in (fact, *TURNS[1:]):
        found = person.turn(running, text)
    return person, found["session"]


@BOTH
def test_conversations_find_their_slots_and_copies_again(port: int, n_slots: int) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        one, one_id = told(running)
        two, two_id = told(running, fact="My favorite number is 41937.")
    with proxy(port, policy__budget=BUDGET) as running:
        for person, id, number in ((two, two_id, "41937"), (one, one_id, NUMBER)):
            found = person.turn(running, QUESTION)
            assert found["session"] == id
            assert number in found["text"]
            assert found["decoded"] <= FEW, found
            assert found["omitted"] > 0
        # From here on both are known.
        assert one.turn(running, "Thank you.")["session"] == one_id
        assert running.metric("evoke_plan_failures_total", reason="stale_block") == 0


@pytest.mark.parametrize("n_slots", [1])
def test_another_conversation_with_the_same_beginning_gets_no_rows_that_lack_context(
    port: int, n_slots: int
) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        _, id = told(running)
    with proxy(port, policy__budget=BUDGET) as running:
        fresh = Person(0)
        fresh.messages += [
            {"role": "user", "content": FACT},
            {"role": "assistant", "content": "Something else."},
        ]
        found = fresh.turn(running, f"Another subject. {FILLER}")
        assert found["session"] != id
        assert found["recovered"] == 0


@pytest.mark.parametrize("n_slots", [1])
def test_a_tenant_does_not_continue_the_session_of_another(port: int, n_slots: int) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        one, id = told(running)
    with proxy(port, policy__budget=BUDGET) as running:
        other = Person(0, key="two", messages=list(one.messages))
        found = other.turn(running, QUESTION)
        assert found["session"] != id
        # Rows up to the first hole are those of any decode of these tokens.
        assert found["recovered"] == 0
        again = one.turn(running, QUESTION)
        assert again["session"] == id
        assert again["decoded"] <= FEW + 32, again


@pytest.mark.parametrize("n_slots", [1])
def test_a_session_whose_history_was_replaced_starts_anew(port: int, n_slots: int) -> None:
    """A compacted history shares little: it is another session, and its answer is complete."""
    with proxy(port, policy__budget=BUDGET) as running:
        one, id = told(running)
    with proxy(port, policy__budget=BUDGET) as running:
        one.messages = [one.messages[0], {"role": "user", "content": f"Summary: {FACT}"}]
        one.messages.append({"role": "assistant", "content": "I see."})
        found = one.turn(running, QUESTION)
        assert found["session"] != id
        assert NUMBER in found["text"]


@pytest.mark.parametrize("shape", ["tiny-jamba", "tiny-gemma"])
def test_rows_of_hybrids_and_sliding_windows_stay_in_their_slot(shape: str) -> None:
    """Their copies cannot fill a slot, but the slot still has the session's rows."""
    model = ensure(SHAPES[shape])
    options = ("-np", "1", "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options, model=model) as port:
        with proxy(port, policy__budget=BUDGET) as running:
            one, id = told(running)
        with proxy(port, policy__budget=BUDGET) as running:
            found = one.turn(running, QUESTION)
    assert found["session"] == id
    assert found["decoded"] <= FEW
    assert found["omitted"] > 0 and found["recovered"] > 0
