"""Attention of the model, for policies that look at it: one call a turn, and only for those."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from evoke_proxy.adapters.upstream import Upstream
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.attention.attention import NO_CAPTURE, Capture, captured_for, layers_of
from evoke_proxy.core.conversation.turn import Turn
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.conversations import Conversation


class Attending:
    """Has llama-server capture what a turn's policy wants to know, and reads it."""

    def __init__(self, upstream: Upstream, server: Callable[[], ServerInfo]) -> None:
        self._upstream = upstream
        self._server = server

    def wanted(self, config: PolicyConfig) -> Capture | None:
        """What a turn's policy needs, as far as this server can capture at all."""
        return captured_for(config) if self._server().capturable else None

    def ops(self, config: PolicyConfig, known: Conversation) -> list[dict[str, Any]]:
        """What a plan has to say about it: that it begins, goes on, or ends."""
        wanted = self.wanted(config)
        if wanted is None:
            return [NO_CAPTURE] if known.capture is not None else []
        possible = self._server().capturable
        named = tuple(layer for layer in wanted.layers if layer in possible)
        return [wanted.op(named or layers_of(possible, config.attention_layers))]

    async def seen(self, turn: Turn, known: Conversation, client: Mapping[str, str]) -> Turn:
        """The turn with what was captured in its slot since it was last asked.

        As it is where nothing was, or in another way. Raises PlanRefused, and other EvokeErrors for
        what llama-server does.
        """
        wanted = self.wanted(turn.config)
        if wanted is None or wanted != known.capture or not turn.view.in_cache.any():
            return turn
        if not wanted.read:
            return turn
        memory, session = known.session.attention, known.session
        body = memory.question(turn.view, wanted) | {"tenant": known.tenant}
        answer = await self._upstream.run(turn.slot.id, "attention", body, client)
        view = memory.told(turn.view, answer, session.turns, turn.config.sink_tokens)
        return replace(turn, view=view)
