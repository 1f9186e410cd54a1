"""The strategy for patched servers: keeps each conversation within a token budget."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from evoke_proxy.adapters.llama.block_api import LATEST, copies_in, of_session, slot_in
from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.adapters.metrics import TOKEN_KINDS
from evoke_proxy.core.model.counts import token_count
from evoke_proxy.core.policy.turn import effective_config
from evoke_proxy.core.prompt.rendered import Rendered, SlotView
from evoke_proxy.core.reply.reply_edit import with_context_advice
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.core.session.drift import REMEDIES, Drift
from evoke_proxy.engine.embedding.block_vectors import BlockVectors
from evoke_proxy.engine.gateway import ForwardedBody, Outcome, PrefetchResult
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.conversations import Arrival, Conversation
from evoke_proxy.engine.server.slot_queue import SlotLease
from evoke_proxy.engine.server.strategy import CacheStrategy, ServerResources, StrategyProblem
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
from evoke_proxy.engine.strategies.budgeted.audit import ShadowAudit
from evoke_proxy.engine.strategies.budgeted.planner import Planner
from evoke_proxy.engine.strategies.budgeted.prefetch import Prefetcher
from evoke_proxy.engine.strategies.budgeted.reanchoring import Reanchoring
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.engine.strategies.budgeted.shared_prefixes import SharedPrefixes
from evoke_proxy.engine.strategies.budgeted.shared_states import SharedStates
from evoke_proxy.engine.strategies.budgeted.slot_snapshots import SHARED_KINDS
from evoke_proxy.engine.strategies.budgeted.turn import BudgetedTurn, RenderedTurn, RequestLease
from evoke_proxy.engine.strategies.budgeted.write_back import WriteBack
from evoke_proxy.engine.strategies.failures import PreparationFailures
from evoke_proxy.engine.strategies.slot_assignment import SlotAssignment
from evoke_proxy.errors import (
    CapacityError,
    EvokeError,
    PromptTooLong,
    RequestError,
    UpstreamError,
    UpstreamRejected,
    UpstreamTimeout,
    UpstreamUnavailable,
)

_log = logging.getLogger(__name__)
# Seconds that a request waits for a foreign one in its slot: llama-server notices a disconnected
# client within a second, or within one batch.
_FOREIGN_REQUEST_S = 10.0
# After so many changes of the same kind in one conversation, the log names the remedy.
_FREQUENT = 3


class BudgetedStrategy(CacheStrategy):
    """Plans each turn on its slot, and copies its rows while no request uses the server."""

    mode = "budgeted"
    has_rows_by_adapters = True

    def __init__(
        self,
        server: ServerResources,
        slots: SlotAssignment,
        planner: Planner,
        records: SessionPersistence,
        write_back: WriteBack,
        vectors: BlockVectors,
    ) -> None:
        self._server = server
        self._prefixes = SharedPrefixes(server)
        self._states = SharedStates(server, planner, records)
        self._slots = slots
        self._planner = planner
        self._records = records
        self._write_back = write_back
        self._vectors = vectors
        self._prefetcher = Prefetcher(server, planner, records, vectors)
        self._failures = PreparationFailures(server.monitor, server.metrics)
        self._reanchoring = Reanchoring(server, planner)
        self._audit = ShadowAudit(server)

    @property
    def description(self) -> str:
        """See CacheStrategy; "" where the model needs no saved slots, and before one was saved."""
        saving = self._records.saving
        if self.problem is not None:
            return self.problem.described
        return saving.describe() if saving is not None else ""

    @property
    def problem(self) -> StrategyProblem | None:
        """See CacheStrategy: why slots are not saved, where the model needs that."""
        return self._records.saving_problem

    def _check_saving(self) -> None:
        """Check in the background whether slots are saved, if that is due."""
        saving = self._records.saving
        if saving is not None and saving.is_due and not self._server.is_stopping():
            work = saving.run(self._server.calls.stock)
            self._server.background.run(work, "saving a slot to see whether that works")

    async def check(self) -> str:
        """See CacheStrategy; saves a slot if that is due."""
        saving = self._records.saving
        if saving is None:
            return ""
        try:
            await saving.run(self._server.calls.stock)
        except EvokeError as error:
            return f"snapshots: not known yet ({error})"
        return self.description

    async def prefetch(self, draft: ParsedChat, calls: ServerCalls) -> PrefetchResult:
        """See CacheStrategy."""
        return await self._prefetcher.prefetch(draft, calls)

    async def prepare(self, request: ParsedChat, scope: TurnScope) -> PreparedTurn:
        """See CacheStrategy."""
        scope.expect_slot()
        reason = request.chat.bypass(self._server.monitor.server.can_hold_media)
        if reason:
            self._server.metrics.bypass.labels(reason=reason).inc()
            scope.turn = replace(scope.turn, decision=f"bypass:{reason}")
        try:
            if reason:
                return await self._without_conversation(request, scope)
            return await self._planned(request, scope)
        except (RequestError, CapacityError):
            raise
        except Exception as error:
            was_rendered = scope.turn.conversation is not None
            decision = self._failures.decide(scope.trace, error, was_rendered)
            scope.turn = replace(scope.turn, decision=decision)
            if decision.startswith("bypass:"):
                return scope.turn
            return await self._fallback(request, scope, error)

    async def _without_conversation(self, request: ParsedChat, scope: TurnScope) -> PreparedTurn:
        """A turn that belongs to no conversation, in a slot whose rows were saved."""
        with scope.trace.waiting():
            forwarded = await self._slots.acquire_emptied(request, scope)
        return replace(scope.turn, forwarded=forwarded)

    async def _planned(self, request: ParsedChat, scope: TurnScope) -> PreparedTurn:
        """A turn with a plan, or without one when the prompt is too long for a slot.

        llama-server then refuses the prompt with the error that agents expect.
        """
        try:
            turn = await self._turn(request, scope)
        except PromptTooLong:
            scope.turn = self._too_long(scope.turn)
            if scope.turn.slots:
                return scope.turn
            return await self._without_conversation(request, scope)
        return turn

    async def _turn(self, request: ParsedChat, scope: TurnScope) -> PreparedTurn:
        """Find the conversation, wait for its slot, run its plan."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        rendered, prepared = await self._planner.render_first(request, scope)
        scope.trace.stage = "session"
        conversation = await self._conversation_of(request, rendered, scope)
        scope.join(conversation, Arrival(rendered, request.hint, request.cached_body))
        with scope.trace.waiting():  # the queue, copies from disk, a probe: all may take long
            lease = await scope.acquire(
                conversation.id, ephemeral=conversation.ephemeral, slot=self._slots.named(request)
            )
            turn = RenderedTurn(
                request=request,
                calls=scope.turn.calls,
                chat=request.chat,
                body=request.body,
                conversation=conversation,
                rendered=rendered,
                query=prepared.query,
                texts=prepared.texts,
                slot=lease.slot,
            )
            if "lora" in request.chat.keys:
                conversation.budgeted.adapters_used()
            with lease.vacating():
                turn = await self._admitted(turn, scope, lease, began)
            scope.trace.stage = "share"
            await self._prefixes.adopt(turn, scope)
            turn = await self._states.adopt(turn, scope)
            turn = await self._reanchoring.apply(turn, scope)
            if self._planner.exceeds_context(turn.rendered):
                return self._too_long(scope.turn)
            planned = await self._planner.plan(turn, scope)
        waited_s = scope.trace.waits["queue"]
        self._server.metrics.plan_seconds.observe(loop.time() - began - waited_s)
        return self._audit.select(planned)

    async def _conversation_of(
        self, request: ParsedChat, rendered: Rendered, scope: TurnScope
    ) -> Conversation:
        """The conversation that a request continues, or a new one.

        Sessions of an earlier proxy process are found by what llama-server has of them.
        """
        conversations, tenant = self._server.conversations, request.tenant
        conversation = conversations.find(rendered, request.hint, tenant)
        if conversation is None:
            blocks = scope.turn.calls.blocks
            conversation = await self._records.discovery.identify(request, rendered, blocks)
        return conversation or conversations.of_request(
            request.chat, rendered, request.hint, tenant
        )

    async def _admitted(
        self, turn: RenderedTurn, scope: TurnScope, lease: SlotLease, rendered_at: float
    ) -> RenderedTurn:
        """The turn rendered on its slot, after its rows were restored and those of others saved."""
        trace, planner = scope.trace, self._planner
        turn = await self._with_displaced_saved(turn, lease)
        turn = await self._restored(turn, scope)
        shorter = await planner.truncate(turn)
        if shorter is not turn or lease.has_changed(rendered_at):
            turn = shorter
            scope.turn = replace(scope.turn, forwarded=ForwardedBody(turn.body))
            trace.stage = "render"
            turn = await self._planner.rendered_anew(turn)
        if turn.view.busy:
            turn = await self._rendered_when_idle(turn, scope)
        if turn.conversation.budgeted.must_find_copies:
            await self._records.discovery.find_copies(turn)
        if lease.previous is not None:
            previous = slot_in(turn.rendered, lease.previous)
            await self._slots.save_rows(turn.conversation, previous, turn.calls.blocks)
        victim = self._server.conversations.get(lease.victim)
        await self._slots.save_rows(victim, turn.view, turn.calls.blocks)
        return turn

    async def _with_displaced_saved(self, turn: RenderedTurn, lease: SlotLease) -> RenderedTurn:
        """The turn after whole slots were saved that it displaces; rendered anew if they changed.

        These are its slot, with the rows of another conversation, and the slot that its own
        conversation moves from.
        """
        displaced = [(self._server.conversations.get(lease.victim), lease.slot)]
        if lease.previous is not None:
            displaced.append((turn.conversation, lease.previous))
        has_saved = False
        for conversation, slot in displaced:
            if conversation is not None:
                own = RequestLease((slot,))
                has_saved |= await self._records.save_displaced(conversation, turn.calls, own)
        return await self._planner.rendered_anew(turn) if has_saved else turn

    async def _restored(self, turn: RenderedTurn, scope: TurnScope) -> RenderedTurn:
        """The turn, after a snapshot was restored if copies of blocks do not suffice.

        It is rendered anew also after a snapshot was refused, which may have emptied the slot.
        """
        conversation = turn.conversation
        if conversation.budgeted.is_unconfirmed:
            await self._records.reconcile_copies(turn)
        restored = await self._records.restore_slot(turn)
        if restored is None:
            return turn
        scope.trace.stage = "render"
        turn = await self._planner.rendered_anew(turn)
        if restored.is_filled:
            match = restored.match
            is_whole = match.snapshot.kind in SHARED_KINDS
            conversation.budgeted.slot_restored(turn.view.epoch, match.shared, is_whole)
        return turn

    async def _rendered_when_idle(self, turn: RenderedTurn, scope: TurnScope) -> RenderedTurn:
        """The turn once llama-server has ended a foreign request in its slot.

        That is what a proxy that was killed has left, or of a client that asks llama-server
        itself. No plan holds until it has ended; it is waited for `_FOREIGN_REQUEST_S` at most.
        """
        scope.trace.stage = "slot"
        loop = asyncio.get_running_loop()
        until = loop.time() + _FOREIGN_REQUEST_S
        await self._slots.until_idle(scope.turn, lambda: loop.time() > until)
        scope.trace.stage = "render"
        return await self._planner.rendered_anew(turn)

    def _too_long(self, turn: PreparedTurn) -> PreparedTurn:
        self._server.metrics.bypass.labels(reason="too_long").inc()
        return replace(turn, decision="bypass:too_long", arrival=None)

    async def _fallback(
        self, request: ParsedChat, scope: TurnScope, error: Exception
    ) -> PreparedTurn:
        """A turn without a plan; llama-server holds the budget by itself where it can.

        Counts a breach when not even that works.
        """
        turn, conversation = scope.turn, scope.turn.conversation
        if scope.trace.stage == "seat":
            return turn
        # A server that is unreachable or hangs would only delay the request again.
        is_answering = not isinstance(error, UpstreamUnavailable | UpstreamTimeout)
        if is_answering and turn.slots and conversation is not None:
            try:
                with scope.trace.waiting():
                    without_plan = await self._planner.hold_budget(request, scope, conversation)
                return replace(without_plan, decision=f"{without_plan.decision}:held")
            except PromptTooLong:
                return turn  # llama-server refuses it, so it exceeds no budget
            except Exception as failure:
                _log.warning(
                    "llama-server cannot keep the request within the budget either: %s",
                    type(failure).__name__,
                )
        if isinstance(error, UpstreamError) and not error.reached:
            return turn  # the request will not reach it either
        policy = self._server.conversations.policy
        if conversation is not None:
            policy = conversation.session.config
        if effective_config(policy, request.chat).budget is not None:
            self._server.metrics.breaches.inc()
        return turn

    @property
    def edit_error(self) -> Callable[[bytes], bytes]:
        """See CacheStrategy."""
        server = self._server.monitor.server
        is_all = server.has_trained_length or server.exceeds_training
        return partial(with_context_advice, has_trained_length=is_all)

    async def prefill(self, turn: PreparedTurn) -> tuple[int, int] | None:
        """See CacheStrategy."""
        if turn.arrival is None or not turn.slots:
            return None
        state = await turn.calls.blocks.slot(turn.slots[0], turn.request.tenant, LATEST)
        n_prompt = len(turn.arrival.rendered.tokens)
        return min(SlotView.parse(state).n_tokens, n_prompt), n_prompt

    def must_drain(self, turn: PreparedTurn, outcome: Outcome) -> bool:
        """Whether llama-server may still work on the turn, because its reply is incomplete."""
        if not turn.slots:
            return False
        if turn.conversation is None:
            return not outcome.is_finished
        return outcome.accounting is None

    async def drain(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Wait until the slots are idle."""
        await self._slots.until_idle(turn, self._server.is_stopping)

    def complete(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Record in the session how its turn ended."""
        conversation = turn.conversation
        if conversation is None:
            return
        if outcome.accounting is not None:
            self._account(turn, conversation, outcome.accounting)
            conversation.budgeted_history.reply_ended(outcome.timings)
            if self._records.slot_snapshots is not None:
                self._records.slot_snapshots.note_timings(outcome.timings)
            timings = outcome.timings or {}
            drafted, accepted = (
                token_count(timings.get(name)) for name in ("draft_n", "draft_n_accepted")
            )
            is_whole = not outcome.accounting.omitted
            self._server.metrics.count_drafts(drafted, accepted, is_whole)
            return
        has_marker = is_planned = False
        if isinstance(turn, BudgetedTurn):
            has_marker, is_planned = turn.has_marker, turn.is_planned
        if turn.slots and not has_marker:
            conversation.budgeted.slot_unknown()
        if is_planned:
            conversation.session.finish(None)

    def _account(
        self, turn: PreparedTurn, conversation: Conversation, accounting: TokenAccounting
    ) -> None:
        """Record and count the token accounting of a turn."""
        metrics = self._server.metrics
        as_planned = conversation.session.finish(accounting)
        if accounting.marker != "ok" or not as_planned:
            metrics.plan_failures.labels(reason="books_differ").inc()
            _log.warning(
                "session %s: %s. The answer is complete, and the next turn reads the slot again. If"
                " this repeats, have all clients use the proxy instead of llama-server itself, and"
                " run `evoke-proxy doctor` for its cells",
                conversation.id,
                accounting.difference,
            )
        if accounting.marker != "ok":
            conversation.budgeted.slot_unknown()
        if turn.budget is not None and accounting.n_resident_peak > turn.budget:
            metrics.breaches.inc()
        if isinstance(turn, BudgetedTurn) and turn.is_full:
            metrics.count_full_turn(accounting.n_resident_peak)
        if isinstance(turn, BudgetedTurn) and turn.drift is not None:
            self._count_drift(conversation, turn.drift, accounting.decoded)
        conversation.budgeted.tokens_counted(accounting.n_resident)
        if accounting.reused_rendering is not None:
            result = "reused" if accounting.reused_rendering else "rendered"
            metrics.renderings.labels(result=result).inc()
        metrics.redecoded.inc(max(0, conversation.session.redecoded))
        metrics.count_evictions("decode", len(accounting.auto_evicted))
        counted = accounting.with_prefilled(turn.n_prefilled)
        metrics.count_tokens({kind: getattr(counted, kind) for kind in TOKEN_KINDS})

    def _count_drift(self, conversation: Conversation, drift: Drift, n_decoded: int) -> None:
        """Record and count why a prompt did not continue the previous one, and what it cost."""
        metrics = self._server.metrics
        cost = min(drift.n_tokens, n_decoded)
        metrics.drifts.labels(cause=drift.cause).inc()
        metrics.drift_tokens.labels(cause=drift.cause).inc(cost)
        count, total = conversation.budgeted_history.drifted(drift, cost)
        _log.info(
            "session %s does not continue its previous prompt: %s, %d tokens decoded again",
            conversation.id,
            drift.text,
            cost,
        )
        if count == _FREQUENT and drift.cause in REMEDIES:
            _log.warning(
                "session %s: %s for the third time, %d tokens decoded again: %s",
                conversation.id,
                drift.cause,
                total,
                REMEDIES[drift.cause],
            )

    def start_background(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Queue the blocks of the turn for copying and embedding; start what waits if idle."""
        conversation = turn.remembered
        is_done = outcome.accounting is not None
        writes_back = isinstance(turn, BudgetedTurn) and turn.writes_back
        if conversation is not None and writes_back and is_done:
            self._write_back.add(conversation, turn.calls)
        self._write_back.start()
        if conversation is not None:
            self._vectors.submit(conversation)
        self._audit.add(turn, outcome)
        self._audit.start()
        self._check_saving()

    def forget(self, conversation: Conversation, calls: ServerCalls) -> None:
        """See CacheStrategy."""
        self._audit.discard(conversation)
        self._records.forget(conversation.id)
        if conversation.labels:
            work = self._slots.drop_copies(conversation, calls.blocks)
            self._server.background.run(work, "dropping forgotten blocks")

    async def slot_with_rows(self, conversation: Conversation) -> int | None:
        """See CacheStrategy."""
        if conversation.budgeted.epoch is None:
            return None
        return self._server.slots.pool.slot_of(conversation.id)

    async def erase_rows(self, slot: int, conversation: Conversation) -> None:
        """See CacheStrategy."""
        blocks = self._server.calls.blocks
        view = SlotView.parse(await blocks.slot(slot, conversation.tenant, LATEST))
        if view.epoch != conversation.budgeted.epoch:
            return  # the slot has the rows of another session now
        try:
            await self._server.calls.client.call("POST", f"/slots/{slot}?action=erase", {})
        except UpstreamRejected:  # it runs without --slot-save-path
            await blocks.empty(view, conversation.owner)

    async def drop_copies(self, conversation: Conversation) -> None:
        """See CacheStrategy; includes copies that the session no longer lists."""
        await self._audit.end(conversation)
        blocks = self._server.calls.blocks
        # Taking the lock waits for a call that saves rows of the session.
        async with self._server.slots.locked(conversation.id):
            is_own = of_session(conversation.id)
            answer = await blocks.slot(0, conversation.tenant, keep=is_own)
            labels = conversation.labels.union(copies_in(answer))
            if labels:
                await blocks.drop_copies(labels, conversation.tenant)

    async def drop_tenant(self, tenant: str) -> str:
        """See CacheStrategy."""
        await self._server.calls.blocks.run(0, "block-drop", {"all": True, "tenant": tenant})
        return ""

    async def load(self) -> None:
        """Register the recorded sessions."""
        await self._records.load()

    def server_started(self, server: ServerInfo) -> None:
        """See CacheStrategy."""
        self._records.server_started(server)

    def selected(self, server: ServerInfo) -> None:
        """Check whether slots are saved, and name the budget that recorded conversations need."""
        if not server.sleeping:
            self._check_saving()
        self._advise_budget()

    def _advise_budget(self) -> None:
        """Say which budget recorded conversations need, if their own prompts exceed it."""
        sessions = [each.session for each in self._server.conversations]
        short = [
            session.budget_for_system
            for session in sessions
            if session.config.budget is not None
            and session.config.within_turn != "full"
            and session.budget_for_system > session.config.budget
        ]
        if short:
            _log.warning(
                "system prompt and tools of %d recorded conversations exceed their budget, so a"
                " part is hidden: set policy.budget to %d tokens, or policy.within_turn to full",
                len(short),
                max(short),
            )
