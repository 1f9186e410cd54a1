"""Blocks are copied while the server is idle, so that evicting them copies nothing."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from conversation import FILLER, ChatClient, TurnResult
from harness import RunningProxy, ask, llama_server, proxy, server_binary

from evoke_proxy.adapters.llama.block_api import BlockApi

BUDGET = 448
WRITTEN = "evoke_blocks_written_behind_total"


def _blocks(port: int) -> dict[str, dict[str, Any]]:
    answer = json.loads(ask(port, "GET", "/slots/0/blocks?tenant=").body)
    return {block["name"]: block for block in answer["blocks"]}


def _settled(running: RunningProxy) -> float:
    """The number of blocks copied behind, once no more are."""
    running.wait_for_background()
    return running.metric(WRITTEN)


def _grown(talk: ChatClient, running: RunningProxy) -> TurnResult:
    """Turns until the budget is nearly full; the last of them."""
    said = talk.say(f"Turn 0. {FILLER}")
    while said.accounting["n_resident"] < BUDGET - 150:
        _settled(running)
        said = talk.say(f"More. {FILLER}")
    assert sum(said.blocks(f"x-evoke-{verb}") for verb in ("evicted", "recovered")) == 0
    return said


@pytest.mark.parametrize("writeback", [True, False])
def test_blocks_copied_by_write_back_are_evicted_without_a_copy(
    patched_port: int, writeback: bool
) -> None:
    ask(patched_port, "POST", "/slots/0?action=block-drop", b'{"all": true}')
    with proxy(patched_port, policy__writeback=writeback) as running:
        talk = ChatClient(running.port, "idle", {"evoke_budget": BUDGET})
        _grown(talk, running)
        copied = _settled(running)
        known = _blocks(patched_port)
        assert (copied > 0) == bool(known) == writeback
        assert len(known) == copied
        said = talk.say(f"And a longer one. {FILLER}{FILLER}")
        assert said.blocks("x-evoke-evicted") > 0 and said.accounting["marker"] == "ok"
        _settled(running)
        gone = {name for name, block in _blocks(patched_port).items() if not block["resident"]}
        # what left had its copy before the turn began, or got it in the turn
        assert gone and bool(gone & known.keys()) == writeback
        assert gone <= known.keys() or not writeback
        assert running.metric("evoke_writebacks_total", result="refused") == 0


def test_nothing_is_copied_while_a_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen conversations on one slot, all at once."""
    options = ("-np", "1", "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as port, proxy(port) as running:
        talks = [ChatClient(running.port, f"s{i}", {"evoke_budget": BUDGET}) for i in range(16)]
        pool = running.gateway.server.slots.pool
        run, idle = BlockApi.run, list[bool]()

        async def noted(api: BlockApi, slot: int, action: str, body: Any) -> Any:
            if "expect" in body:
                idle.append(pool.idle())
            return await run(api, slot, action, body)

        monkeypatch.setattr(BlockApi, "run", noted)

        def chat(talk: ChatClient) -> None:
            for turn in range(2):
                talk.say(f"{talk.session}, turn {turn}. {FILLER}", max_tokens=2)

        threads = [threading.Thread(target=chat, args=(talk,)) for talk in talks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert _settled(running) > 0
        assert idle and all(idle)
        assert running.metric("evoke_degraded_total") == 0


def test_write_back_never_displaces_the_only_copy_of_a_block() -> None:
    """Host memory three quarters full: nothing more is copied ahead, nothing is lost for it."""
    options = ("-np", "1", "--evoke-ram", "1")
    with llama_server(server_binary(patched=True), *options) as port, proxy(port) as running:
        talk = ChatClient(running.port, "small", {"evoke_budget": BUDGET})
        for number in range(7):
            talk.say(f"Turn {number}. {FILLER}")
            _settled(running)
        ram = json.loads(ask(port, "GET", "/slots/0/blocks").body)["ram"]
        assert ram["budget"] / 2 < ram["used"] <= ram["budget"]
        assert running.metric("evoke_plan_failures_total", reason="unknown_block") == 0
