"""Budgets beyond the cells of a slot: every turn fits the cells, however the budget was set."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from admin_client import admin_call
from conversation import ChatClient, TurnResult
from harness import RunningProxy, ask, llama_server, proxy, server_binary

CELLS, BEYOND, ANSWER = 1024, 5000, 24
Set = Callable[[RunningProxy, str], None]


@pytest.fixture(scope="module")
def cells_port() -> Iterator[int]:
    """A patched server with two slots of 1,024 cells, and contexts of eight times that."""
    options = ("-np", "2", "-c", str(2 * CELLS), "--ctx-logical", str(8 * CELLS))
    with llama_server(server_binary(patched=True), *options, "--evoke-ram", "64") as port:
        yield port


def _texts() -> list[str]:
    """The messages of a chat of about two slots."""
    rng = random.Random(3)

    def sentence() -> str:
        who, what = rng.choice(("Nina", "Omar", "Lena")), rng.choice(("boat", "forest", "bridge"))
        return (
            f"{who} paints the {rng.choice(('old', 'green', 'quiet'))} village beyond the {what}."
        )

    filler = [" ".join(sentence() for _ in range(10)) for _ in range(16)]
    return ["My code name is pink hippo.", *filler, "What is my code name?"]


def _again(client: ChatClient, **fields: Any) -> list[TurnResult]:
    """Send a chat again from its first turn on, as a client does that goes back."""
    messages, turns = client.messages, []
    for at in range(1, len(messages), 2):
        client.messages = messages[:at]
        turns.append(client.say(messages[at]["content"], **{"max_tokens": ANSWER, **fields}))
    return turns


def _chat(running: RunningProxy, name: str, fields: dict[str, Any]) -> ChatClient:
    client = ChatClient(running.port, name, fields)
    for text in _texts():
        client.say(text, max_tokens=ANSWER)
    running.wait_for_background()
    return client


def _set_for_all(running: RunningProxy, _: str) -> None:
    status = admin_call(running, "PUT", "budget", {"budget": BEYOND})
    assert (status["budget"], status["degraded"]) == (CELLS, True)
    facts = admin_call(running, "GET", "overview")
    assert facts["budget"] == BEYOND and f"{CELLS} cells" in facts["problems"][0]["problem"]


def _set_for_session(running: RunningProxy, name: str) -> None:
    sessions = admin_call(running, "GET", "sessions")["sessions"]
    (id,) = [session["id"] for session in sessions if session["name"] == name]
    session = admin_call(running, "PATCH", f"sessions/{id}", {"budget": BEYOND})
    assert (session["limit"], session["own_budget"]) == (CELLS, True)


def _set_before(*_: object) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "start", "fields", "set_budget"),
    [
        ("all", "auto", {}, _set_for_all),
        ("session", "auto", {}, _set_for_session),
        ("start", BEYOND, {}, _set_before),
        ("request", "off", {"evoke_budget": BEYOND}, _set_before),
    ],
)
def test_a_chat_that_is_sent_again_fits_the_cells(
    cells_port: int, name: str, start: int | str, fields: dict[str, Any], set_budget: Set
) -> None:
    with proxy(cells_port, policy__budget=start) as running:
        client = _chat(running, name, fields)
        set_budget(running, name)
        turns = _again(client)
        assert turns[-1].accounting["n_prompt"] > 1.5 * CELLS
        assert sum(turn.accounting["recovered"] for turn in turns) > CELLS
        for turn in turns:
            assert turn.accounting["budget"] == CELLS
            assert turn.accounting["n_resident_peak"] <= CELLS
        assert "pink hippo" in turns[-1].text
        assert running.metric("evoke_budget_breach_total") == 0


@pytest.mark.parametrize("budget", [CELLS - 24, CELLS, BEYOND])
def test_an_answer_of_half_the_cells_fits(cells_port: int, budget: int) -> None:
    with proxy(cells_port, policy__budget=budget) as running:
        client = _chat(running, f"long {budget}", {})
        client.messages = client.messages[:27]  # the client goes back
        turn = client.say("Go on.", max_tokens=CELLS // 2, ignore_eos=True)
        kept = turn.accounting["recovered"] + turn.accounting["resident_before"]
        assert kept > CELLS // 2 and len(turn.accounting["auto_evicted"]) > 0
        assert turn.accounting["n_resident_peak"] <= min(budget, CELLS)
        assert running.metric("evoke_budget_breach_total") == 0


def test_a_budget_beyond_a_context_that_fits_the_cells_evicts_nothing() -> None:
    options = ("-np", "1", "-c", str(CELLS), "--evoke-ram", "16")
    with llama_server(server_binary(patched=True), *options) as port:
        with proxy(port, policy__budget=BEYOND) as running:
            client = ChatClient(running.port, "whole")
            turns = [client.say(text, max_tokens=ANSWER) for text in _texts()[:6]]
            turns += _again(client)
            assert all(turn.accounting["omitted"] == 0 for turn in turns)
            status = json.loads(ask(running.port, "GET", "/evoke/status").body)
            assert (status["budget"], status["degraded"]) == (BEYOND, True)
