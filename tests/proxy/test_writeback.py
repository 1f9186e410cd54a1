"""Write-back: blocks are saved while the server is idle, so that evicting them copies nothing."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from conversation import FILLER, ChatClient, TurnResult
from harness import RunningProxy, ask, llama_server, proxy, server_binary

from evoke_proxy.adapters.llama.block_api import BlockApi

BUDGET = 448
WRITTEN_METRIC = "evoke_blocks_written_behind_total"


def _blocks(port: int) -> dict[str, dict[str, Any]]:
    answer = json.loads(ask(port, "GET", "/slots/0/blocks?tenant=").body)
    return {block["name"]: block for block in answer["blocks"]}


def _n_written(running: RunningProxy) -> float:
    """Wait for background tasks; returns the number of blocks saved by write-back."""
    running.wait_for_background()
    return running.metric(WRITTEN_METRIC)


def _fill_budget(client: ChatClient, running: RunningProxy) -> TurnResult:
    """Send turns until the budget is nearly full; returns the last one."""
    turn = client.say(f"Turn 0. {FILLER}")
    while turn.accounting["n_resident"] < BUDGET - 150:
        _n_written(running)
        turn = client.say(f"More. {FILLER}")
    assert sum(turn.blocks(f"x-evoke-{verb}") for verb in ("evicted", "recovered")) == 0
    return turn


@pytest.mark.parametrize("writeback", [True, False])
def test_blocks_saved_by_write_back_are_evicted_without_another_copy(
    patched_port: int, writeback: bool
) -> None:
    ask(patched_port, "POST", "/slots/0?action=block-drop", b'{"all": true}')
    with proxy(patched_port, policy__writeback=writeback) as running:
        client = ChatClient(running.port, "idle", {"evoke_budget": BUDGET})
        _fill_budget(client, running)
        copied = _n_written(running)
        saved = _blocks(patched_port)
        assert (copied > 0) == bool(saved) == writeback
        assert len(saved) == copied
        turn = client.say(f"And a longer one. {FILLER}{FILLER}")
        assert turn.blocks("x-evoke-evicted") > 0 and turn.accounting["marker"] == "ok"
        _n_written(running)
        evicted = {name for name, block in _blocks(patched_port).items() if not block["resident"]}
        # With write-back, evicted blocks were saved before the turn; without it, during the turn.
        assert evicted and bool(evicted & saved.keys()) == writeback
        assert evicted <= saved.keys() or not writeback
        assert running.metric("evoke_writebacks_total", result="refused") == 0


def test_write_back_copies_nothing_while_a_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen conversations run concurrently on one slot."""
    options = ("-np", "1", "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as port, proxy(port) as running:
        clients = [ChatClient(running.port, f"s{i}", {"evoke_budget": BUDGET}) for i in range(16)]
        pool = running.gateway.server.slots.pool
        run, idle = BlockApi.run, list[bool]()

        async def recording_run(api: BlockApi, slot: int, action: str, body: Any) -> Any:
            # The plan of a turn is bytes; only the copies behind a turn have `expect`.
            if "expect" in (json.loads(body) if isinstance(body, bytes) else body):
                idle.append(pool.idle())
            return await run(api, slot, action, body)

        monkeypatch.setattr(BlockApi, "run", recording_run)

        def chat(client: ChatClient) -> None:
            for turn in range(2):
                client.say(f"{client.session}, turn {turn}. {FILLER}", max_tokens=2)

        threads = [threading.Thread(target=chat, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert _n_written(running) > 0
        assert idle and all(idle)
        assert running.metric("evoke_degraded_total") == 0


def test_write_back_never_displaces_the_only_copy_of_a_block() -> None:
    """Write-back stops when host memory is three quarters full."""
    options = ("-np", "1", "--evoke-ram", "1")
    with llama_server(server_binary(patched=True), *options) as port, proxy(port) as running:
        client = ChatClient(running.port, "small", {"evoke_budget": BUDGET})
        for number in range(7):
            client.say(f"Turn {number}. {FILLER}")
            _n_written(running)
        ram = json.loads(ask(port, "GET", "/slots/0/blocks").body)["ram"]
        assert ram["budget"] / 2 < ram["used"] <= ram["budget"]
        assert running.metric("evoke_plan_failures_total", reason="unknown_block") == 0
