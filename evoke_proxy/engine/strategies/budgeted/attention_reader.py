"""Reads the model's attention for policies that use it, with one call per turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policy.attention import NO_CAPTURE, Capture, captured_layers
from evoke_proxy.core.policy.registry import capture_of
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.strategies.budgeted.turn import RenderedTurn
from evoke_proxy.errors import PlanRefused

CAPTURE = str(NO_CAPTURE["op"])


class AttentionReader:
    """Makes llama-server capture the attention that a turn's policy uses, and reads it."""

    def __init__(self, monitor: ServerMonitor) -> None:
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
        conversation.budgeted.capture_refused(self._monitor.server.instance)
        return True

    def capture(self, config: PolicyConfig, conversation: Conversation) -> Capture | None:
        """The capture that a policy uses; None when it uses none, or the server cannot do it."""
        return capture_of(config) if self.can_capture(conversation) else None

    def ops(self, config: PolicyConfig, conversation: Conversation) -> list[dict[str, Any]]:
        """The operations of a plan that start, continue or end the capture."""
        capture = self.capture(config, conversation)
        if capture is None:
            return [NO_CAPTURE] if conversation.budgeted.capture is not None else []
        possible = self._monitor.server.capturable
        return [capture.op(captured_layers(possible, config.attention_layers))]

    async def read(self, rendered: RenderedTurn, turn: Turn) -> Turn:
        """The turn with the attention captured in its slot since the previous reading.

        Returns `turn` itself when nothing was captured, or another capture than the policy uses.
        Raises PlanRefused, and other EvokeErrors when the call fails.
        """
        conversation = rendered.conversation
        capture = self.capture(turn.config, conversation)
        if (
            capture is None
            or capture != conversation.budgeted.capture
            or not turn.view.in_cache.any()
        ):
            return turn
        if not capture.read:
            return turn
        memory, session = conversation.session.attention, conversation.session
        body = memory.request(turn.view, capture) | {"tenant": conversation.tenant}
        answer = await rendered.calls.blocks.attention(turn.slot.id, body, "bounds")
        view = memory.updated(turn.view, answer, session.turns, turn.config.sink_tokens)
        return replace(turn, view=view)
