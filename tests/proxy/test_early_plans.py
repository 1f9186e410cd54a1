"""Turns that are planned while llama-server renders their prompt, on a real server."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from conversation import ChatClient
from harness import RunningProxy
from recovery_texts import FACT, QUESTION

from evoke_proxy.demo.session import paragraph
from evoke_proxy.engine.strategies.budgeted.early_plan import EarlyPlan

BUDGET = 640
# Renderings are remembered of bodies that have at least 16 KiB.
N_EXCHANGES = 64


def _chat(running: RunningProxy, session: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Hold a long conversation; return the answer and the token accounting of each turn."""
    client = ChatClient(running.port, session, {"evoke_budget": BUDGET})
    client.messages.append({"role": "user", "content": FACT})
    words = random.Random(1)
    for number in range(N_EXCHANGES):
        client.messages.append({"role": "assistant", "content": f"Noted {number}."})
        client.messages.append({"role": "user", "content": paragraph(words, 6)})
    client.messages.append({"role": "assistant", "content": "Noted."})
    turns = [client.say(text) for text in ("Hello.", "Which ship came back?", QUESTION, QUESTION)]
    return [(turn.text, turn.accounting) for turn in turns]


def test_turns_of_a_chat_are_planned_while_their_prompt_is_rendered(
    patched_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = _chat(patched_proxy, "early")
    # A busy machine may render a whole prompt before the last messages.
    used = patched_proxy.metric("evoke_early_plans_total", result="used")
    assert used >= 1
    assert patched_proxy.metric("evoke_early_plans_total", result="replaced") == 0
    assert patched_proxy.metric("evoke_degraded_total") == 0
    assert any(accounting["recovered"] for _, accounting in early)
    assert all(accounting["n_resident_peak"] <= BUDGET for _, accounting in early)
    monkeypatch.setattr(EarlyPlan, "start", lambda *_: None)
    later = _chat(patched_proxy, "later")
    # The second conversation adopts the rows of the first one in its first turn.
    compared = [
        [(text, counts["recovered"], counts["omitted"]) for text, counts in turns[1:]]
        for turns in (early, later)
    ]
    assert compared[0] == compared[1]
    assert patched_proxy.metric("evoke_early_plans_total", result="used") == used
