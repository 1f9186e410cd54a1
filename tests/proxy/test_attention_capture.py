"""Policies that use attention have it captured, and read it once per turn."""

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
def calling(
    patched_port: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RunningProxy, Calls]]:
    """A proxy of its own, and the block calls it makes."""
    calls: Calls = []
    with proxy(patched_port, **getattr(request, "param", {})) as running:
        original = BlockApi.run

        async def run(api: BlockApi, slot: int, action: str, body: Any) -> Any:
            calls.append((action, body))
            return await original(api, slot, action, body)

        monkeypatch.setattr(BlockApi, "run", run)
        yield running, calls


def captured(calls: Calls) -> list[Mapping[str, Any]]:
    ops = [op for action, body in calls if action == "block-plan" for op in body["ops"]]
    return [op for op in ops if op["op"] == "attn-capture"]


def talk(running: RunningProxy, name: str, policy: str, turns: int = 7) -> ChatClient:
    spoken = ChatClient(running.port, name, {"evoke_budget": BUDGET, "evoke_policy": policy})
    for number in range(turns):
        said = spoken.say(f"Turn {number}. {FILLER}")
        assert said.accounting["n_resident_peak"] <= BUDGET
        assert said.accounting["budget_breaches"] == 0
    return spoken


MODES = {"h2o": "sum", "snapkv": "snapkv", "tova": "ewma", "scored": "ewma"}


@pytest.mark.parametrize("policy", MODES)
def test_attention_is_captured_from_the_first_turn_and_read_once_per_later_turn(
    calling: tuple[RunningProxy, Calls], policy: str
) -> None:
    running, calls = calling
    spoken = talk(running, f"attending {policy}", policy)
    assert {op["mode"] for op in captured(calls)} == {MODES[policy]}
    assert {tuple(op["layers"]) for op in captured(calls)} == {(0, 1, 2, 3)}
    read = [body["ranges"] for action, body in calls if action == "attention"]
    assert len(read) == 6
    assert all(len(ranges) > 3 for ranges in read)
    status = json.loads(ask(running.port, "GET", "/slots/0/attention").body)
    assert status["layers"] == [0, 1, 2, 3] and status["n_obs"] > 0
    # a policy that does not look ends it
    calls.clear()
    spoken.say("And now?", evoke_policy="evoke")
    assert [op["layers"] for op in captured(calls)] == [[]]
    spoken.say("And then?", evoke_policy="evoke")
    assert captured(calls) == [captured(calls)[0]]
    assert not [action for action, _ in calls if action == "attention"]
    assert running.metric("evoke_degraded_total") == 0


def test_attention_as_a_signal_of_evoke_is_read(calling: tuple[RunningProxy, Calls]) -> None:
    running, calls = calling
    talk(running, "keeping", "evoke_attention", turns=4)
    assert len([action for action, _ in calls if action == "attention"]) == 3
    talk(running, "without", "recency", turns=2)
    assert len([action for action, _ in calls if action == "attention"]) == 3


def test_attention_is_not_captured_without_the_signal(calling: tuple[RunningProxy, Calls]) -> None:
    running, calls = calling
    talk(running, "plain", "evoke", turns=3)
    assert not captured(calls)
    assert not [action for action, _ in calls if action == "attention"]
