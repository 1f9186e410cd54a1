"""Rows decoded behind a hole are recovered only in the conversation that decoded them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversation import FILLER, ChatClient
from harness import ask, llama_server, server_binary
from recovery_texts import BUDGET, FACT, QUESTION
from tenant_keys import KEYS, proxy_with_keys

NO_BUDGET = 8192
# Rows of another batch size differ by rounding. Rows decoded behind a hole differ much more.
ROUNDING = 0.05


@dataclass(slots=True)
class TenantClient(ChatClient):
    """A client of a tenant."""

    tenant: str = "alice"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request, with the tenant's key."""
        return {**ChatClient.headers.fget(self), "Authorization": f"Bearer {KEYS[self.tenant]}"}  # type: ignore[attr-defined]


def copies(port: int, tenant: str) -> list[dict[str, Any]]:
    """Return the saved blocks that llama-server has of a tenant."""
    path = f"/slots/0/blocks?tenant={tenant}"
    blocks: list[dict[str, Any]] = json.loads(ask(port, "GET", path).body)["blocks"]
    return blocks


def probabilities(client: ChatClient, text: str) -> dict[str, float]:
    """Return the log probabilities of the likeliest first tokens; does not change the history."""
    client.messages.append({"role": "user", "content": text})
    answer = client.post(logprobs=True, top_logprobs=20, max_tokens=1)
    client.messages.pop()
    assert answer.status == 200, answer.body
    (step,) = json.loads(answer.body)["choices"][0]["logprobs"]["content"]
    return {token["token"]: token["logprob"] for token in step["top_logprobs"]}


def test_a_conversation_recovers_its_own_copies_and_another_decodes_them(
    patched_port: int, tmp_path: Path
) -> None:
    """Two tenants have the same conversation in one slot.

    The second finds rows of the first there, some decoded behind a hole that was filled later.
    """
    binary = server_binary(patched=True)
    with (
        llama_server(binary, "-np", "1", "--evoke-ram", "64") as port,
        proxy_with_keys(port, tmp_path) as running,
    ):
        first = TenantClient(running.port, "same", {"evoke_budget": BUDGET})
        first.say(FACT)
        for number in range(6):
            first.say(f"Turn {number}. {FILLER}")
        assert first.say(QUESTION).accounting["recovered"] > 0
        saved = copies(port, "alice")
        assert len({copy["session"] for copy in saved}) == 1 and saved[0]["session"]
        assert {copy["whole"] for copy in saved} == {True, False}
        filled = first.say(QUESTION, evoke_budget=NO_BUDGET)
        assert filled.accounting["omitted"] == 0
        (slot,) = json.loads(ask(port, "GET", "/slots").body)
        state = json.loads(ask(port, "GET", "/slots/0/blocks").body)
        assert slot["id"] == 0 and len(state["resident"]) == 1
        assert state["n_reusable"] < state["n_tokens"] // 2

        second = TenantClient(running.port, "same", {}, list(first.messages), "bob")
        control = ChatClient(patched_port, None, {}, list(first.messages))
        found, expected = probabilities(second, "Go on."), probabilities(control, "Go on.")
        shared = found.keys() & expected.keys()
        assert len(shared) >= 15
        assert max(abs(found[token] - expected[token]) for token in shared) < ROUNDING
        state = json.loads(ask(port, "GET", "/slots/0/blocks").body)
        assert state["n_reusable"] == state["n_tokens"]

        # The first conversation continues in that slot.
        turn = first.say(QUESTION)
        assert turn.accounting["decoded"] < 60
