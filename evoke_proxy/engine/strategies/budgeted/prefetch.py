"""Brings back the blocks that the draft of a message needs, before the message is sent.

The draft is rendered and ranked like a request, on a copy of the session that is thrown away. The
blocks are then copied in small steps under a background lease of the slot, which a request preempts
between two steps. Nothing is decoded, and the identity and the turns of the conversation stay as
they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from evoke_proxy.adapters.llama.block_api import PlanCall, RenderCall
from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.prefetch import loading_steps
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.prompt.rendered import Rendered, SlotView
from evoke_proxy.engine.embedding.block_vectors import BlockVectors
from evoke_proxy.engine.gateway import PrefetchResult, RequestTrace
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.slot_queue import BackgroundLease, finished
from evoke_proxy.engine.server.strategy import ServerResources
from evoke_proxy.engine.strategies.budgeted.planner import Planner
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.engine.strategies.budgeted.turn import Decision, RenderedTurn, ThreadTime, divided
from evoke_proxy.errors import PlanRefused, PromptTooLong, RequestError, UpstreamRejected

_log = logging.getLogger(__name__)
# Calls that run at the same time: at one server, and of one tenant.
_MAX_RUNNING, _MAX_OF_TENANT = 8, 2
# Seconds between two calls for one conversation.
_MIN_INTERVAL_S = 0.25
# A client whose drafts take longer to plan than this share of the time, after _SAVED_S seconds of
# which it may use this share at once, is told that its calls come too soon.
_SHARE, _SAVED_S = 0.5, 1.0
# Seconds that a call waits for the copying of blocks after a reply, and between two checks of it.
_COPYING_S, _POLL_S = 2.0, 0.02
# Seconds that rendering and ranking may take, and after which no further blocks are copied.
_TIME_LIMIT_S = 10.0


class TimeShares:
    """Limits the processor time that the drafts of each tenant take to a share of the time."""

    def __init__(self) -> None:
        # By tenant: when it has had the time that its share is.
        self._paid_at: dict[str, float] = {}

    def __len__(self) -> int:
        """How many tenants have used time lately."""
        return len(self._paid_at)

    def has_time(self, tenant: str, now: float) -> bool:
        """Whether another draft of a tenant may be planned."""
        return self._paid_at.get(tenant, now) <= now

    def take(self, tenant: str, seconds: float, now: float) -> None:
        """Record that a draft of a tenant has taken so many seconds."""
        saved_since = now - _SAVED_S
        paid_at = max(self._paid_at.get(tenant, saved_since), saved_since)
        self._paid_at = {t: at for t, at in self._paid_at.items() if at > saved_since}
        self._paid_at[tenant] = paid_at + seconds / _SHARE


class Prefetcher:
    """Prefetches blocks for drafts, at one llama-server."""

    def __init__(
        self,
        server: ServerResources,
        planner: Planner,
        records: SessionPersistence,
        vectors: BlockVectors,
    ) -> None:
        self._server = server
        self._planner = planner
        self._records = records
        self._vectors = vectors
        # Running calls by tenant.
        self._running: Counter[str] = Counter()
        self._shares = TimeShares()
        # When the latest call for a conversation was accepted, event loop time.
        self._latest: WeakKeyDictionary[Conversation, float] = WeakKeyDictionary()

    async def prefetch(self, draft: ParsedChat, calls: ServerCalls) -> PrefetchResult:
        """Bring back the blocks that a draft needs; see `CacheStrategy.prefetch`."""
        if draft.chat.bypass(self._server.monitor.server.can_hold_media):
            return PrefetchResult(reason="bypass")
        running = self._running
        if running.total() >= _MAX_RUNNING or running[draft.tenant] >= _MAX_OF_TENANT:
            return PrefetchResult(reason="too_many")
        if not self._shares.has_time(draft.tenant, _now()):
            return PrefetchResult(reason="too_soon")
        with self._counted(draft.tenant):
            until = _now() + _TIME_LIMIT_S
            try:
                async with asyncio.timeout_at(until):
                    prepared = await self._prepared(draft, calls)
            except TimeoutError:
                return PrefetchResult(reason="time_limit")
            except PromptTooLong:
                return PrefetchResult(reason="too_long")
            if isinstance(prepared, PrefetchResult):
                return prepared
            return await self._load(*prepared, until)

    @contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    async def _prepared(
        self, draft: ParsedChat, calls: ServerCalls
    ) -> tuple[RenderedTurn, Turn, Plan] | PrefetchResult:
        """The draft with its plan; a result when nothing can be done for it.

        Raises PromptTooLong, and RequestError when llama-server cannot render the draft.
        """
        render = partial(self._render, draft, calls)
        rendered, found = await self._vectors.prepare_beside(render, draft, RequestTrace(_now()))
        conversation = self._server.conversations.find(rendered, draft.hint, draft.tenant)
        if conversation is None or not conversation.is_committed:
            return PrefetchResult(reason="unknown_conversation")
        if _now() - self._latest.get(conversation, -_MIN_INTERVAL_S) < _MIN_INTERVAL_S:
            return PrefetchResult(reason="too_soon")
        self._latest[conversation] = _now()
        slot = self._server.slots.pool.slot_of(conversation.id)
        if slot is None:
            return PrefetchResult(reason="not_in_slot")
        turn = RenderedTurn(
            request=draft,
            calls=calls,
            chat=draft.chat,
            body=draft.body,
            conversation=conversation,
            rendered=rendered,
            query=found.query,
            texts=found.texts,
            slot=slot,
        )
        obstacle = _obstacle(conversation, turn.view)
        if obstacle:
            return PrefetchResult(reason=obstacle)
        decision = await self._planned(turn)
        started, plan = decision.turn, decision.plan
        if plan.adopt is not None:
            return PrefetchResult(reason="not_in_slot")
        return turn, started, plan

    async def _planned(self, turn: RenderedTurn) -> Decision:
        """Plan a draft; its tenant has used the time even when the client goes meanwhile."""
        took = ThreadTime()
        try:
            with turn.conversation.using():
                return await self._planner.plan_draft(turn, took)
        finally:
            self._shares.take(turn.request.tenant, took.seconds, _now())

    async def _render(self, draft: ParsedChat, calls: ServerCalls) -> Rendered:
        """Render a draft; llama-server does not keep the rendering."""
        n_ctx, incoming = self._server.monitor.server.n_ctx, draft.incoming
        try:
            rendered = await calls.blocks.render(
                RenderCall(incoming.dialect, draft.body, draft.previous, n_ctx)
            )
        except UpstreamRejected as error:
            if error.status != 400:
                raise
            raise RequestError("llama-server cannot render this draft", "draft_invalid") from error
        await self._server.monitor.confirm(rendered.instance, calls.client)
        return await divided(rendered, draft.chat)

    async def _load(
        self, turn: RenderedTurn, started: Turn, plan: Plan, until: float
    ) -> PrefetchResult:
        """Copy the blocks of a plan into the slot, until event loop time `until` at most."""
        conversation, view = turn.conversation, started.slot
        loop = asyncio.get_running_loop()
        result = PrefetchResult(
            needed_blocks=len(plan.loads),
            needed_tokens=sum(len(load.span) for load in plan.loads),
            resident=sum(map(len, view.resident)),
            budget=started.config.budget,
        )
        if not plan.loads:
            return result
        lease = await self._lease_after_copying(turn)
        if lease is None:
            return replace(result, reason="slot_busy")
        async with AsyncExitStack() as stack:
            stack.enter_context(conversation.using())
            await stack.enter_async_context(lease)
            if conversation.budgeted.epoch != view.epoch:  # a turn has ended meanwhile
                return replace(result, reason="slot_busy")
            n_cells = result.resident + view.n_free
            budgets = (started.config.budget, conversation.budgeted_history.budget)
            limit = min([n_cells, *(budget for budget in budgets if budget is not None)])
            for step in loading_steps(plan, view.resident, limit):
                if lease.preempted or _now() > until:
                    reason = "interrupted" if lease.preempted else "time_limit"
                    return replace(result, reason=reason)
                try:
                    # Runs to its end when the client disconnects: the step must be recorded.
                    work = loop.create_task(self._run_step(turn, view, step))
                    view = await finished(work)
                except PlanRefused as refused:
                    _log.debug("session %s prefetches nothing: %s", conversation.id, refused)
                    return replace(result, reason="refused")
                finally:
                    lease.slots_changed()
                result = replace(
                    result,
                    recovered_blocks=result.recovered_blocks + len(step.loads),
                    recovered_tokens=result.recovered_tokens
                    + sum(len(load.span) for load in step.loads),
                    resident=conversation.budgeted.n_resident,
                )
        is_whole = result.recovered_blocks == result.needed_blocks
        return result if is_whole else replace(result, reason="no_room")

    async def _lease_after_copying(self, turn: RenderedTurn) -> BackgroundLease | None:
        """Lease the slot, after the copying that follows a reply; None when it is not free soon."""
        until = _now() + _COPYING_S
        while True:
            lease = self._lease(turn)
            if lease is not None or turn.conversation.in_use or _now() > until:
                return lease
            await asyncio.sleep(_POLL_S)

    def _lease(self, turn: RenderedTurn) -> BackgroundLease | None:
        """Lease the slot of a conversation; None while anything else has the slot."""
        slots, conversation = self._server.slots, turn.conversation
        if conversation.in_use or slots.pool.slot_of(conversation.id) != turn.slot:
            return None
        return slots.background(turn.slot, conversation.id, alone=False)

    async def _run_step(self, turn: RenderedTurn, view: SlotView, step: Plan) -> SlotView:
        """Run one step and record it; returns the view with the epoch after it."""
        conversation, metrics = turn.conversation, self._server.metrics
        epoch = await turn.calls.blocks.run_plan(PlanCall(step, view, conversation.owner))
        conversation.session.saved(Plan(saves=step.saves))
        self._records.note_copied(conversation, [save.label for save in step.saves])
        n_loaded = sum(len(load.span) for load in step.loads)
        n_evicted = sum(len(evict.span) for evict in step.evicts)
        conversation.budgeted.rows_prefetched(epoch, n_loaded - n_evicted)
        metrics.count_evictions("plan", len(step.evicts))
        metrics.count_recoveries("prefetch", len(step.loads))
        metrics.prefetched_tokens.inc(n_loaded)
        return replace(view, epoch=epoch)


def _obstacle(conversation: Conversation, view: SlotView) -> str:
    """Why the slot of a conversation cannot be used; "" when it can."""
    state = conversation.budgeted
    if conversation.in_use or view.busy:
        return "slot_busy"
    if state.is_unconfirmed or state.must_find_copies or state.epoch != view.epoch:
        return "not_in_slot"
    return ""


def _now() -> float:
    return asyncio.get_running_loop().time()
