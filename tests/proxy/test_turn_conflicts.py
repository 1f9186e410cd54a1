"""Chat requests that compete for a session or a slot wait or get a new plan, and never a 409."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from comparison import comparable
from conversation import FILLER, ChatClient
from harness import Answer, RunningProxy, ask, proxy

from evoke_proxy.adapters.llama.block_api import BlockApi

BUDGET = 320


@pytest.fixture
def budgeted(two_slots_port: int) -> Iterator[RunningProxy]:
    """A new proxy with a budget, in front of a server with two slots."""
    with proxy(two_slots_port, policy__budget=BUDGET) as running:
        yield running


def _sessions(running: RunningProxy) -> list[tuple[str, int]]:
    running.wait_until_idle()
    sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
    return [(session["name"], session["turns"]) for session in sessions]


def test_concurrent_requests_of_a_session_run_one_after_the_other(budgeted: RunningProxy) -> None:
    client = ChatClient(budgeted.port, "both")
    for number in range(3):
        client.say(f"Turn {number}. {FILLER}")
    client.messages.append({"role": "user", "content": "Go on."})
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(client.post())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers] == [200] * 4
    accounting = [json.loads(answer.body)["timings"]["evoke"] for answer in answers]
    # All run in the same slot, so none decodes the history again.
    assert all(turn["marker"] == "ok" and turn["decoded"] < 40 for turn in accounting)
    assert all(turn["n_resident_peak"] <= BUDGET for turn in accounting)
    assert _sessions(budgeted) == [("both", 7)]


def test_conversations_with_one_id_and_different_tokens_are_separate(
    budgeted: RunningProxy,
) -> None:
    one, other = ChatClient(budgeted.port, "same"), ChatClient(budgeted.port, "same")
    for number in range(3):
        one.say(f"Turn {number}. {FILLER}")
        turn = other.say(f"Nothing like it, for the {number}. time. {FILLER}")
    assert turn.accounting["marker"] == "ok"
    assert turn.accounting["decoded"] < turn.accounting["n_prompt"] / 2
    assert sorted(_sessions(budgeted)) == [("same", 3), ("same", 3)]


def test_a_slot_changed_by_another_client_gets_a_new_plan(
    two_slots_port: int, budgeted: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ChatClient(budgeted.port, "changed")
    for number in range(4):
        client.say(f"Turn {number}. {FILLER}")
    budgeted.wait_for_background()  # a refused write-back would not be counted
    upstream = budgeted.gateway.upstream
    run = BlockApi.run
    intruder_statuses: list[int] = []

    async def run_after_intruder(api: BlockApi, slot: int, action: str, *more: Any) -> object:
        if not intruder_statuses:
            # Another client's request runs in the slot after its state was read.
            body = json.dumps({"prompt": "x", "n_predict": 1, "id_slot": slot}).encode()
            async with upstream.open("POST", "/completion", {}, body) as reply:
                intruder_statuses.append(reply.status)
                await reply.read()
        return await run(api, slot, action, *more)

    monkeypatch.setattr(BlockApi, "run", run_after_intruder)
    turn = client.say("Go on.")
    assert intruder_statuses == [200]
    assert turn.accounting["marker"] == "ok"
    assert turn.accounting["n_resident_peak"] <= BUDGET
    assert budgeted.metric("evoke_plan_failures_total", reason="stale_epoch") == 1
    assert budgeted.metric("evoke_degraded_total", stage="plan") == 0


def test_a_409_for_a_block_call_of_a_client_is_forwarded(
    two_slots_port: int, budgeted: RunningProxy
) -> None:
    call = json.dumps({"epoch": 1, "ops": []}).encode()
    target = "/slots/0?action=block-plan"
    direct, proxied = (ask(p, "POST", target, call) for p in (two_slots_port, budgeted.port))
    assert direct.status == 409
    assert comparable(proxied) == comparable(direct)
