"""Reads the model's attention: captured while a turn is decoded, or by a probe before the turn.

A probe decodes the end of the prompt to find which evicted blocks the model attends to. It is
marked as such in its request to llama-server. The accounting of the turn includes the probe, and
the prompt is then decoded again from the same position. core/policy/probe.py evaluates what the
probe returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evoke_proxy.adapters.llama.block_api import LATEST, PlanCall
from evoke_proxy.adapters.llama.client import CallOptions
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import FloatArray, Positions
from evoke_proxy.core.model.counts import token_count
from evoke_proxy.core.policy.attention import NO_CAPTURE, Capture, Queries, captured_layers
from evoke_proxy.core.policy.probe import (
    MAX_COMPARED_BLOCKS,
    DecodeSpeed,
    ProbeResult,
    blocks_with_rows,
    model_relevance,
    most_likely,
    reason_to_skip,
    spans_of,
)
from evoke_proxy.core.policy.registry import capture_of
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.server.strategy import ServerResources
from evoke_proxy.engine.server.turn import TurnScope
from evoke_proxy.engine.strategies.budgeted.turn import BudgetedTurn, Decision, RenderedTurn
from evoke_proxy.errors import PlanRefused

PROBE = {"op": "probe"}
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


class Prober:
    """Probes turns where that pays; knows how fast its server has been."""

    def __init__(self, server: ServerResources, attention: AttentionReader) -> None:
        self._server = server
        self._attention = attention
        self.pace = DecodeSpeed()

    async def probe(self, turn: RenderedTurn, scope: TurnScope, decision: Decision) -> Decision:
        """The turn with what the model looks for, and a plan by that.

        Returns `decision` itself where a probe does not pay, or was begun before: once is enough,
        also when the plan of the turn is made again. Else a plan of its own runs first, and
        `scope.turn` gets the result. Raises PlanRefused, and other EvokeErrors for what
        llama-server does.
        """
        started, conversation, metrics = decision.turn, turn.conversation, self._server.metrics
        is_tried = BudgetedTurn.of(scope.turn).is_probe_tried
        reason = "off" if is_tried else self._declined(conversation, started)
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        session, roomy = conversation.session, _with_room(started)
        first = decision.plan if reason else session.plan(roomy)
        if not reason and (first.infeasible or first.over_capacity):
            reason = "no_room"
        if reason and reason != "off":
            metrics.probes.labels(result=reason).inc()
        if reason:
            return decision
        scope.turn = BudgetedTurn.of(scope.turn, is_probe_tried=True)
        more = [*self._attention.ops(started.config, conversation), PROBE]
        call = PlanCall(first, started.slot, conversation.owner, started.rendered.tokens, more)
        epoch = await turn.calls.blocks.run_plan(call)
        session.applied(roomy, first)
        metrics.count_moves(first)
        scope.turn = BudgetedTurn.of(scope.turn, is_planned=True)
        cursor = started.view.decode_from
        decoded = await self._decode(turn, started, epoch)
        # Without a tenant no copies are listed: only what is resident matters.
        answer = await turn.calls.blocks.slot(started.slot.id, "", LATEST)
        view = replace(SlotView.parse(answer), n_common=cursor)
        n_cells = self._server.monitor.server.n_slot_cells
        later = session.begin(started.rendered, view, started.request, started.query, n_cells)
        relevance = await self._relevance(turn, later)
        later = replace(later, view=replace(later.view, model_relevance=relevance))
        seconds = loop.time() - started_at
        scope.turn = BudgetedTurn.of(scope.turn, probe=ProbeResult(first, decoded, seconds))
        metrics.probes.labels(result="made").inc()
        metrics.probe_tokens.inc(decoded)
        metrics.probe_seconds.observe(seconds)
        return Decision(later, session.plan(later))

    def _declined(self, conversation: Conversation, turn: Turn) -> str:
        view = turn.view
        if not self._server.monitor.server.can_probe or turn.rendered.media:
            return "off"  # a probe sends the prompt as tokens, and images have none
        if not self._attention.can_capture(conversation):
            return "off"
        self.pace.note(conversation.budgeted_history.timings)
        tail = view.n_tokens - view.decode_from
        seconds = self.pace.seconds(tail, turn.config.probe_tokens)
        reason = reason_to_skip(view, turn.config, seconds, 0.0)
        if reason or turn.config.recall != "fused":
            return reason
        sure = view.index.confidence(turn.query, view.blocks, view.first_new_block)
        return reason_to_skip(view, turn.config, seconds, sure)

    async def _decode(self, turn: RenderedTurn, started: Turn, epoch: int) -> int:
        """Run the probe; how many tokens it decoded."""
        body = {
            "prompt": started.rendered.tokens,
            "n_predict": started.config.probe_tokens,
            "temperature": 0,
            "cache_prompt": True,
            "id_slot": started.slot.id,
            "evoke": {"epoch": epoch},
            "response_fields": ["timings"],
        }
        options = CallOptions("probe", is_long=True)
        answer = await turn.calls.client.call("POST", "/completion", body, options)
        timings: Mapping[str, Any] = answer.get("timings") or {}
        self.pace.note(timings)
        accounting = TokenAccounting.parse(timings)
        if accounting is not None:
            turn.conversation.session.add_copies(accounting.new_copies)
            self._server.metrics.count_evictions("decode", len(accounting.auto_evicted))
        return sum(token_count(timings.get(name)) for name in ("prompt_n", "predicted_n"))

    async def _relevance(self, turn: RenderedTurn, later: Turn) -> FloatArray | None:
        """What the queries of the probe say of all blocks that have rows anywhere."""
        view, at = later.view, blocks_with_rows(later.view)
        tenant = turn.conversation.tenant
        if len(at) > MAX_COMPARED_BLOCKS:
            at = await self._likeliest(turn, later)
        question = {"ranges": [], "products": spans_of(view, at), "tenant": tenant}
        answer = await turn.calls.blocks.attention(later.slot.id, question, "products")
        return model_relevance(answer.get("key_products"), at, len(view.blocks), view.n_tokens)

    async def _likeliest(self, turn: RenderedTurn, later: Turn) -> Positions:
        view, conversation = later.view, turn.conversation
        bounds = conversation.session.attention.bounds
        bounds.retain(view.blocks)
        missing = [i for i in bounds.missing(view.blocks) if view.blocks.ends[i] <= view.n_past]
        spans = [[view.blocks[i].span.start, view.blocks[i].span.end] for i in missing]
        tenant = conversation.tenant
        question = {"ranges": [], "with_queries": True, "bounds": spans, "tenant": tenant}
        answer = await turn.calls.blocks.attention(later.slot.id, question, "bounds")
        bounds.add(answer.get("key_bounds"), [view.blocks[i].label for i in missing])
        queries = Queries.parse(answer.get("query_rows"), len(answer.get("layers", ())))
        return most_likely(view, bounds, queries)


def _with_room(turn: Turn) -> Turn:
    """The turn with room for the words of a probe."""
    reserve = turn.view.max_tokens
    n_answer = turn.config.reserve_tokens if reserve is None else reserve
    view = replace(turn.view, max_tokens=max(n_answer, turn.config.probe_tokens))
    return replace(turn, view=view)
