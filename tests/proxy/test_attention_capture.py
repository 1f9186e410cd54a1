"""Policies that use attention capture it, and read it once per turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask, proxy

import bench.policies  # noqa: F401 -- registers baselines
from evoke_proxy.adapters.llama.block_api import BlockApi

BUDGET = 320
Calls = list[tuple[str, Mapping[str, Any]]]


@pytest.fixture
def recorded_calls(
    patched_port: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RunningProxy, Calls]]:
    """A new proxy, and the block calls that it makes."""
    calls: Calls = []
    with proxy(patched_port, **getattr(request, "param", {})) as running:
        original = BlockApi.run

        async def recording_run(api: BlockApi, slot: int, action: str, body: Any) -> Any:
            calls.append((action, json.loads(body) if isinstance(body, bytes) else body))
            return await original(api, slot, action, body)

        monkeypatch.setattr(BlockApi, "run", recording_run)
        yield running, calls


def capture_ops(calls: Calls) -> list[Mapping[str, Any]]:
    """Return the operations among `calls` that start or stop capturing."""
    ops = [op for action, body in calls if action == "block-plan" for op in body["ops"]]
    return [op for op in ops if op["op"] == "attn-capture"]


def run_conversation(running: RunningProxy, name: str, policy: str, turns: int = 7) -> ChatClient:
    """Run a conversation under a policy; every turn must stay in the budget."""
    client = ChatClient(running.port, name, {"evoke_budget": BUDGET, "evoke_policy": policy})
    for number in range(turns):
        turn = client.say(f"Turn {number}. {FILLER}")
        assert turn.accounting["n_resident_peak"] <= BUDGET
        assert turn.accounting["budget_breaches"] == 0
    return client


# The capture mode of each policy.
MODES = {"h2o": "sum", "snapkv": "snapkv", "tova": "ewma", "scored": "ewma"}


@pytest.mark.parametrize("policy", MODES)
def test_attention_is_captured_from_the_first_turn_and_read_once_per_later_turn(
    recorded_calls: tuple[RunningProxy, Calls], policy: str
) -> None:
    running, calls = recorded_calls
    client = run_conversation(running, f"attending {policy}", policy)
    assert {op["mode"] for op in capture_ops(calls)} == {MODES[policy]}
    assert {tuple(op["layers"]) for op in capture_ops(calls)} == {(0, 1, 2, 3)}
    read = [body["ranges"] for action, body in calls if action == "attention"]
    assert len(read) == 6
    assert all(len(ranges) > 3 for ranges in read)
    status = json.loads(ask(running.port, "GET", "/slots/0/attention").body)
    assert status["layers"] == [0, 1, 2, 3] and status["n_obs"] > 0
    # A policy that does not use attention stops the capture.
    calls.clear()
    client.say("And now?", evoke_policy="evoke")
    assert [op["layers"] for op in capture_ops(calls)] == [[]]
    client.say("And then?", evoke_policy="evoke")
    assert capture_ops(calls) == [capture_ops(calls)[0]]
    assert not [action for action, _ in calls if action == "attention"]
    assert running.metric("evoke_degraded_total") == 0


def test_the_evoke_policy_reads_attention_if_it_is_a_signal(
    recorded_calls: tuple[RunningProxy, Calls],
) -> None:
    running, calls = recorded_calls
    run_conversation(running, "keeping", "evoke_attention", turns=4)
    assert len([action for action, _ in calls if action == "attention"]) == 3
    run_conversation(running, "without", "recency", turns=2)
    assert len([action for action, _ in calls if action == "attention"]) == 3


def test_the_evoke_policy_captures_no_attention_without_the_signal(
    recorded_calls: tuple[RunningProxy, Calls],
) -> None:
    running, calls = recorded_calls
    run_conversation(running, "plain", "evoke", turns=3)
    assert not capture_ops(calls)
    assert not [action for action, _ in calls if action == "attention"]
