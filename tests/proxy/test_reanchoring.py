"""An edit costs the edit: `policy.reanchor: approximate` moves the rows behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, llama_server, proxy, server_binary, until

from bench.random_models import SHAPES, ensure

BUDGET = 1024
FIELDS = {"evoke_budget": BUDGET}
MOVED = {"kind": "moved"}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a patched llama-server with two slots."""
    options = ("-np", "2", "-no-kvu", "-c", "16384", "--evoke-ram", "128")
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


def conversation(running: RunningProxy, session: str) -> ChatClient:
    """A conversation of 14 messages and 2,100 tokens, with one fact in each."""
    client = ChatClient(running.port, session, fields=FIELDS)
    for number, name in enumerate(
        ("badge", "locker", "ticket", "room", "order", "account", "seat")
    ):
        client.say(f"My {name} number is {11111 * (number + 1)}. {FILLER}{FILLER}")
    running.wait_until_idle()
    return client


def is_exact(running: RunningProxy) -> bool:
    """Whether every turn was within its budget and as planned."""
    breaches = running.metric("evoke_budget_breach_total")
    differs = running.metric("evoke_plan_failures_total", reason="books_differ")
    refused = running.metric("evoke_plan_failures_total", reason="stale_block")
    return breaches == differs == refused == 0


@pytest.mark.parametrize("edit", ["changed", "inserted", "removed"])
def test_an_edit_decodes_the_edit(port: int, edit: str) -> None:
    with proxy(port, policy__reanchor="approximate") as running:
        client = conversation(running, f"edit {edit}")
        if edit == "removed":
            del client.messages[5:7]
        else:
            new = {"role": "user", "content": f"My code name is blue tiger. {FILLER}"}
            told = [new] if edit == "changed" else [new, {"role": "assistant", "content": "I see."}]
            client.messages[5 : 6 if edit == "changed" else 5] = told
        asked = "What is my room number?" if edit == "removed" else "What is my code name?"
        turn = client.say(asked)
        assert ("44444" if edit == "removed" else "blue tiger") in turn.text
        assert turn.accounting["decoded"] < 120
        assert turn.accounting["n_resident_peak"] <= BUDGET
        tokens, _, decoded = turn.headers["x-evoke-reanchored"].partition(";")
        assert int(tokens.removeprefix("tokens=")) > 600
        assert int(decoded.removeprefix("decoded=")) < 500
        assert running.metric("evoke_reanchored_tokens_total", **MOVED) > 600
        assert "x-evoke-reanchored" not in client.say("What is my seat number?").headers
        assert "77777" in client.messages[-1]["content"]
        assert is_exact(running)


def test_by_default_what_is_behind_an_edit_is_decoded_again(port: int) -> None:
    with proxy(port) as running:
        client = conversation(running, "exact")
        client.messages[5]["content"] = f"My code name is blue tiger. {FILLER}"
        turn = client.say("What is my code name?")
        assert turn.accounting["decoded"] > 1000 and "x-evoke-reanchored" not in turn.headers
        assert running.metric("evoke_reanchored_tokens_total", **MOVED) == 0


def test_moved_rows_are_shared_with_no_other_session(port: int) -> None:
    """Another conversation with the edited text decodes what was moved."""
    with proxy(port, policy__reanchor="approximate") as running:
        client = conversation(running, "owner")
        client.messages[5]["content"] = f"My code name is green otter. {FILLER}"
        assert "x-evoke-reanchored" in client.say("What is my code name?").headers
        running.wait_until_idle()
        twin = ChatClient(running.port, "twin", fields=FIELDS, messages=client.messages[:-2])
        accounting = twin.say("What is my code name?").accounting
        assert accounting["decoded"] > 1000


def test_a_conversation_goes_on_after_its_slot_was_given_away(port: int) -> None:
    """Moved rows are saved, adopted and found like others, by their own session."""
    with proxy(port, policy__reanchor="approximate") as running:
        client = conversation(running, "returns")
        client.messages[5]["content"] = f"My code name is red heron. {FILLER}"
        client.say("What is my code name?")
        for other in ("one", "two", "three"):
            ChatClient(running.port, other, fields=FIELDS).say(f"Say {other}. {FILLER}")
        turn = client.say("What is my order number?")
        assert "55555" in turn.text and turn.accounting["decoded"] < 200
        assert is_exact(running)


def test_a_model_whose_keys_cannot_be_rotated_decodes_again() -> None:
    options = ("-np", "1", "-c", "8192", "--evoke-ram", "64")
    binary, model = server_binary(patched=True), ensure(SHAPES["tiny-lfm2"])
    with (
        llama_server(binary, *options, model=model) as port,
        proxy(port, policy__reanchor="approximate") as running,
    ):
        client = conversation(running, "hybrid")
        client.messages[5]["content"] = f"My code name is blue tiger. {FILLER}"
        assert "x-evoke-reanchored" not in client.say("What is my code name?").headers
        assert running.metric("evoke_degraded_total", stage="reanchor") == 0


def test_moved_turns_are_audited() -> None:
    """With any share above 0."""
    binary, options = server_binary(patched=True), ("-np", "2", "-no-kvu", "-c", "16384")
    with (
        llama_server(binary, *options, "--evoke-ram", "128") as port,
        proxy(port, policy__reanchor="approximate", audit__share=1e-9) as running,
    ):
        client = conversation(running, "audited")
        client.messages[5]["content"] = f"My code name is blue tiger. {FILLER}"
        client.say("What is my code name?")
        until(lambda: running.metric("evoke_audits_total", result="done") == 1, "an audit")
        assert running.metric("evoke_audits_total", result="nothing_omitted") == 0
