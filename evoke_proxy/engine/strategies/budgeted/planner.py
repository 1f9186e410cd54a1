"""Plans the contents of the slot of a request, and has llama-server run the plan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import orjson

from evoke_proxy.adapters.llama.block_api import PlanCall, RenderCall, copies_in, encode
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.past_quotes import quote_past, quotes_past
from evoke_proxy.core.policy.probe import config_of_unprobed
from evoke_proxy.core.policy.quotation import QuotedRequest
from evoke_proxy.core.policy.registry import budget_without_plan, policy_of, saves_evicted
from evoke_proxy.core.policy.truncate import prompt_limit, truncate_messages
from evoke_proxy.core.policy.turn import Turn, effective_config
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.core.prompt.rendered import Rendered, SlotView, common_prefix
from evoke_proxy.core.prompt.transcript import messages_of
from evoke_proxy.core.retrieval.query import query_of
from evoke_proxy.core.session.accounting import forecast, usage_outcome
from evoke_proxy.core.session.drift import drift_from
from evoke_proxy.core.session.session import GENERATED, AppliedPlan, Session
from evoke_proxy.engine.embedding.block_vectors import BlockVectors, PreparedQuery, stacked
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.meanwhile import Meanwhile
from evoke_proxy.engine.parsing.body_parsing import is_large, run_off_loop
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.conversation_states import SentTurn
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.session_worker import has_many_terms
from evoke_proxy.engine.server.strategy import ServerResources
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
from evoke_proxy.engine.strategies.budgeted.attention import AttentionReader, Prober
from evoke_proxy.engine.strategies.budgeted.early_plan import EarlyPlan
from evoke_proxy.engine.strategies.budgeted.lost_blocks import LostBlocks
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.engine.strategies.budgeted.turn import (
    BudgetedTurn,
    Decision,
    RenderedTurn,
    ThreadTime,
    divided,
)
from evoke_proxy.errors import PlanRefused, PromptTooLong

_log = logging.getLogger(__name__)
T = TypeVar("T")
# Quotes text in the request of a turn; None when there is none to quote.
Quote = Callable[[RenderedTurn, Turn], QuotedRequest | None]


class Planner:
    """Plans requests of one server; a request is planned on the slot that is leased for it."""

    def __init__(
        self, server: ServerResources, vectors: BlockVectors, records: SessionPersistence
    ) -> None:
        self._server = server
        self._vectors = vectors
        self._records = records
        self._worker = server.worker
        self._attention = AttentionReader(server.monitor)
        self._prober = Prober(server, self._attention)
        self._lost = LostBlocks(server)

    async def render_first(
        self, request: ParsedChat, scope: TurnScope
    ) -> tuple[Rendered, PreparedQuery]:
        """Render a request, and prepare its ranking at the same time.

        Raises PromptTooLong when the prompt exceeds the context of a slot.
        """
        turn, previous = scope.turn, request.previous

        async def render() -> Rendered:
            return await divided(await self.render(turn, request.body, previous), request.chat)

        early = EarlyPlan(self._server, self._vectors, turn.calls, request)
        return await self._vectors.prepare_beside(render, request, scope.trace, early)

    async def render(
        self, turn: PreparedTurn | RenderedTurn, body: bytes, previous: Rendered | None = None
    ) -> Rendered:
        """Render a body of a turn; `monitor.server` describes the instance that did it.

        `previous` is a rendering that this one probably extends. Raises PromptTooLong when the
        prompt exceeds the context of a slot.
        """
        monitor, calls = self._server.monitor, turn.calls
        request, n_ctx = turn.request, monitor.server.n_ctx
        call = RenderCall(request.incoming.dialect, body, previous, n_ctx, request.tenant)
        try:
            rendered = await calls.blocks.render(call)
        except PromptTooLong:
            monitor.doubt()  # the server may have started again, with another context
            await monitor.ensure_current(calls.client)
            if monitor.server.n_ctx == call.n_ctx:
                raise
            call = replace(call, n_ctx=monitor.server.n_ctx)
            rendered = await calls.blocks.render(call)
        await monitor.confirm(rendered.instance, calls.client)
        return rendered

    async def truncate(self, turn: RenderedTurn) -> RenderedTurn:
        """Remove the oldest messages if the policy truncates and the prompt exceeds the budget.

        Returns `turn` itself when nothing is removed. Otherwise its `rendered` still has the
        removed messages, and the caller renders the new body.
        """
        config = effective_config(turn.conversation.session.config, turn.chat)
        if not policy_of(config).truncates or config.budget is None:
            return turn
        n_answer = turn.chat.max_tokens
        limit = prompt_limit(config.budget, config.reserve_tokens if n_answer is None else n_answer)
        cut = partial(
            truncate_messages,
            turn.body,
            turn.chat.dialect,
            turn.chat.messages,
            turn.rendered,
            limit,
        )
        body, messages = await run_off_loop(turn.body, cut)
        if body == turn.body:
            return turn
        chat = replace(turn.chat, messages=messages)
        query = await run_off_loop(body, query_of, chat)
        return replace(turn, body=body, chat=chat, query=query.like(turn.query))

    def exceeds_context(self, rendered: Rendered, n_answer: int = 0) -> bool:
        """Whether a prompt and an answer of `n_answer` tokens exceed the context of a slot."""
        n_ctx = self._server.monitor.server.n_ctx
        return n_ctx is not None and len(rendered.tokens) + max(n_answer, 1) > n_ctx

    async def plan(self, turn: RenderedTurn, scope: TurnScope) -> BudgetedTurn:
        """Make a plan and have llama-server run it.

        A refused plan is made once more from a new rendering. A refusal to capture attention does
        not count as this second attempt: the plan is made again without the capture. Nor does one
        after lost blocks were decoded again, because saving them may have displaced other copies.
        Nor does the copy of an answer that the client has changed since: only llama-server knows
        its tokens, and the rendering stays valid. Raises PlanRefused after the second refusal,
        BudgetTooSmall and PinBudgetExceeded.
        """
        n_refused = 0
        while True:
            before = BudgetedTurn.of(scope.turn)
            try:
                return await self._attempt(turn, scope)
            except PlanRefused as refused:
                if _is_changed_answer(turn, refused):
                    turn.conversation.session.failed({refused.name or ""})
                    if turn.view.adoptable_end is None:
                        continue  # the slot is still as it was rendered
                else:
                    await self._learn(turn, refused)
                    counts = before.is_refill_tried == BudgetedTurn.of(scope.turn).is_refill_tried
                    counts &= not self._attention.note_refusal(turn.conversation, refused)
                    n_refused += counts
                if n_refused > 1:
                    raise
            scope.trace.stage = "render"
            turn = await self.rendered_anew(turn)

    async def rendered_anew(self, turn: RenderedTurn) -> RenderedTurn:
        """Render the present body of a turn, for the present state of its slot."""
        rendered = await self.render(turn, turn.body, turn.rendered)
        return replace(turn, rendered=await divided(rendered, turn.chat))

    async def hold_budget(
        self, request: ParsedChat, scope: TurnScope, conversation: Conversation
    ) -> BudgetedTurn:
        """Run the minimal plan: llama-server evicts the oldest rows, and nothing is recovered."""
        body = scope.turn.forwarded.body
        turn = RenderedTurn(
            request=request,
            calls=scope.turn.calls,
            chat=request.chat,
            body=body,
            conversation=conversation,
            rendered=await self.render(scope.turn, body),
            slot=scope.turn.slots[0],
        )
        view = turn.view
        if conversation.budgeted.epoch != view.epoch:
            view = await self._without_foreign_holes(turn)
        config = effective_config(conversation.session.config, request.chat)
        stream = budget_without_plan(config)
        call = PlanCall(Plan(stream=stream), view, conversation.owner)
        epoch = await turn.calls.blocks.run_plan(call)
        conversation.session.plan_replaced()
        members = _marker(view.id, epoch, turn.rendered)
        forwarded = await scope.turn.with_members(members, request.chat.keys)
        conversation.budgeted.plan_ran(epoch)
        conversation.budgeted_history.plan_ran(config)
        return BudgetedTurn.of(
            scope.turn,
            forwarded=forwarded,
            has_marker=True,
            budget=stream.budget or None,
            usage_extra={} if request.is_verbose else None,
        )

    async def _attempt(self, turn: RenderedTurn, scope: TurnScope) -> BudgetedTurn:
        """Decide, run the plan, and add its marker to the body."""
        trace, loop = scope.trace, asyncio.get_running_loop()
        trace.stage = "decide"
        began = loop.time()
        view = turn.view
        if turn.conversation.budgeted.epoch != view.epoch:
            view = await self._without_foreign_holes(turn)
        decision = await self._decided(turn, view, scope)
        trace.stage = "plan"
        trace.add_step("plan", began, loop.time())
        return await self._run(turn, scope, decision)

    async def _decided(self, turn: RenderedTurn, view: SlotView, scope: TurnScope) -> Decision:
        """Decide what a turn keeps, recovers and quotes, in the slot that `view` describes.

        Lost blocks are decoded again for it, and a probe runs a plan of its own.
        """
        session = turn.conversation.session
        before = session.layout
        decision = await self._begin(turn, view)
        self._note_drift(turn, scope, before, decision.turn)
        refilled = await self._lost.decode(turn, scope, decision.turn)
        if refilled is not None:
            decision = await self._begin(turn, refilled)
        with_attention = await self._attention.read(turn, decision.turn)
        if with_attention is not decision.turn:
            decision = await self._planned(turn, with_attention)
        if policy_of(decision.turn.config).quote is not None:
            decision = await self._with_text(turn, scope.trace, decision, _quoting_evicted)
        if decision.quoted is None and quotes_past(decision.turn.config):
            decision = await self._with_text(turn, scope.trace, decision, self._past)
        if decision.quoted is not None:
            return decision
        scope.trace.stage = "probe"
        decision = await self._prober.probe(turn, scope, decision)
        started = decision.turn
        config = config_of_unprobed(started.view, started.config)
        if config is started.config:
            return decision
        return await self._planned(turn, replace(started, config=config))

    def _note_drift(
        self, turn: RenderedTurn, scope: TurnScope, before: Layout, started: Turn
    ) -> None:
        """Record why the prompt does not continue the previous one, which had the layout `before`.

        The client does not send what was quoted in the previous prompt, and has changed nothing. A
        second attempt finds no difference: the first one has begun the turn.
        """
        if started.divergence not in (None, turn.conversation.budgeted_history.quoted_at):
            changed = drift_from(before, turn.rendered, messages_of(turn.rendered, turn.chat))
            scope.turn = BudgetedTurn.of(scope.turn, drift=changed)

    async def _run(self, turn: RenderedTurn, scope: TurnScope, decision: Decision) -> BudgetedTurn:
        """Have llama-server run a plan; returns the turn as it is forwarded."""
        trace, conversation, session = scope.trace, turn.conversation, turn.conversation.session
        started, plan, quoted = decision.turn, decision.plan, decision.quoted
        more = self._attention.ops(started.config, conversation)
        call = PlanCall(plan, started.slot, conversation.owner, started.rendered.tokens, more)
        body = turn.body if quoted is None else quoted.body
        so_far = BudgetedTurn.of(scope.turn)

        def after() -> tuple[AppliedPlan, SentTurn | None, tuple[dict[str, str], Any]]:
            spoken = self._records.request_to_remember(turn.chat.dialect, body)
            return session.after(started, plan), spoken, _verbose_reply(turn, decision, so_far)

        # Before the work beside the call begins, which would delay the call otherwise.
        call = replace(call, encoded=await encode(call))
        meanwhile = Meanwhile(after, trace)
        try:
            epoch = await turn.calls.blocks.run_plan(call)
        except BaseException:
            meanwhile.cancel()
            raise
        applied, spoken, (headers, extra) = meanwhile.result()
        session.record(applied)
        scope.turn = BudgetedTurn.of(scope.turn, is_planned=True)
        trace.stage = "splice"
        conversation.budgeted.request_sent(spoken)
        members = _marker(started.slot.id, epoch, started.rendered)
        forwarded = await scope.turn.with_members(members, turn.chat.keys, body)
        self._note(turn, decision, epoch)
        return BudgetedTurn.of(
            scope.turn,
            forwarded=forwarded,
            decision=_decision_name(turn, decision),
            plan=plan,
            budget=(plan.stream.budget if plan.stream is not None else 0) or None,
            response_headers=headers,
            usage_extra=extra,
            answer=spoken.answer if spoken is not None else None,
            is_planned=True,
            has_marker=True,
            writes_back=(started.config.writeback or started.is_full)
            and saves_evicted(started.config),
            is_full=started.is_full,
            is_reanchored=turn.reanchored.moved > 0,
        )

    def _past(self, turn: RenderedTurn, started: Turn) -> QuotedRequest | None:
        """The request with the removed messages that it needs."""
        session = turn.conversation.session
        past, index = session.past.blocks, session.past_index
        self._vectors.embed_index(index, past)
        return quote_past(started, past, index, turn.body)

    async def _with_text(
        self, turn: RenderedTurn, trace: RequestTrace, decision: Decision, quote: Quote
    ) -> Decision:
        """The decision with the text that a turn needs quoted in its last message.

        Returns it unchanged if the result exceeds the budget, or leaves no room for the answer.
        """
        started, plan = decision.turn, decision.plan
        takes_long = is_large(turn.body) or quotes_past(started.config)
        takes_long |= has_many_terms(turn.texts.n_query_terms)
        quoting = partial(quote, turn, started)
        quoted = await self._worker.run(turn.conversation, takes_long, quoting)
        if quoted is None:
            return decision
        trace.stage = "render"
        try:
            rendered = await self.render(turn, quoted.body)
        except PromptTooLong:
            return decision
        trace.stage = "decide"
        rendered = await divided(rendered, quoted.request)
        query = turn.query  # a quotation of removed messages is no part of the question
        if not quoted.is_past:
            asked = await run_off_loop(quoted.body, query_of, quoted.request)
            query = asked.like(turn.query)
        extended = replace(turn, chat=quoted.request, rendered=rendered, query=query)
        longer = await self._begin(extended, extended.view)
        n_answer = turn.chat.max_tokens or started.config.reserve_tokens
        too_long = self.exceeds_context(rendered, n_answer)
        if too_long or (longer.plan.infeasible and not plan.infeasible):
            unquoted = await self._begin(turn, started.slot)
            return replace(decision, turn=unquoted.turn)
        return replace(longer, quoted=quoted)

    async def plan_draft(self, turn: RenderedTurn, took: ThreadTime) -> Decision:
        """Plan a request that is not sent: the session stays as it is.

        The model is not probed for it, and text is not quoted. The processor time is added to
        `took`, also when this raises or is cancelled. Raises BudgetTooSmall and PinBudgetExceeded.
        """
        return await self._begin(turn, turn.view, turn.conversation.session.draft(), took)

    async def _begin(
        self,
        turn: RenderedTurn,
        view: SlotView,
        session: Session | None = None,
        took: ThreadTime | None = None,
    ) -> Decision:
        """Begin a turn of the session and plan it, which takes most of the proxy's own time.

        `session` replaces that of the conversation. The processor time is added to `took`.
        """
        session = session or turn.conversation.session
        vectors = self._vectors.take_new(turn.conversation)
        n_slot_cells = self._server.monitor.server.n_slot_cells

        def work() -> Decision:
            with (took or ThreadTime()).measured():
                session.index.prepare(turn.texts)
                session.add_vectors(stacked(vectors))
                started = session.begin(turn.rendered, view, turn.chat, turn.query, n_slot_cells)
                if turn.query.clauses:  # also one without vectors: the next one may have some
                    self._vectors.embed_missing(session, started.view.blocks)
                return Decision(started, session.plan(started))

        n_vectors = len(vectors) + self._vectors.n_missing(session)
        return await self._compute(turn, work, n_vectors)

    async def _planned(self, turn: RenderedTurn, started: Turn) -> Decision:
        """Plan a turn that was begun."""
        plan = await self._compute(turn, partial(turn.conversation.session.plan, started))
        return Decision(started, plan)

    async def _compute(self, turn: RenderedTurn, work: Callable[[], T], n_vectors: int = 0) -> T:
        """The result of `work`, which changes the session; in a thread when that takes long."""
        n_shared = common_prefix(turn.conversation.session.tokens, turn.rendered.tokens)
        long = turn.takes_long(n_shared, n_vectors, turn.texts.n_query_terms)
        # All of the removed text is compared when a prompt does not continue the previous one.
        session = turn.conversation.session
        long |= quotes_past(session.config) and n_shared < session.layout.generation
        return await self._worker.run(turn.conversation, long, work)

    async def _without_foreign_holes(self, turn: RenderedTurn) -> SlotView:
        """The slot, truncated at the first hole that another conversation has left in it.

        This conversation has no copy of the rows that are missing, and the rows behind the hole
        were decoded without them. The rows before the hole stay; the rest is decoded again.
        """
        view = turn.view
        edge = view.adoptable_end
        if edge is None:
            return view
        call = PlanCall(Plan(reuse=edge), view, turn.conversation.owner)
        epoch = await turn.calls.blocks.run_plan(call)
        return replace(view, epoch=epoch, n_common=edge)

    def _note(self, turn: RenderedTurn, decision: Decision, epoch: int) -> None:
        """Record a plan that has run in the conversation and the metrics."""
        started, plan, quoted = decision.turn, decision.plan, decision.quoted
        conversation, metrics = turn.conversation, self._server.metrics
        conversation.budgeted.plan_ran(epoch)
        conversation.budgeted_history.plan_ran(started.config)
        conversation.budgeted.capture_started(self._attention.capture(started.config, conversation))
        was_expected = conversation.session.was_expected
        if was_expected is not None:
            metrics.early_plans.labels(result="used" if was_expected else "replaced").inc()
        metrics.count_moves(plan)
        quoted_at = None
        if quoted is not None:
            quoted_at = common_prefix(turn.rendered.tokens, started.rendered.tokens)
            metrics.count_recoveries("past" if quoted.is_past else "text", len(quoted.blocks))
        conversation.budgeted_history.text_quoted(quoted_at)
        if conversation.budgeted_history.budget_needed(started.needed_budget, started.is_full):
            _log.warning(
                "session %s: system prompt, tools, rules and the task with its files need a budget"
                " of %d tokens: %s",
                conversation.id,
                started.needed_budget,
                _effect(started),
            )

    async def _learn(self, turn: RenderedTurn, refused: PlanRefused) -> None:
        """Count a refusal, and record which of the session's copies are missing."""
        conversation = turn.conversation
        self._server.metrics.plan_failures.labels(reason=refused.type).inc()
        _log.warning("session %s: llama-server refused a plan: %s", conversation.id, refused)
        labels = conversation.labels
        is_used = labels.__contains__
        slot = await turn.calls.blocks.slot(turn.slot, conversation.tenant, keep=is_used)
        missing = labels - copies_in(slot).keys()
        if refused.name is not None:
            missing |= {refused.name}
        conversation.session.failed(missing)


def _is_changed_answer(turn: RenderedTurn, refused: PlanRefused) -> bool:
    """Whether a plan was refused for a copy of an answer that has other tokens in the prompt."""
    name = refused.name or ""
    is_answer = name.endswith(GENERATED) and name in turn.conversation.labels
    return is_answer and refused.type == "stale_block"


def _quoting_evicted(turn: RenderedTurn, started: Turn) -> QuotedRequest | None:
    """The request with the evicted text that it needs, by the policy of the turn."""
    quote = policy_of(started.config).quote
    return quote(started, started.query, turn.body) if quote is not None else None


def _effect(started: Turn) -> str:
    """What a turn gets that needs more than its budget, for the log."""
    if started.is_full:
        return "served with the whole prompt"
    if started.config.within_turn == "full":
        return "a part is hidden, because the whole prompt exceeds the cells of a slot"
    return "a part is hidden; raise policy.budget, or set policy.within_turn to full"


def _marker(slot: int, epoch: int, rendered: Rendered) -> dict[str, bytes]:
    """The members of a body that assign it to a slot and to the plan that ran there.

    They name the rendering of the body, so that llama-server does not render it again.
    """
    kept = {"rendering": rendered.kept_as} if rendered.kept_as else {}
    return {
        "id_slot": orjson.dumps(slot),
        "cache_prompt": b"true",
        "evoke": orjson.dumps({"epoch": epoch, **kept}),
    }


def _decision_name(turn: RenderedTurn, decision: Decision) -> str:
    """The decision for the log and for operators: the policy, and what else was done."""
    started = decision.turn
    parts = [started.config.name]
    if not decision.plan.moves_nothing:
        parts.append("moved")
    if started.is_full:
        parts.append("full")
    if decision.quoted is not None and decision.quoted.is_past:
        parts.append("past")
    if turn.reanchored.moved:
        parts.append("reanchored")
    return ":".join(parts)


def _verbose_reply(
    turn: RenderedTurn, decision: Decision, so_far: BudgetedTurn
) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Headers and `usage.evoke` for a client that wants to know what the proxy did.

    `so_far` states what was decoded for the turn before its plan.
    """
    if not turn.request.is_verbose:
        return {}, None
    started, plan, quoted = decision.turn, decision.plan, decision.quoted
    conversation = turn.conversation
    loads = [load.span for load in plan.loads] + list(plan.adopt.spans if plan.adopt else ())
    if so_far.probe is not None:
        loads += so_far.probe.remaining_spans(plan)
    headers = {
        "X-Evoke-Session": conversation.name or conversation.id,
        "X-Evoke-Policy": started.config.name,
        "X-Evoke-Evicted": _counts([evict.span for evict in plan.evicts]),
        "X-Evoke-Recovered": _counts(loads),
        "X-Evoke-Omitted": f"tokens={forecast(started.view, plan).omitted}",
    }
    extra = usage_outcome(started, plan, quoted)
    if started.needed_budget:
        extra["needed_budget"] = started.needed_budget
    reanchored = turn.reanchored
    if reanchored.moved:
        extra["reanchored"] = {"moved": reanchored.moved, "decoded": reanchored.decoded}
        headers["X-Evoke-Reanchored"] = f"tokens={reanchored.moved};decoded={reanchored.decoded}"
    if so_far.probe is not None:
        extra["probe"] = so_far.probe.summary(plan)
    if so_far.n_redecoded:
        extra["redecoded"] = so_far.n_redecoded
    if so_far.n_prefilled:
        extra["prefilled"] = so_far.n_prefilled
    if "as_text" in extra or (quoted is not None and quoted.is_past):
        spans = [block.span for block in quoted.blocks] if quoted is not None else []
        headers["X-Evoke-As-Text"] = _counts(spans)
    return headers, extra


def _counts(spans: Sequence[Span]) -> str:
    return f"blocks={len(spans)};tokens={sum(len(span) for span in spans)}"
