"""A budgeted turn whose client leaves, or whose preparation fails, after its plan has run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evoke_proxy.adapters.llama.block_api import PlanCall, RenderCall
from evoke_proxy.config import Config
from evoke_proxy.core.model.blocks import Role, Span
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered, SlotView
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.gateway import Outcome, RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
from evoke_proxy.engine.strategies.budgeted.turn import BudgetedTurn

BODY = b'{"messages":[{"role":"user","content":"hello"}]}'
TOKENS = np.arange(200, dtype=np.int32)
CUT_OFF = Outcome(is_finished=False)


class Blocks:
    """Runs every plan in the one slot of a llama-server, which is empty."""

    def __init__(self) -> None:
        self.trace = RequestTrace(0.0)
        # By call, whether the client had been told that its request waits.
        self.waiting: list[tuple[str, bool]] = []

    async def render(self, call: RenderCall) -> Rendered:
        self._note("render")
        spans = (MessageSpan(0, Role.USER, Span(0, 190)),)
        return Rendered(TOKENS, 190, spans, slots=(SlotView(0, 3, 0, 0, (), 10_000),))

    async def run_plan(self, call: PlanCall) -> int:
        self._note("plan")
        return 3

    async def slot(self, slot: int, tenant: str, since: str = "") -> Mapping[str, Any]:
        self._note("slot")
        return {"blocks": []}

    def _note(self, call: str) -> None:
        self.waiting.append((call, self.trace.waiting_since is not None))


class Prepared:
    """Prepares one request with a budgeted strategy; only llama-server is replaced."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.router = build_router(Config())
        self.server = self.router.server
        self.strategy = self.server.strategies.budgeted

    def run(self, use: Callable[[ParsedChat, TurnScope], Coroutine[Any, Any, None]]) -> None:
        async def prepared() -> None:
            incoming = IncomingRequest(dialect="chat", body=BODY, headers={})
            request = await self.router.parser.parse(incoming)
            assert isinstance(request, ParsedChat)
            metrics, client = self.server.resources.metrics, self.server.client
            calls: Any = SimpleNamespace(blocks=self.blocks, client=client)
            scope = TurnScope(request, self.blocks.trace, self.server.slots, metrics, calls)
            await use(request, scope)

        asyncio.run(prepared())


def test_a_request_counts_as_waiting_until_its_plan_has_run() -> None:
    """Loading blocks from disk takes as long as waiting for a slot does."""
    prepared = Prepared()

    async def use(request: ParsedChat, scope: TurnScope) -> None:
        recorded = prepared.server.conversations
        turn = await prepared.strategy.prepare(request, scope)
        assert isinstance(turn, BudgetedTurn) and turn.has_marker and len(recorded) == 1
        scope.close()

    prepared.run(use)
    assert prepared.blocks.waiting == [("render", False), ("plan", True)]
    assert prepared.blocks.trace.waiting_since is None


def test_a_turn_that_is_cancelled_after_its_plan_has_run_is_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared, editing = Prepared(), asyncio.Event()

    async def edit(*_: object) -> None:
        editing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(PreparedTurn, "with_members", edit)

    async def use(request: ParsedChat, scope: TurnScope) -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(prepared.strategy.prepare(request, scope))
            await editing.wait()
            task.cancel()
        scope.close()
        prepared.strategy.complete(scope.turn, CUT_OFF)

    prepared.run(use)
    (conversation,) = prepared.server.conversations
    assert conversation.session.turns == 1 and conversation.session._planned is None
    assert conversation.budgeted.epoch is None


def test_a_replacement_plan_is_not_compared_with_that_of_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared, with_members = Prepared(), PreparedTurn.with_members
    failures = iter([RuntimeError("a fault of the proxy")])

    async def edit(turn: PreparedTurn, *arguments: Any) -> Any:
        for failure in failures:
            raise failure
        return await with_members(turn, *arguments)

    monkeypatch.setattr(PreparedTurn, "with_members", edit)

    async def use(request: ParsedChat, scope: TurnScope) -> None:
        turn = await prepared.strategy.prepare(request, scope)
        assert isinstance(turn, BudgetedTurn)
        assert (turn.decision, turn.has_marker) == ("degraded:splice:held", True)
        scope.close()

    prepared.run(use)
    (conversation,) = prepared.server.conversations
    assert conversation.session._planned is None
    assert [call for call, is_seen in prepared.blocks.waiting if not is_seen] == ["render"]
