"""Forwards requests as they are: for servers without a cache to manage, and unreadable bodies."""

from __future__ import annotations

from dataclasses import replace

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.engine.parsing.request import ParsedRequest
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.server.strategy import AnyBodyStrategy
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope


class Passthrough(AnyBodyStrategy):
    """The strategy that leases no slot and changes nothing."""

    mode = "pass-through"

    def __init__(self, monitor: ServerMonitor, metrics: Metrics) -> None:
        self._monitor = monitor
        self._metrics = metrics

    async def prepare(self, request: ParsedRequest, scope: TurnScope) -> PreparedTurn:
        """Count why nothing is done for the request."""
        reason = request.unreadable or self._monitor.server.obstacle
        if not reason:
            return scope.turn
        self._metrics.bypass.labels(reason=reason).inc()
        return replace(scope.turn, decision=f"bypass:{reason}")
