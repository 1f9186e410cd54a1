"""Serves a `Forwarding` with the snapshot strategy, until the walk hands strategies their scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.engine.gateway import IncomingRequest, Outcome, ParsedRequest, RequestTrace
from evoke_proxy.engine.parsing.tenant import tenant_of
from evoke_proxy.engine.server.turn import TurnScope
from evoke_proxy.engine.strategies.snapshots.strategy import SnapshotStrategy
from evoke_proxy.engine.strategies.snapshots.turn import SnapshotTurn
from evoke_proxy.engine.turns.forwarding import Forwarding


async def prepare(
    strategy: SnapshotStrategy, way: Forwarding, chat: ChatRequest, headers: Mapping[str, str]
) -> None:
    """Prepare a request, and take over what was decided; raises what the strategy raises."""
    incoming = IncomingRequest(
        dialect=chat.dialect, target="", body=way.body, headers=headers, forwarded_headers={}
    )
    request = ParsedRequest(
        incoming=incoming,
        tenant=tenant_of(headers),
        body=way.body,
        chat=chat,
        hint=way.hint,
        id_slot=way.id_slot,
        is_batch=way.is_batch,
    )
    trace = RequestTrace(way.began)
    trace.waits = way.waits
    scope = strategy.scope(request, trace)
    way.exit_stack.callback(scope.close)
    try:
        turn = await way.keep_alive(strategy.prepare(scope))
    finally:
        _take_over(way, scope)
    way.body, way.members = turn.forwarded.body, turn.forwarded.members


def _take_over(way: Forwarding, scope: TurnScope) -> None:
    turn = scope.turn
    way.stage, way.leases, way.decision = scope.trace.stage, scope.leases, turn.decision
    way.conversation, way.arrival = turn.conversation, turn.arrival
    way.seat = turn if isinstance(turn, SnapshotTurn) else None


async def drain(
    strategy: SnapshotStrategy, way: Forwarding, is_stopping: Callable[[], bool]
) -> None:
    """Wait until llama-server is done with a request, and record what its slot holds."""
    if way.seat is not None:
        strategy.is_stopping = is_stopping
        await strategy.drain(way.seat, _outcome(way))


def start_background(strategy: SnapshotStrategy, way: Forwarding) -> None:
    """Decode ahead of the next request."""
    if way.seat is not None:
        strategy.start_background(way.seat, _outcome(way))


def _outcome(way: Forwarding) -> Outcome:
    return Outcome(
        is_finished=way.observer.done, timings=way.observer.timings, usage=way.observer.usage
    )
