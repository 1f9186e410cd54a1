"""Forwards requests as they are: for servers without a cache to manage, and unreadable bodies."""

from __future__ import annotations

from dataclasses import replace

from evoke_proxy.engine.parsing.request import ParsedChat, ParsedRequest
from evoke_proxy.engine.server.strategy import AnyBodyStrategy, ServerResources
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
from evoke_proxy.engine.strategies.slot_assignment import SlotAssignment


class Passthrough(AnyBodyStrategy):
    """The strategy that changes nothing.

    Where clients have keys, requests wait here for a free slot, in turn by tenant: llama-server
    serves requests in the order of their arrival, so one tenant could delay all others.
    """

    mode = "pass-through"

    def __init__(self, server: ServerResources) -> None:
        self._monitor = server.monitor
        self._metrics = server.metrics
        self._assignment = SlotAssignment(server)

    async def prepare(self, request: ParsedRequest, scope: TurnScope) -> PreparedTurn:
        """Count why nothing is done for the request; raises SlotsBusy when no slot is free."""
        reason = request.unreadable or self._monitor.server.obstacle
        if reason:
            self._metrics.bypass.labels(reason=reason).inc()
            scope.turn = replace(scope.turn, decision=f"bypass:{reason}")
        has_keys = bool(self._monitor.config.security.keys_file)
        if has_keys and isinstance(request, ParsedChat) and self._monitor.server.has_slots:
            await self._assignment.acquire_ephemeral(request, scope)
            scope.turn = replace(scope.turn, slots=())  # llama-server chooses the slots
        return scope.turn
