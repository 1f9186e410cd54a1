"""Rows decoded while text was missing stay with the conversation that decoded them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversation import FILLER, ChatClient
from harness import ask, llama_server, server_binary
from test_recovery import ASKS, BUDGET, FACT
from test_tenants import KEYS, keyed

NO_BUDGET = 8192
# Rows of batches of another shape differ by rounding; rows decoded behind a hole by a lot more.
ROUNDING = 0.05


@dataclass(slots=True)
class Keyed(ChatClient):
    """A conversation of a tenant."""

    tenant: str = "alice"

    @property
    def headers(self) -> dict[str, str]:
        """With the tenant's key."""
        return {**ChatClient.headers.fget(self), "Authorization": f"Bearer {KEYS[self.tenant]}"}  # type: ignore[attr-defined]


def copies(port: int, tenant: str) -> list[dict[str, Any]]:
    """Every copy that llama-server has of a tenant."""
    path = f"/slots/0/blocks?tenant={tenant}"
    found: list[dict[str, Any]] = json.loads(ask(port, "GET", path).body)["blocks"]
    return found


def probabilities(talk: ChatClient, text: str) -> dict[str, float]:
    """The likeliest first tokens of an answer; the history stays as it is."""
    talk.messages.append({"role": "user", "content": text})
    answer = talk.post(logprobs=True, top_logprobs=20, max_tokens=1)
    talk.messages.pop()
    assert answer.status == 200, answer.body
    (step,) = json.loads(answer.body)["choices"][0]["logprobs"]["content"]
    return {token["token"]: token["logprob"] for token in step["top_logprobs"]}


def test_a_conversation_recovers_its_own_copies_and_another_one_decodes(
    patched_port: int, tmp_path: Path
) -> None:
    """Two tenants say the same in one slot: the second finds rows of the first in it, some of which
    were decoded behind a hole that has been filled since."""
    binary = server_binary(patched=True)
    with (
        llama_server(binary, "-np", "1", "--evoke-ram", "64") as port,
        keyed(port, tmp_path) as running,
    ):
        first = Keyed(running.port, "same", {"evoke_budget": BUDGET})
        first.say(FACT)
        for number in range(6):
            first.say(f"Turn {number}. {FILLER}")
        assert first.say(ASKS).accounting["recovered"] > 0
        made = copies(port, "alice")
        assert len({copy["session"] for copy in made}) == 1 and made[0]["session"]
        assert {copy["whole"] for copy in made} == {True, False}
        filled = first.say(ASKS, evoke_budget=NO_BUDGET)
        assert filled.accounting["omitted"] == 0
        (slot,) = json.loads(ask(port, "GET", "/slots").body)
        state = json.loads(ask(port, "GET", "/slots/0/blocks").body)
        assert slot["id"] == 0 and len(state["resident"]) == 1
        assert state["n_reusable"] < state["n_tokens"] // 2

        second = Keyed(running.port, "same", {}, list(first.messages), "bob")
        alone = ChatClient(patched_port, None, {}, list(first.messages))
        ours, wanted = probabilities(second, "Go on."), probabilities(alone, "Go on.")
        shared = ours.keys() & wanted.keys()
        assert len(shared) >= 15
        assert max(abs(ours[token] - wanted[token]) for token in shared) < ROUNDING
        state = json.loads(ask(port, "GET", "/slots/0/blocks").body)
        assert state["n_reusable"] == state["n_tokens"]

        # The first one goes on in that slot.
        again = first.say(ASKS)
        assert again.accounting["decoded"] < 60
