"""Conflicts are waited for or planned around; no chat request is answered 409."""

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
    """A proxy of its own with a budget, in front of a server with two slots."""
    with proxy(two_slots_port, policy__budget=BUDGET) as running:
        yield running


def _sessions(running: RunningProxy) -> list[tuple[str, int]]:
    running.quiet()
    known = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
    return [(session["name"], session["turns"]) for session in known]


def test_two_requests_of_a_session_at_once_take_turns(budgeted: RunningProxy) -> None:
    talk = ChatClient(budgeted.port, "both")
    for number in range(3):
        talk.say(f"Turn {number}. {FILLER}")
    talk.messages.append({"role": "user", "content": "Go on."})
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(talk.post())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers] == [200] * 4
    accounting = [json.loads(answer.body)["timings"]["evoke"] for answer in answers]
    # In one slot, one after the other: none decodes the history again.
    assert all(said["marker"] == "ok" and said["decoded"] < 40 for said in accounting)
    assert all(said["n_resident_peak"] <= BUDGET for said in accounting)
    assert _sessions(budgeted) == [("both", 7)]


def test_an_id_with_other_tokens_is_another_conversation(budgeted: RunningProxy) -> None:
    one, other = ChatClient(budgeted.port, "same"), ChatClient(budgeted.port, "same")
    for number in range(3):
        one.say(f"Turn {number}. {FILLER}")
        said = other.say(f"Nothing like it, for the {number}. time. {FILLER}")
    assert said.accounting["marker"] == "ok"
    assert said.accounting["decoded"] < said.accounting["n_prompt"] / 2
    assert sorted(_sessions(budgeted)) == [("same", 3), ("same", 3)]


def test_an_externally_changed_slot_gets_a_new_plan(
    two_slots_port: int, budgeted: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = ChatClient(budgeted.port, "changed")
    for number in range(4):
        talk.say(f"Turn {number}. {FILLER}")
    budgeted.settled()  # the copies that follow an answer are refused without a word
    upstream = budgeted.engine.upstream
    run = BlockApi.run
    refused: list[int] = []

    async def late(api: BlockApi, slot: int, action: str, *more: Any) -> object:
        if not refused:
            # Between our look at the slot and our call, somebody else's request runs in it.
            body = json.dumps({"prompt": "x", "n_predict": 1, "id_slot": slot}).encode()
            async with upstream.open("POST", "/completion", {}, body) as reply:
                refused.append(reply.status)
                await reply.read()
        return await run(api, slot, action, *more)

    monkeypatch.setattr(BlockApi, "run", late)
    said = talk.say("Go on.")
    assert refused == [200]
    assert said.accounting["marker"] == "ok"
    assert said.accounting["n_resident_peak"] <= BUDGET
    assert budgeted.metric("evoke_plan_failures_total", reason="stale_epoch") == 1
    assert budgeted.metric("evoke_degraded_total", stage="plan") == 0


def test_a_conflict_of_a_clients_block_call_is_forwarded(
    two_slots_port: int, budgeted: RunningProxy
) -> None:
    call = json.dumps({"epoch": 1, "ops": []}).encode()
    target = "/slots/0?action=block-plan"
    direct, proxied = (ask(p, "POST", target, call) for p in (two_slots_port, budgeted.port))
    assert direct.status == 409
    assert comparable(proxied) == comparable(direct)
