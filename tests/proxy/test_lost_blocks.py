"""Copies that llama-server has lost cost the tokens of their blocks, not the rest of the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from harness import ask, llama_server, proxy, server_binary

JSON = {"Content-Type": "application/json"}
N_MESSAGES = 12
# Decoded without rows of the slot.
WHOLE = {"max_tokens": 24, "cache_prompt": False}


@pytest.fixture(scope="module")
def one_slot_port() -> Iterator[int]:
    """The port of a patched llama-server with one slot of 4096 cells."""
    binary = server_binary(patched=True)
    with llama_server(binary, "-np", "1", "-c", "4096", "--evoke-ram", "128") as port:
        yield port


def conversation(port: int, name: str) -> ChatClient:
    """A client with a history of about 1,300 tokens that was sent once."""
    client = ChatClient(port, name)
    for i in range(N_MESSAGES):
        client.messages.append({"role": "user", "content": f"{name} part {i}: {FILLER}"})
        client.messages.append({"role": "assistant", "content": f"Part {i} is noted."})
    client.say("Say something.")
    return client


def lose(port: int, client: ChatClient, share: slice) -> int:
    """Drop some of a session's copies, in order of position; returns their number of tokens."""
    sessions = json.loads(ask(client.port, "GET", "/evoke/sessions").body)["sessions"]
    (id,) = [each["id"] for each in sessions if each["name"] == client.session]
    state = json.loads(ask(port, "GET", "/slots/0/blocks?tenant=").body)
    copies: Sequence[Mapping[str, Any]] = sorted(
        (it for it in state["blocks"] if it["name"].startswith(f"{id}/")), key=lambda it: it["p0"]
    )
    lost = copies[share]
    body = json.dumps({"names": [it["name"] for it in lost]}).encode()
    assert ask(port, "POST", "/slots/0?action=block-drop", body, JSON).status == 200
    return sum(it["n_tokens"] for it in lost)


@pytest.mark.parametrize("share", [slice(0, 2), slice(4, 7), slice(2, None, 12)])
def test_lost_blocks_of_a_prompt_that_fits_are_decoded_and_nothing_else(
    one_slot_port: int, share: slice
) -> None:
    with proxy(one_slot_port) as running:
        client = conversation(running.port, f"one {share}")
        conversation(running.port, f"other {share}")
        n_lost = lose(one_slot_port, client, share)
        assert 0 < n_lost < 400
        before = running.metric("evoke_tokens_decoded_again_total")
        turn = client.say("And what was part 3?", max_tokens=24)
        counts = turn.accounting
        assert counts["omitted"] == 0 and counts["marker"] == "ok"
        assert counts["decoded"] < 100
        n_redecoded = running.metric("evoke_tokens_decoded_again_total") - before
        assert n_lost <= n_redecoded <= n_lost + 100
        assert running.metric("evoke_plan_failures_total", reason="books_differ") == 0
        # Every row was decoded with all rows before it, or is a copy of such a row.
        state = json.loads(ask(one_slot_port, "GET", "/slots/0/blocks?tenant=").body)
        assert state["n_reusable"] == state["n_tokens"]
        assert client.say("Thank you.").accounting["decoded"] < 100
        del client.messages[-3:]
        assert ask(one_slot_port, "POST", "/slots/0?action=block-drop", b'{"all": true}', JSON)
        answer = ask(one_slot_port, "POST", "/v1/chat/completions", client.body(**WHOLE), JSON)
        reply = json.loads(answer.body)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert reply["choices"][0]["message"]["content"] == turn.text


def test_over_the_budget_lost_blocks_are_omitted_or_decoded_within_it(one_slot_port: int) -> None:
    with proxy(one_slot_port, **{"policy.budget": 900}) as running:
        client = conversation(running.port, "tight")
        conversation(running.port, "tight other")
        n_lost = lose(one_slot_port, client, slice(1, None, 3))
        assert n_lost > 200
        counts = client.say("tight part 4: what was it?").accounting
        assert counts["marker"] == "ok" and counts["decoded"] < 150
        parts = ("decoded", "recovered", "resident_before", "omitted")
        assert sum(counts[part] for part in parts) == counts["n_prompt"]
        assert counts["omitted"] > 0 and counts["n_resident_peak"] <= 900
        assert running.metric("evoke_budget_breach_total") == 0
        assert running.metric("evoke_plan_failures_total", reason="books_differ") == 0
