"""Budgets with speculative decoding, and how many drafted tokens were accepted."""

from __future__ import annotations

from conversation import FILLER, ChatClient, TurnResult
from harness import RunningProxy, llama_server, proxy, server_binary
from recovery_texts import BUDGET, FACT, QUESTION

from evoke_proxy.models import bundled_model

KINDS = ("decoded", "recovered", "resident_before", "omitted")


def _turns(port: int) -> list[TurnResult]:
    client = ChatClient(port, "drafted", {"evoke_budget": BUDGET, "max_tokens": 24})
    texts = [FACT, *(f"Turn {number}. {FILLER}" for number in range(6)), QUESTION]
    return [client.say(text) for text in texts]


def test_turns_with_a_draft_model_are_planned_and_their_drafts_counted(
    patched_proxy: RunningProxy,
) -> None:
    draft = ("--spec-type", "draft-simple", "-md", str(bundled_model()))
    options = ("--evoke-ram", "64", "-np", "1", *draft)
    with llama_server(server_binary(patched=True), *options) as port, proxy(port) as running:
        turns = _turns(running.port)
        for turn in turns:
            assert sum(turn.accounting[kind] for kind in KINDS) == turn.accounting["n_prompt"]
            assert turn.accounting["n_resident_peak"] <= BUDGET
        assert turns[-1].accounting["recovered"] > 0 and turns[-1].accounting["omitted"] > 0
        assert [turn.text for turn in turns] == [turn.text for turn in _turns(patched_proxy.port)]
        for prompt in ("whole", "part"):
            labels = {"prompt": prompt, "result": "accepted"}
            assert running.metric("evoke_draft_tokens_total", **labels) > 0
        for name in ("evoke_degraded_total", "evoke_budget_breach_total"):
            assert running.metric(name) == 0
