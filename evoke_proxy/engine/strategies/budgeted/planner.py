"""From a chat request to the bytes that go to llama-server: session, slot, plan, marker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import orjson

from evoke_proxy.adapters.llama.block_api import BlockApi, PlanCall, RenderCall, copies_in, slot_in
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Block
from evoke_proxy.core.model.plan import DecodeBudget, Plan
from evoke_proxy.core.policy.registry import policy_of, quotes_evicted
from evoke_proxy.core.policy.text_recovery import QuotedRequest, quote_evicted
from evoke_proxy.core.policy.truncate import prompt_limit, truncate_messages
from evoke_proxy.core.policy.turn import Turn, effective_config
from evoke_proxy.core.prompt.rendered import Rendered, SlotView, common_prefix
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.engine.embedding.block_vectors import BlockVectors, stacked
from evoke_proxy.engine.parsing.large_bodies import is_large, run_off_loop
from evoke_proxy.engine.server.conversations import Arrival, Conversation, Conversations
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.server.session_worker import SessionWorker, is_long
from evoke_proxy.engine.strategies.budgeted.attention_reader import AttentionReader
from evoke_proxy.engine.strategies.budgeted.probe import Prober
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.engine.strategies.slot_assignment import SlotAssignment
from evoke_proxy.engine.turns.forwarding import Forwarding
from evoke_proxy.errors import PlanRefused, PromptTooLong

_log = logging.getLogger(__name__)
# llama-server notices that a client is gone within a second, or a batch.
_OTHERS_S = 10.0
T = TypeVar("T")


class Planner:
    """Prepares one request at a time on its slot; what it changes in a Forwarding says how far."""

    def __init__(
        self,
        upstream: LlamaClient,
        metrics: Metrics,
        seating: SlotAssignment,
        conversations: Conversations,
        vectors: BlockVectors,
        records: SessionPersistence,
        watch: ServerMonitor,
    ) -> None:
        self._blocks = BlockApi(upstream)
        self._metrics = metrics
        self._seating = seating
        self._conversations = conversations
        self._vectors = vectors
        self._records = records
        self._watch = watch
        self._computing = SessionWorker()
        self._attending = AttentionReader(upstream, lambda: watch.server)
        self.probing = Prober(upstream, metrics, self._attending, lambda: watch.server)

    async def prepare(
        self, way: Forwarding, request: ChatRequest, client: Mapping[str, str], tenant: str
    ) -> None:
        """Find the session, wait for its slot, run its plan, put the marker into the body.

        Raises RequestError when the client asks for what no budget can hold, SlotsBusy when no slot
        gets free, PlanRefused after the second refusal, other EvokeErrors for what llama-server
        does. The lease is in `way` as soon as there is one and stays the caller's to release.
        """
        try:
            await self._prepare(way, request, client, tenant)
        except PromptTooLong:
            self._bypass_too_long(way)
            if way.lease is None:
                await self._seating.guest(way, request, client, tenant)

    async def _prepare(
        self, way: Forwarding, request: ChatRequest, client: Mapping[str, str], tenant: str
    ) -> None:
        """As `prepare`; raises PromptTooLong when a rendering has more tokens than a context."""
        began = asyncio.get_running_loop().time()
        rendering = self._render(request.dialect, way.body, client, way.known)
        rendered = await self._vectors.beside(rendering, way, request, tenant)
        way.stage = "session"
        known = self._conversations.of_request(request, rendered, way.hint, tenant)
        way.begin(known, Arrival(rendered, way.hint, way.kept))
        lease = await self._seating.acquire(
            way, known.id, tenant, known.passing, self._seating.wanted(way)
        )
        with lease.vacating():
            rendered = await self._brought_back(way, request, rendered, client)
            request, changed = await self._truncated(way, request, rendered)
            if changed or lease.has_changed(began):
                way.stage = "render"
                rendered = await self._render(request.dialect, way.body, client, rendered)
            if slot_in(rendered, lease.slot).busy:
                rendered = await self._render_when_idle(way, request, rendered, client)
            if lease.left is not None:
                await self._seating.make_room(known, slot_in(rendered, lease.left), client)
            victim = self._conversations.get(lease.victim)
            await self._seating.make_room(victim, slot_in(rendered, lease.slot), client)
        if self._too_long(rendered, 0):
            self._bypass_too_long(way)
            return
        await self._plan(way, request, rendered, client)
        self._metrics.plan_seconds.observe(
            asyncio.get_running_loop().time() - began - way.waits["queue"]
        )

    def _bypass_too_long(self, way: Forwarding) -> None:
        """Go on without a plan: llama-server refuses the prompt in the words that agents look for.

        Nothing is moved for it.
        """
        way.decision, way.arrival = "bypass:too_long", None
        self._metrics.bypass.labels(reason="too_long").inc()

    async def _render(
        self,
        dialect: str,
        body: bytes,
        client: Mapping[str, str],
        known: Rendered | None = None,
    ) -> Rendered:
        """The tokens of a request, from the instance of the server that is known then.

        Raises PromptTooLong when there are more than its context holds.
        """
        n_ctx = self._watch.server.n_ctx
        try:
            rendered = await self._blocks.render(RenderCall(dialect, body, known, n_ctx), client)
        except PromptTooLong:
            self._watch.doubt()  # the server may have started again, with another context
            await self._watch.look(client)
            if self._watch.server.n_ctx == n_ctx:
                raise
            n_ctx = self._watch.server.n_ctx
            rendered = await self._blocks.render(RenderCall(dialect, body, known, n_ctx), client)
        await self._watch.confirm(rendered.instance, client)
        return rendered

    async def _render_when_idle(
        self, way: Forwarding, request: ChatRequest, rendered: Rendered, client: Mapping[str, str]
    ) -> Rendered:
        """The rendering once llama-server has ended what is no request of ours in our slot.

        That is what a proxy that was killed has left, or a client that asks llama-server itself. No
        plan holds until it has ended. Nobody is waited for longer than `_OTHERS_S`.
        """
        assert way.lease is not None and way.conversation is not None
        way.stage = "slot"
        loop = asyncio.get_running_loop()
        until = loop.time() + _OTHERS_S
        slot, tenant = way.lease.slot, way.conversation.tenant
        over = self._seating.until_idle(slot, tenant, client, lambda: loop.time() > until)
        await way.keep_alive(over)
        way.stage = "render"
        return await self._render(request.dialect, way.body, client, rendered)

    async def _brought_back(
        self, way: Forwarding, request: ChatRequest, rendered: Rendered, client: Mapping[str, str]
    ) -> Rendered:
        """The rendering, on a slot that has what a restart, or another session, took from it, as
        far as copies alone do not bring that back."""
        assert way.lease is not None and way.conversation is not None
        known = way.conversation
        if known.unsure:
            await self._records.ground(known, way.lease.slot, client)
        view = slot_in(rendered, way.lease.slot)
        if not await self._records.restored(known, rendered.tokens, view, client):
            return rendered
        way.stage = "render"
        rendered = await self._render(request.dialect, way.body, client, rendered)
        known.epoch = slot_in(rendered, way.lease.slot).epoch
        return rendered

    async def hold(self, way: Forwarding, request: ChatRequest, client: Mapping[str, str]) -> None:
        """The least of plans, where none could be made: the engine holds the budget by itself.

        Nothing is recovered, the oldest rows go first. Does nothing without a slot; raises what
        fails, and then has changed nothing of `way`.
        """
        known = way.conversation
        if way.lease is None or known is None:
            return
        rendered = await self._render(request.dialect, way.body, client)
        view = slot_in(rendered, way.lease.slot)
        if known.epoch != view.epoch:
            view = await self._without_foreign_holes(view, known, client)
        config = effective_config(known.session.config, request)
        stream = _unplanned(config)
        epoch = await self._blocks.run_plan(
            PlanCall(Plan(stream=stream), view, known.owner), client
        )
        await way.put(_marker(view.id, epoch), request.keys)
        way.marked, way.held = True, stream.budget or None
        known.epoch, known.budget, known.policy = epoch, config.budget, config.name

    async def _truncated(
        self, way: Forwarding, request: ChatRequest, rendered: Rendered
    ) -> tuple[ChatRequest, bool]:
        """The request without its oldest messages, where that is the policy."""
        assert way.conversation is not None
        config = effective_config(way.conversation.session.config, request)
        if not policy_of(config).truncates or config.budget is None:
            return request, False
        reserve = config.reserve_tokens if request.max_tokens is None else request.max_tokens
        limit = prompt_limit(config.budget, reserve)
        truncate = partial(
            truncate_messages, way.body, request.dialect, request.messages, rendered, limit
        )
        body, messages = await run_off_loop(way.body, truncate)
        if body == way.body:
            return request, False
        way.body = body
        return replace(request, messages=messages), True

    async def _plan(
        self, way: Forwarding, request: ChatRequest, rendered: Rendered, client: Mapping[str, str]
    ) -> None:
        """Run a plan; make it once more after a refusal, and once more without the capture of
        attention after that was refused."""
        assert way.conversation is not None
        n_refused = 0
        while True:
            try:
                await self._attempt(way, request, rendered, client)
                return
            except PlanRefused as refused:
                await self._learn(way, refused, client)
                n_refused += not self._attending.note_refusal(way.conversation, refused)
                if n_refused > 1:
                    raise
            way.stage = "render"
            rendered = await self._render(request.dialect, way.body, client, rendered)

    async def _attempt(
        self, way: Forwarding, request: ChatRequest, rendered: Rendered, client: Mapping[str, str]
    ) -> None:
        """Decide, run the plan, mark the body; nothing of `way` changes unless all of it works."""
        assert way.lease is not None and way.conversation is not None
        way.stage = "decide"
        view = slot_in(rendered, way.lease.slot)
        session = way.conversation.session
        if way.conversation.epoch != view.epoch:
            view = await self._without_foreign_holes(view, way.conversation, client)
        turn, plan = await self._begun(way, rendered, view, request)
        seen = await self._attending.seen(turn, way.conversation, client)
        if seen is not turn:
            turn, plan = seen, await self._computed(way, rendered, partial(session.plan, seen))
        recalled = None
        if quotes_evicted(turn.config):
            turn, plan, recalled = await self._with_text(way, turn, plan, client)
        else:
            way.stage = "probe"
            turn, plan = await self.probing.looked(way, turn, plan, client)
        way.stage = "plan"
        more = self._attending.ops(turn.config, way.conversation)
        call = PlanCall(plan, turn.slot, way.conversation.owner, turn.rendered.tokens, more)
        epoch = await self._blocks.run_plan(call, client)
        session.applied(turn, plan)
        way.stage = "splice"
        body = way.body if recalled is None else recalled.body
        way.conversation.spoken = self._records.spoken(request.dialect, body)
        await way.put(_marker(view.id, epoch), request.keys, body)
        self._note(way, turn, plan, epoch, () if recalled is None else recalled.blocks)

    async def _with_text(
        self, way: Forwarding, turn: Turn, plan: Plan, client: Mapping[str, str]
    ) -> tuple[Turn, Plan, QuotedRequest | None]:
        """The turn with the evicted text it needs in its last message, if that fits the budget and
        leaves the answer its place in the context."""
        assert way.conversation is not None
        request = turn.request
        recalled = await self._computing.run(
            way.conversation, is_large(way.body), partial(quote_evicted, turn, turn.query, way.body)
        )
        if recalled is None:
            return turn, plan, None
        way.stage = "render"
        try:
            rendered = await self._render(request.dialect, recalled.body, client)
        except PromptTooLong:
            return turn, plan, None
        way.stage = "decide"
        view = slot_in(rendered, turn.slot.id)
        longer, longer_plan = await self._begun(way, rendered, view, recalled.request)
        too_long = self._too_long(rendered, request.max_tokens or turn.config.reserve_tokens)
        if too_long or (longer_plan.infeasible and not plan.infeasible):
            turn, _ = await self._begun(way, turn.rendered, turn.slot, request)
            return turn, plan, None
        return longer, longer_plan, recalled

    async def _begun(
        self, way: Forwarding, rendered: Rendered, view: SlotView, request: ChatRequest
    ) -> tuple[Turn, Plan]:
        """The turn, and the plan for it: what takes the proxy most of its own time."""
        assert way.conversation is not None
        session, vectors = way.conversation.session, self._vectors.arrived(way.conversation)

        def work() -> tuple[Turn, Plan]:
            session.add_vectors(stacked(vectors))
            turn = session.begin(rendered, view, request, way.vectors)
            return turn, session.plan(turn)

        return await self._computed(way, rendered, work, len(vectors))

    async def _computed(
        self, way: Forwarding, rendered: Rendered, work: Callable[[], T], n_vectors: int = 0
    ) -> T:
        """What `work` computes of the session, in a thread when that takes long."""
        assert way.conversation is not None
        n_shared = common_prefix(way.conversation.session.tokens, rendered.tokens)
        long = is_long(len(rendered.tokens), n_shared, n_vectors)
        return await self._computing.run(way.conversation, long, work)

    def _too_long(self, rendered: Rendered, answer: int) -> bool:
        """Whether a prompt and an answer of so many tokens exceed the context of a slot."""
        n_ctx = self._watch.server.n_ctx
        return n_ctx is not None and len(rendered.tokens) + max(answer, 1) > n_ctx

    async def _without_foreign_holes(
        self, view: SlotView, known: Conversation, client: Mapping[str, str]
    ) -> SlotView:
        """A slot that holds somebody else's rows, cut off where the first of them is missing.

        What was evicted from a shared beginning is missing for us too, and we have no copy of it;
        what was decoded behind it did not see it. What is there before it stays, the rest is to be
        decoded again.
        """
        edge = view.adoptable_end
        if edge is None:
            return view
        epoch = await self._blocks.run_plan(PlanCall(Plan(reuse=edge), view, known.owner), client)
        return replace(view, epoch=epoch, n_common=edge)

    def _note(
        self, way: Forwarding, turn: Turn, plan: Plan, epoch: int, quoted: Sequence[Block]
    ) -> None:
        assert way.conversation is not None
        way.turn, way.plan, way.marked = turn, plan, True
        way.decision = turn.config.name + ("" if plan.moves_nothing else ":moved")
        way.conversation.epoch = epoch
        way.conversation.budget, way.conversation.policy = turn.config.budget, turn.config.name
        way.conversation.capture = self._attending.wanted(turn.config, way.conversation)
        way.announce(turn, plan, quoted)
        self._metrics.evicted.inc(len(plan.evicts))
        self._metrics.recovered.inc(len(plan.loads) + len(plan.adopt.labels if plan.adopt else ()))
        self._metrics.as_text.inc(len(quoted))
        if turn.divergence is not None:
            _log.info("session %s left its history at %d", way.conversation.id, turn.divergence)

    async def _learn(
        self, way: Forwarding, refused: PlanRefused, client: Mapping[str, str]
    ) -> None:
        """Count a refusal, and find out which of the session's copies are gone."""
        assert way.lease is not None and way.conversation is not None
        self._metrics.plan_failures.labels(reason=refused.type).inc()
        _log.warning("session %s: plan refused: %s", way.conversation.id, refused)
        slot = await self._blocks.slot(way.lease.slot, way.conversation.tenant, client)
        gone = way.conversation.labels - copies_in(slot).keys()
        if refused.name is not None:
            gone |= {refused.name}
        way.conversation.session.failed(gone)


def _unplanned(config: PolicyConfig) -> DecodeBudget:
    """How the engine holds a budget that nobody has planned for."""
    if config.budget is None or policy_of(config).choose is None:
        return DecodeBudget(0)
    return DecodeBudget(
        config.budget, config.sink_tokens, config.recent_tokens, config.block_tokens
    )


def _marker(slot: int, epoch: int) -> dict[str, bytes]:
    return {
        "id_slot": orjson.dumps(slot),
        "cache_prompt": b"true",
        "evoke": orjson.dumps({"epoch": epoch}),
    }
