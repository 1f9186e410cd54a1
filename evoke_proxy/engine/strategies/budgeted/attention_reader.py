"""Reads the model's attention for policies that use it, with one call per turn."""

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
    """Makes llama-server capture the attention that a turn's policy uses, and reads it."""

    def __init__(self, blocks: BlockApi, monitor: ServerMonitor) -> None:
        self._blocks = blocks
        self._monitor = monitor

    def can_capture(self, conversation: Conversation) -> bool:
        """Whether the server captures attention, and has not refused it for this session."""
        server = self._monitor.server
        return (
            bool(server.capturable) and conversation.budgeted.capture_refused_by != server.instance
        )

    def note_refusal(self, conversation: Conversation, refused: PlanRefused) -> bool:
        """Record that this server instance refused to capture attention for a session.

        Returns False if the refusal has another cause, or was recorded before.
        """
        if refused.operation != CAPTURE or not self.can_capture(conversation):
            return False
        conversation.budgeted.capture_refused_by = self._monitor.server.instance
        return True

    def wanted(self, config: PolicyConfig, conversation: Conversation) -> Capture | None:
        """The capture that a policy uses; None when it uses none, or the server cannot do it."""
        return capture_of(config) if self.can_capture(conversation) else None

    def ops(self, config: PolicyConfig, conversation: Conversation) -> list[dict[str, Any]]:
        """The operations of a plan that start, continue or end the capture."""
        wanted = self.wanted(config, conversation)
        if wanted is None:
            return [NO_CAPTURE] if conversation.budgeted.capture is not None else []
        possible = self._monitor.server.capturable
        return [wanted.op(captured_layers(possible, config.attention_layers))]

    async def read(
        self, turn: Turn, conversation: Conversation, headers: Mapping[str, str]
    ) -> Turn:
        """The turn with the attention captured in its slot since the previous reading.

        Returns the same turn when nothing was captured, or another capture than the policy uses.
        Raises PlanRefused, and other EvokeErrors when the call fails.
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
        answer = await self.call(turn.slot.id, body, "bounds", headers)
        view = memory.updated(turn.view, answer, session.turns, turn.config.sink_tokens)
        return replace(turn, view=view)

    async def call(
        self, slot: int, body: Mapping[str, Any], key: str, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """The answer of an `attention` call with `body`, which is split if it is too much work.

        `key` names the list of ranges in the body that takes the most work: "bounds" or
        "products". The list is split into several calls when llama-server refuses it as too much
        work; between the calls other slots decode. A range that is refused alone comes back as
        unknown. Raises PlanRefused, and other EvokeErrors when a call fails.
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
                # Every single range was refused: get the rest of the answer without ranges.
                size, start = 0, len(spans)
        return first if len(parts) < 2 else first | {f"key_{key}": _joined(parts)}


def _joined(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Join partial answers, each with its number of ranges; ranges without data are unknown."""
    first = next((part for _, part in parts if part), {})
    has_rows = [it for count, part in parts for it in part.get("known", [False] * count)]
    data = b"".join(base64.b64decode(part.get("data", "")) for _, part in parts)
    return {**first, "known": has_rows, "data": base64.b64encode(data).decode()}
