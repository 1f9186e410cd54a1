"""Turns that are planned while llama-server renders their prompt, on a real server."""

from __future__ import annotations

import json
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


def _long_chat(running: RunningProxy, session: str) -> ChatClient:
    """A client with a long history, none of which was sent."""
    client = ChatClient(running.port, session, {"evoke_budget": BUDGET})
    client.messages.append({"role": "user", "content": FACT})
    words = random.Random(1)
    for number in range(N_EXCHANGES):
        client.messages.append({"role": "assistant", "content": f"Noted {number}."})
        client.messages.append({"role": "user", "content": paragraph(words, 6)})
    client.messages.append({"role": "assistant", "content": "Noted."})
    return client


def _chat(running: RunningProxy, session: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Hold a long conversation; return the answer and the token accounting of each turn."""
    client = _long_chat(running, session)
    turns = [client.say(text) for text in ("Hello.", "Which ship came back?", QUESTION, QUESTION)]
    return [(turn.text, turn.accounting) for turn in turns]


def test_turns_of_a_chat_are_planned_while_their_prompt_is_rendered(
    patched_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both compared conversations adopt the same rows of this one: where the rows of another test
    # end, blocks would be divided otherwise in only one of them.
    _chat(patched_proxy, "before")
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
    compared = [
        [(text, counts["recovered"], counts["omitted"]) for text, counts in turns]
        for turns in (early, later)
    ]
    assert compared[0] == compared[1]
    assert patched_proxy.metric("evoke_early_plans_total", result="used") == used


def _counts(running: RunningProxy) -> tuple[float, float]:
    """How many early plans were used, and how many were not."""
    names = ("used", "replaced")
    used, replaced = (running.metric("evoke_early_plans_total", result=it) for it in names)
    return used, replaced


@pytest.mark.parametrize("said", ["Something else than it has said.", "", "Hello"])
def test_answers_that_the_client_has_changed_are_expected(
    patched_proxy: RunningProxy, said: str
) -> None:
    """The slot ends with other tokens than the next prompt has there."""
    used, replaced = _counts(patched_proxy)
    client = _long_chat(patched_proxy, f"changed {len(said)}")
    for text in ("Hello.", "Which ship came back?", QUESTION, QUESTION):
        turn = client.say(text)
        assert turn.accounting["n_resident_peak"] <= BUDGET
        client.messages[-1]["content"] = said or f"{turn.text}!"
    now = _counts(patched_proxy)
    assert now[0] > used
    assert now[1] == replaced


def test_turns_with_tools_are_planned_while_their_prompt_is_rendered(
    patched_proxy: RunningProxy,
) -> None:
    used, replaced = _counts(patched_proxy)
    client = _long_chat(patched_proxy, "tools")
    client.say("Hello.")
    for i in range(6):
        function = {"name": "look_up", "arguments": f'{{"number": {i}}}'}
        call = {"id": f"call_{i}", "type": "function", "function": function}
        said = {"role": "assistant", "content": f"Ship {i}?", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": f"call_{i}", "content": f"Ship {i} came back."}
        client.messages[-1:] = [said, result]
        answer = client.post()
        assert json.loads(answer.body)["timings"]["evoke"]["n_resident_peak"] <= BUDGET
        client.messages.append({"role": "assistant", "content": "Next."})
    now = _counts(patched_proxy)
    assert now[0] > used
    assert now[1] == replaced
