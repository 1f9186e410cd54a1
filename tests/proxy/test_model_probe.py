"""Probes of the model: its attention finds the blocks that a question needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from conversation import ChatClient
from harness import RunningProxy, proxy
from probed import BUDGET, FixedSpeed, conversation_with_evicted_fact


def _prober(running: RunningProxy) -> Any:
    return running.gateway.server.strategies.budgeted._planner._prober


def ask_question(
    client: ChatClient, question: str
) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
    """Ask a question; returns the answer, and the token accounting of the usage and the timings."""
    client.messages.append({"role": "user", "content": question})
    answer = client.post(max_tokens=24)
    assert answer.status == 200, answer.body
    reply = json.loads(answer.body)
    return (
        reply["choices"][0]["message"]["content"],
        reply["usage"]["evoke"],
        reply["timings"]["evoke"],
    )


@pytest.fixture
def words_only(patched_port: int) -> Iterator[RunningProxy]:
    """A proxy that ranks by words alone."""
    with proxy(patched_port, embedder__model="none") as running:
        yield running


@pytest.mark.parametrize("recall", ["text", "model", "fused"])
def test_a_probe_recovers_a_block_that_shares_no_word_with_the_question(
    words_only: RunningProxy, recall: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word vectors would find it, too."""
    monkeypatch.setattr(_prober(words_only), "pace", FixedSpeed(1000))
    client = conversation_with_evicted_fact(words_only.port, f"probing {recall}", recall)
    before = words_only.metric("evoke_probe_tokens_total")
    text, usage, accounting = ask_question(client, "Where do I live?")
    is_recalled = "amber falcon" in text
    assert is_recalled is (recall != "text"), text
    assert accounting["n_resident_peak"] <= BUDGET and accounting["marker"] == "ok"
    kinds = ("decoded", "resident_before", "recovered", "omitted")
    assert sum(usage[kind] for kind in kinds) == n_prompt(client, words_only)
    if recall == "text":
        assert "probe" not in usage
        return
    probe = usage["probe"]
    # A probe decodes the tail, and the first words of the model's answer.
    assert usage["decoded"] < probe["decoded"] <= usage["decoded"] + 12
    assert 0 < probe["brought"] <= usage["recovered"]
    assert words_only.metric("evoke_probe_tokens_total") == before + probe["decoded"]
    assert words_only.metric("evoke_plan_failures_total", reason="books_differ") == 0
    assert words_only.metric("evoke_budget_breach_total") == 0


def n_prompt(client: ChatClient, running: RunningProxy) -> int:
    """Return the number of tokens of the conversation's latest prompt."""
    conversations = running.gateway.conversations
    return len(next(each.tokens for each in conversations if each.name == client.session))


def test_no_probe_is_made_when_text_is_certain_and_probes_are_slow(
    patched_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = conversation_with_evicted_fact(patched_proxy.port, "probing sure", "fused")
    monkeypatch.setattr(_prober(patched_proxy), "pace", FixedSpeed(20))
    declined = patched_proxy.metric("evoke_probes_total", result="too_dear")
    text, usage, _ = ask_question(client, "What is my residence?")
    assert "amber falcon" in text and "probe" not in usage
    assert patched_proxy.metric("evoke_probes_total", result="too_dear") == declined + 1


def test_a_turn_that_is_too_slow_to_probe_is_ranked_by_text(
    patched_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_prober(patched_proxy), "pace", FixedSpeed(1))
    client = conversation_with_evicted_fact(patched_proxy.port, "probing slowly", "model")
    declined = patched_proxy.metric("evoke_probes_total", result="too_dear")
    text, usage, accounting = ask_question(client, "What is my residence?")
    assert "amber falcon" in text and "probe" not in usage
    assert patched_proxy.metric("evoke_probes_total", result="too_dear") == declined + 1
    assert accounting["n_resident_peak"] <= BUDGET


def test_a_turn_without_room_for_a_probe_is_ranked_by_text(patched_proxy: RunningProxy) -> None:
    client = conversation_with_evicted_fact(patched_proxy.port, "probing narrowly", "model")
    # An answer that the server did not generate is decoded with the question.
    client.messages[-1]["content"] = "The harbor keeps seven slow boats near its lamps. " * 3
    declined = patched_proxy.metric("evoke_probes_total", result="no_room")
    text, usage, accounting = ask_question(client, "What is my residence?")
    assert "amber falcon" in text and "probe" not in usage
    assert patched_proxy.metric("evoke_probes_total", result="no_room") == declined + 1
    assert accounting["n_resident_peak"] <= BUDGET
