"""The snapshot strategy: a turn whose preparation fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from evoke_proxy.config import load
from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.engine.gateway import ForwardedBody, RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
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
