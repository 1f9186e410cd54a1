"""Attention of the model, for policies that look at it: one call a turn, and only for those."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policy.attention import NO_CAPTURE, Capture, captured_layers
from evoke_proxy.core.policy.registry import capture_of
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.errors import PlanRefused

CAPTURE = str(NO_CAPTURE["op"])
# The type of llama-server's error for a call that would keep other slots waiting (patches/API.md).
TOO_MUCH_WORK = "too_much_work"


class AttentionReader:
    """Has llama-server capture what a turn's policy wants to know, and reads it."""

    def __init__(self, blocks: BlockApi, monitor: ServerMonitor) -> None:
        self._blocks = blocks
        self._monitor = monitor

    def can_capture(self, conversation: Conversation) -> bool:
        """Whether the server captures attention, and has not refused to do so for this session."""
        server = self._monitor.server
        return (
            bool(server.capturable) and conversation.budgeted.capture_refused_by != server.instance
        )

    def note_refusal(self, conversation: Conversation, refused: PlanRefused) -> bool:
        """Remember a refusal of the capture for as long as this server runs; False if the refusal
        has another cause, or is remembered already."""
        if refused.operation != CAPTURE or not self.can_capture(conversation):
            return False
        conversation.budgeted.capture_refused_by = self._monitor.server.instance
        return True

    def wanted(self, config: PolicyConfig, conversation: Conversation) -> Capture | None:
        """What a turn's policy needs, as far as this server can capture it for the session."""
        return capture_of(config) if self.can_capture(conversation) else None

    def ops(self, config: PolicyConfig, conversation: Conversation) -> list[dict[str, Any]]:
        """What a plan has to say about it: that it begins, goes on, or ends."""
        wanted = self.wanted(config, conversation)
        if wanted is None:
            return [NO_CAPTURE] if conversation.budgeted.capture is not None else []
        possible = self._monitor.server.capturable
        return [wanted.op(captured_layers(possible, config.attention_layers))]

    async def read(
        self, turn: Turn, conversation: Conversation, headers: Mapping[str, str]
    ) -> Turn:
        """The turn with what was captured in its slot since it was last asked.

        As it is where nothing was, or in another way. Raises PlanRefused, and other EvokeErrors for
        what llama-server does.
        """
        wanted = self.wanted(turn.config, conversation)
        if (
            wanted is None
            or wanted != conversation.budgeted.capture
            or not turn.view.in_cache.any()
        ):
            return turn
        if not wanted.read:
            return turn
        memory, session = conversation.session.attention, conversation.session
        body = memory.request(turn.view, wanted) | {"tenant": conversation.tenant}
        answer = await self.ask(turn.slot.id, body, "bounds", headers)
        view = memory.updated(turn.view, answer, session.turns, turn.config.sink_tokens)
        return replace(turn, view=view)

    async def ask(
        self, slot: int, body: Mapping[str, Any], key: str, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """The answer of an `attention` call; `key` (`bounds` or `products`) lists most of its work.

        What llama-server does not compute in one call is asked for in several, between which other
        slots decode; a range that is too much by itself comes back as unknown. Raises PlanRefused,
        and other EvokeErrors for what llama-server does.
        """
        spans = list(body.get(key) or ())
        size = len(spans)
        first: dict[str, Any] = {}
        parts: list[tuple[int, Mapping[str, Any]]] = []
        rest: Mapping[str, Any] = body
        start = 0
        while not first or start < len(spans):
            part = spans[start : start + size]
            try:
                more = {key: part} if part or key in body else {}
                answer = await self._blocks.run(slot, "attention", {**rest, **more}, headers)
            except PlanRefused as refused:
                if refused.type != TOO_MUCH_WORK or not part:
                    raise
                if size > 1:
                    size = (size + 1) // 2
                    continue
                parts.append((1, {}))
            else:
                first = first or answer
                parts.append((len(part), answer.get(f"key_{key}") or {}))
                rest = {"ranges": [], "tenant": body.get("tenant", "")}
            start += len(part)
            if start >= len(spans) and not first:
                # No range alone fits: the rest of the answer.
                size, start = 0, len(spans)
        return first if len(parts) < 2 else first | {f"key_{key}": _joined(parts)}


def _joined(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """One list of the answers about so many ranges each; those without an answer are unknown."""
    first = next((part for _, part in parts if part), {})
    has_rows = [it for count, part in parts for it in part.get("known", [False] * count)]
    data = b"".join(base64.b64decode(part.get("data", "")) for _, part in parts)
    return {**first, "known": has_rows, "data": base64.b64encode(data).decode()}
