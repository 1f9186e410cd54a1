"""The snapshot strategy: a turn whose preparation fails, and saving when the proxy stops."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from evoke_proxy.config import load
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.snapshots.slot_contents import SlotContents
from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.engine.gateway import ForwardedBody, RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
from evoke_proxy.engine.strategies.snapshots.displaced_slots import DisplacedSlots
from evoke_proxy.engine.strategies.snapshots.slot_placement import SnapshotTurn
from evoke_proxy.engine.strategies.snapshots.strategy import SnapshotStrategy
from evoke_proxy.errors import UpstreamTimeout

BODY = b'{"messages":[{"role":"user","content":"hello"}]}'
TOKENS = np.arange(4, dtype=np.int32)


def test_a_turn_whose_preparation_failed_is_not_expected_in_a_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its body names no slot any more, so llama-server may choose another one."""

    async def fail(_: SnapshotStrategy, request: ParsedChat, scope: TurnScope) -> PreparedTurn:
        scope.turn = SnapshotTurn(
            request=request,
            calls=scope.turn.calls,
            forwarded=ForwardedBody(request.body),
            chat=request.chat,
            body=request.body,
            prompt=TOKENS,
            boundary=TOKENS[:2],
            slot=1,
        )
        raise UpstreamTimeout("no answer")

    async def run() -> PreparedTurn:
        config = load(None, {}, {"snapshots.directory": str(tmp_path)})
        server = cast(ModelRouter, build_gateway(config)).server
        monkeypatch.setattr(SnapshotStrategy, "_managed", fail)
        incoming = IncomingRequest(dialect="chat", body=BODY, headers={})
        request = await build_gateway(config).parser.parse(incoming)
        assert isinstance(request, ParsedChat)
        trace = RequestTrace(0.0)
        scope = TurnScope(
            request, trace, server.slots, server.resources.metrics, server.resources.calls
        )
        strategy = server.strategies.snapshots
        assert strategy is not None
        prepared = await strategy.prepare(request, scope)
        scope.close()
        return prepared

    turn = asyncio.run(run())
    assert isinstance(turn, SnapshotTurn)
    assert (turn.slot, turn.decision) == (None, "degraded:render")


def test_a_request_waits_for_its_slot_while_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a server is drained; a slot in which a request runs is not saved."""

    async def run() -> None:
        config = load(None, {}, {"snapshots.directory": str(tmp_path)})
        server = cast(ModelRouter, build_gateway(config)).server
        slots, conversations = server.slots, server.conversations
        strategy = server.strategies.snapshots
        assert strategy is not None
        conversation = conversations.start(Rendered(TOKENS, len(TOKENS), ()), None, "")
        contents = SlotContents(0, TOKENS, exact=True, at=0.0)
        conversation.snapshots.contents_changed(contents)
        saving, saved = asyncio.Event(), asyncio.Event()

        async def save(*_: object) -> None:
            saving.set()
            await saved.wait()

        monkeypatch.setattr(DisplacedSlots, "save_contents", save)
        with await slots.acquire("another", ""):
            await strategy.save_all()
            assert not saving.is_set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(strategy.save_all())
            await saving.wait()
            request = tasks.create_task(slots.acquire(conversation.id, ""))
            await asyncio.sleep(0.01)
            assert not request.done()
            saved.set()
            (await request).release()
        assert slots.pool.idle()

    asyncio.run(run())
