"""A probe of the model recovers the blocks that a question needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from conversation import ChatClient
from harness import RunningProxy

from evoke_proxy.core.policy.probe import DecodeSpeed

BUDGET = 320
# As long as the story, so that it does not fit where the ranking by text leaves a few tokens.
FACT = "My residence is amber falcon. "
FACT += "The young painter carries seven green lamps upstairs. " * 4
STORY = "The river follows the old bridge slowly. A wolf often watches the quiet harbor. " * 3


def _prober(running: RunningProxy) -> Any:
    return running.gateway.server.strategies.budgeted._planner._prober


def told(port: int, name: str, recall: str) -> ChatClient:
    """A fact, and so much behind it that it has left."""
    fields = {"evoke_budget": BUDGET, "evoke_recall": recall}
    talk = ChatClient(port, name, fields)
    talk.say(FACT, max_tokens=4)
    for _ in range(8):
        talk.say(STORY, max_tokens=4)
    return talk


def asked(talk: ChatClient, question: str) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
    """What is answered, the books in the usage, and those of llama-server."""
    talk.messages.append({"role": "user", "content": question})
    answer = talk.post(max_tokens=24)
    assert answer.status == 200, answer.body
    reply = json.loads(answer.body)
    return (
        reply["choices"][0]["message"]["content"],
        reply["usage"]["evoke"],
        reply["timings"]["evoke"],
    )


class _Steady(DecodeSpeed):
    """So many tokens a second, whatever is measured."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self._speed = speed

    def seconds(self, tail: int, words: int) -> float:
        return (tail + words) / self._speed


@pytest.mark.parametrize("recall", ["text", "model", "fused"])
def test_a_probe_recovers_a_block_that_shares_no_word_with_the_question(
    patched_proxy: RunningProxy, recall: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_prober(patched_proxy), "pace", _Steady(1000))
    talk = told(patched_proxy.port, f"probing {recall}", recall)
    spent = patched_proxy.metric("evoke_probe_tokens_total")
    text, usage, accounting = asked(talk, "Where do I live?")
    found = "amber falcon" in text
    assert found is (recall != "text"), text
    assert accounting["n_resident_peak"] <= BUDGET and accounting["marker"] == "ok"
    assert usage["decoded"] + usage["resident_before"] + usage["recovered"] + usage[
        "omitted"
    ] == len_of(talk, patched_proxy)
    if recall == "text":
        assert "probe" not in usage
        return
    probe = usage["probe"]
    # The tail once more, and the words that the model began with.
    assert usage["decoded"] < probe["decoded"] <= usage["decoded"] + 12
    assert 0 < probe["brought"] <= usage["recovered"]
    assert patched_proxy.metric("evoke_probe_tokens_total") == spent + probe["decoded"]
    assert patched_proxy.metric("evoke_plan_failures_total", reason="books_differ") == 0
    assert patched_proxy.metric("evoke_budget_breach_total") == 0


def len_of(talk: ChatClient, ours: RunningProxy) -> int:
    """The tokens of the conversation's latest prompt."""
    known = next(known for known in ours.gateway.conversations if known.name == talk.session)
    return len(known.tokens)


def test_no_probe_is_made_when_text_is_certain_and_probes_are_slow(
    patched_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = told(patched_proxy.port, "probing sure", "fused")
    monkeypatch.setattr(_prober(patched_proxy), "pace", _Steady(20))
    declined = patched_proxy.metric("evoke_probes_total", result="too_dear")
    text, usage, _ = asked(talk, "What is my residence?")
    assert "amber falcon" in text and "probe" not in usage
    assert patched_proxy.metric("evoke_probes_total", result="too_dear") == declined + 1
