"""Asking the model what it looks for: a turn's prompt is decoded once to see, then for its answer.

The request of a probe is marked as such in llama-server: the turn goes on behind it, in its books
too, and the prompt is decoded again from where it was. See core/policy/probe.py for what is made
of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from evoke_proxy.adapters.llama.block_api import LATEST, BlockApi, PlanCall
from evoke_proxy.adapters.llama.client import CallOptions, LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.model.block_table import FloatArray, Positions
from evoke_proxy.core.model.counts import token_count
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.attention import Queries
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
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.strategies.budgeted.attention_reader import AttentionReader
from evoke_proxy.engine.turns.forwarding import Forwarding

PROBE = {"op": "probe"}
Client = Mapping[str, str]


class Prober:
    """Probes turns where that pays; knows how fast its server has been."""

    def __init__(
        self,
        upstream: LlamaClient,
        metrics: Metrics,
        attending: AttentionReader,
        server: Callable[[], ServerInfo],
    ) -> None:
        self._upstream = upstream
        self._blocks = BlockApi(upstream)
        self._metrics = metrics
        self._attending = attending
        self._server = server
        self.pace = DecodeSpeed()

    async def looked(
        self, way: Forwarding, turn: Turn, plan: Plan, client: Client
    ) -> tuple[Turn, Plan]:
        """The turn with what the model looks for, and a plan by that; as they were where a probe
        does not pay, or was tried before.

        Runs a plan of its own first. Raises PlanRefused, and other EvokeErrors for what
        llama-server does.
        """
        known = way.conversation
        reason = self._declined(way, turn)
        if reason != "off":
            self._metrics.probes.labels(result=reason or "made").inc()
        if reason or known is None:
            return turn, plan
        began = asyncio.get_running_loop().time()
        roomy = _with_room(turn)
        first = known.session.plan(roomy)
        if first.infeasible or first.crowded:
            return turn, plan
        way.probe = ProbeResult(first, 0, 0.0)  # tried: not again, should it be refused
        more = [*self._attending.ops(turn.config, known), PROBE]
        call = PlanCall(first, turn.slot, known.owner, turn.rendered.tokens, more)
        epoch = await self._blocks.run_plan(call, client)
        known.session.applied(roomy, first)
        cursor = turn.view.decode_from
        decoded = await way.keep_alive(self._decode(turn, epoch, known, client))
        # Of nobody's copies: it is only asked what is resident.
        now = SlotView.parse(await self._blocks.slot(turn.slot.id, "", client, LATEST))
        later = known.session.begin(
            turn.rendered, replace(now, n_common=cursor), turn.request, way.vectors
        )
        found = await self._sought(later, known, client)
        later = replace(later, view=replace(later.view, model_relevance=found))
        seconds = asyncio.get_running_loop().time() - began
        way.probe = ProbeResult(first, decoded, seconds)
        self._metrics.probe_tokens.inc(decoded)
        self._metrics.probe_seconds.observe(seconds)
        return later, known.session.plan(later)

    def _declined(self, way: Forwarding, turn: Turn) -> str:
        server, view, known = self._server(), turn.view, way.conversation
        if way.probe is not None or not server.probes or known is None:
            return "off"
        if not self._attending.can_capture(known):
            return "off"
        self.pace.note(known.timings)
        tail = view.n_tokens - (view.decode_from)
        seconds = self.pace.seconds(tail, turn.config.probe_tokens)
        reason = reason_to_skip(view, turn.config, seconds, 0.0)
        if reason or turn.config.recall != "fused":
            return reason
        sure = view.index.confidence(turn.query, view.blocks, view.first_new_block)
        return reason_to_skip(view, turn.config, seconds, sure)

    async def _decode(self, turn: Turn, epoch: int, known: Conversation, client: Client) -> int:
        """The probe itself: how many tokens it decoded."""
        body = {
            "prompt": turn.rendered.tokens.tolist(),
            "n_predict": turn.config.probe_tokens,
            "temperature": 0,
            "cache_prompt": True,
            "id_slot": turn.slot.id,
            "evoke": {"epoch": epoch},
            "response_fields": ["timings"],
        }
        options = CallOptions(client, "probe", is_long=True)
        answer = await self._upstream.call("POST", "/completion", body, options)
        timings: Mapping[str, Any] = answer.get("timings") or {}
        self.pace.note(timings)
        books = TokenAccounting.parse(timings)
        if books is not None:
            evicted = [(label, span) for span, label in books.auto_evicted if label is not None]
            known.session.add_copies(evicted)
        return sum(token_count(timings.get(name)) for name in ("prompt_n", "predicted_n"))

    async def _sought(self, turn: Turn, known: Conversation, client: Client) -> FloatArray | None:
        """What the queries of the probe say of all blocks that have rows anywhere."""
        view, at = turn.view, blocks_with_rows(turn.view)
        if len(at) > MAX_COMPARED_BLOCKS:
            at = await self._likeliest(turn, known, client)
        asked = {"ranges": [], "products": spans_of(view, at), "tenant": known.tenant}
        answer = await self._attending.ask(turn.slot.id, asked, "products", client)
        return model_relevance(answer.get("key_products"), at, len(view.blocks), view.n_tokens)

    async def _likeliest(self, turn: Turn, known: Conversation, client: Client) -> Positions:
        view, bounds = turn.view, known.session.attention.bounds
        bounds.retain(view.blocks)
        lacking = [i for i in bounds.missing(view.blocks) if view.blocks.ends[i] <= view.n_past]
        spans = [[view.blocks[i].span.start, view.blocks[i].span.end] for i in lacking]
        asked = {"ranges": [], "with_queries": True, "bounds": spans, "tenant": known.tenant}
        answer = await self._attending.ask(turn.slot.id, asked, "bounds", client)
        bounds.add(answer.get("key_bounds"), [view.blocks[i].label for i in lacking])
        queries = Queries.parse(answer.get("query_rows"), len(answer.get("layers", ())))
        return most_likely(view, bounds, queries)


def _with_room(turn: Turn) -> Turn:
    """The turn with room for the words of a probe."""
    reserve = turn.view.max_tokens
    wanted = turn.config.reserve_tokens if reserve is None else reserve
    view = replace(turn.view, max_tokens=max(wanted, turn.config.probe_tokens))
    return replace(turn, view=view)
