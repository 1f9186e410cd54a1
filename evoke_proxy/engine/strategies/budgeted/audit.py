"""Audits a share of budgeted turns: how probable would the answer have been without eviction?

An audit uses a slot that no conversation has, while no request uses the server. It decodes the
prompt without eviction and makes llama-server generate the given answer; then it adopts copies of
the blocks that the turn had, in the state in which they were decoded, and does the same. The slot
of the conversation is not touched. All calls run under a background lease, which a request
preempts: the prompt is decoded in steps of about 50 ms, and a cancelled call ends with its step.
The slot is empty again before the lease ends. Stopping the proxy, and deleting the conversation,
end its audit too.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evoke_proxy.adapters.llama.block_api import LATEST, copies_in, of_session
from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.adapters.llama.client import CallOptions
from evoke_proxy.core.model.blocks import Span, clipped, count, merged, without
from evoke_proxy.core.prompt.rendered import SlotView, Tokens, has_media
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.request.forced_answer import Step, forced_completion, read_steps
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.core.session.audit import compare
from evoke_proxy.engine.gateway import Outcome
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.slot_queue import BackgroundLease, until_over
from evoke_proxy.engine.server.strategy import ServerResources
from evoke_proxy.engine.server.turn import PreparedTurn
from evoke_proxy.engine.strategies.budgeted.turn import BudgetedTurn
from evoke_proxy.errors import EvokeError, PlanRefused

_log = logging.getLogger(__name__)
# Seconds that the server must be idle: clients that answer at once have answered, and copies of
# the turn's blocks have been made.
_PAUSE_S = 1.0
# How many times an audit waits as long again for copies of the turn's blocks.
_MAX_WAITS = 5
# The first tokens of an answer, which are generated again.
_ANSWER_TOKENS = 64
# Seconds that a step of a prompt takes, and its tokens: a request that arrives waits for its end.
_STEP_S = 0.05
_MIN_STEP, _MAX_STEP = 16, 512
# Cells that stay free beside those that an audit needs.
_SPARE_CELLS = 64
# Turns that wait for an audit.
_MAX_WAITING = 4
# The session under which the slot of an audit is emptied: no conversation continues it.
_NOBODY = "audit"


@dataclass(frozen=True, slots=True)
class _Sample:
    """An answered turn that waits for its audit."""

    conversation: Conversation
    calls: ServerCalls
    answer: AnswerReader
    # Turns of the conversation, and tokens of its prompt, when the turn ended.
    n_turns: int
    n_prompt: int
    # Tokens of the prompt that were not in the cache.
    n_omitted: int
    budget: int


@dataclass(frozen=True, slots=True)
class _Replay:
    """A prompt and an answer, the slot that they are decoded in, and the copies of the turn."""

    calls: ServerCalls
    conversation: Conversation
    slot: int
    tokens: Tokens
    answer: Sequence[int]
    # Labels of the copies of resident blocks, and where the last of them ends.
    labels: Sequence[str]
    end: int


class ShadowAudit:
    """Draws turns, and audits them one by one while the server is idle."""

    def __init__(self, server: ServerResources) -> None:
        self._server = server
        self._waiting: dict[str, _Sample] = {}
        self._is_running = False
        # The id of the conversation that was audited last, and the lease of that audit.
        self._latest: tuple[str, BackgroundLease] | None = None
        server.slots.on_close.append(self._stop)

    def select(self, turn: PreparedTurn) -> PreparedTurn:
        """Return the turn, marked and with a reader of its answer if it is drawn.

        With a share above 0, turns whose rows were moved to new positions are always drawn.
        """
        share = self._server.monitor.config.audit.share
        if not share or not isinstance(turn, BudgetedTurn) or not self._is_auditable(turn):
            return turn
        if random.random() >= share and not turn.is_reanchored:
            return turn
        return replace(turn, answer=turn.answer or AnswerReader(), is_audited=True)

    def _is_auditable(self, turn: BudgetedTurn) -> bool:
        chat = getattr(turn.request, "chat", None)
        is_planned = turn.is_planned and turn.budget is not None and turn.writes_back
        has_one_answer = chat is not None and chat.n == 1
        return is_planned and has_one_answer and self._server.monitor.server.can_adopt

    def add(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Queue a turn that was drawn, when its answer is complete and blocks were missing."""
        if not isinstance(turn, BudgetedTurn) or not turn.is_audited or turn.answer is None:
            return
        conversation, accounting = turn.remembered, outcome.accounting
        if conversation is None or accounting is None or not outcome.is_finished:
            return
        differs = accounting.omitted > 0 or turn.is_reanchored
        if accounting.marker != "ok" or not differs or turn.budget is None:
            self._count("nothing_omitted")
            return
        self._waiting.pop(conversation.id, None)
        self._waiting[conversation.id] = _Sample(
            conversation=conversation,
            calls=turn.calls,
            answer=turn.answer,
            n_turns=conversation.n_turns,
            n_prompt=accounting.n_prompt,
            n_omitted=accounting.omitted,
            budget=turn.budget,
        )
        while len(self._waiting) > _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def start(self) -> None:
        """Start auditing if the server is idle and turns are waiting."""
        if self._waiting and not self._is_running and self._server.slots.pool.idle():
            self._is_running = True
            self._server.background.run(self._run(), "auditing turns")

    def discard(self, conversation: Conversation) -> None:
        """Drop the turn of a conversation that waits for its audit."""
        self._waiting.pop(conversation.id, None)

    async def end(self, conversation: Conversation) -> None:
        """Drop the turn of a conversation that waits, and end its audit; returns after it.

        Raises SlotsBusy when the slot of the audit does not become free in time.
        """
        self.discard(conversation)
        if self._latest is None or self._latest[0] != conversation.id:
            return
        if self._latest[1].is_released:
            return
        (slot,) = self._latest[1].slots
        # The lease is granted when the background lease was released: the slot is empty then.
        session = f"erasing-{conversation.id}"
        lease = await self._server.slots.acquire(session, conversation.tenant, True, slot=slot)
        lease.release()

    def _stop(self) -> None:
        """End the running audit, because the proxy stops."""
        self._waiting.clear()
        if self._latest is not None:
            self._latest[1].preempt(0.0)

    async def _run(self) -> None:
        """Audit the waiting turns until a request arrives."""
        try:
            await asyncio.sleep(_PAUSE_S)
            while self._waiting and not self._server.is_stopping():
                sample = self._waiting.pop(next(reversed(self._waiting)))
                result = "failed"
                try:
                    result = await self._audit(sample)
                    for _ in range(_MAX_WAITS):
                        if result != "unsaved":
                            break
                        await asyncio.sleep(_PAUSE_S)  # write-back has not copied its blocks yet
                        result = await self._audit(sample)
                except PlanRefused as refused:
                    result = "refused"
                    _log.debug("session %s not audited: %s", sample.conversation.id, refused)
                finally:
                    self._count(result)
                if result == "interrupted":
                    return
        finally:
            self._is_running = False

    def _count(self, result: str) -> None:
        self._server.metrics.audits.labels(result=result).inc()

    async def _audit(self, sample: _Sample) -> str:
        """Audit one turn; the result is a label of `evoke_audits_total`."""
        conversation, slots = sample.conversation, self._server.slots
        own, spare = slots.pool.slot_of(conversation.id), self._spare_slot()
        if own is None or spare is None:
            return "no_slot"
        message = await asyncio.to_thread(sample.answer.message, True)
        if message is None or message.get("reasoning_content") or not message["content"].strip():
            return "no_text"
        lease = self._lease(spare, sample)
        if lease is None:
            return "interrupted"
        result = "interrupted"
        self._latest = conversation.id, lease
        async with lease:
            text = str(message["content"])
            found = await self._replay(sample, own, spare, text)
            if isinstance(found, str):
                return found
            result = await self._compared(sample, found, lease)
        return result

    def _spare_slot(self) -> int | None:
        """Return a slot that has no conversation."""
        pool = self._server.slots.pool
        return next((slot for slot in range(len(pool)) if pool.holder(slot) is None), None)

    def _lease(self, slot: int, sample: _Sample) -> BackgroundLease | None:
        """Lease the slot; None when a request runs or arrives."""

        async def settle() -> None:
            is_busy = partial(sample.calls.blocks.is_processing, slot, sample.conversation.tenant)
            await until_over(is_busy, lambda: self._server.slots.is_closed)
            await self._empty(sample.calls, slot)

        return self._server.slots.background(slot, None, settle, self._server.background.run)

    async def _replay(self, sample: _Sample, own: int, spare: int, text: str) -> _Replay | str:
        """Return what to decode, or the result when the turn cannot be audited."""
        conversation, blocks = sample.conversation, sample.calls.blocks
        state = await blocks.slot(own, conversation.tenant, keep=of_session(conversation.id))
        free = SlotView.parse(await blocks.slot(spare, conversation.tenant, LATEST))
        answer = await sample.calls.stock.tokenize(text.strip(), False)
        view, tokens = SlotView.parse(state), conversation.session.tokens
        is_same = conversation.n_turns == sample.n_turns and len(tokens) == sample.n_prompt
        if not is_same or view.epoch != conversation.budgeted.epoch:
            return "changed"
        if has_media(tokens) or not len(answer):
            return "no_text"
        if free.n_free < len(tokens) + _ANSWER_TOKENS + self._reserved(sample):
            return "no_cells"
        prompt = Span(0, len(tokens))
        resident = clipped(view.resident, prompt)
        if len(tokens) - count(resident) != sample.n_omitted:
            return "changed"  # llama-server has evicted rows while it generated the answer
        copies = [
            (label, Span(int(copy["p0"]), int(copy["p1"])))
            for label, copy in copies_in(state).items()
        ]
        chosen = [
            (label, span) for label, span in copies if count(clipped(resident, span)) == len(span)
        ]
        end = max((span.end for _, span in chosen), default=0)
        tail = Span(end, len(tokens))
        missing = without(resident, merged([span for _, span in chosen]))
        if not chosen or not len(tail) or count(clipped(missing, Span(0, end))):
            return "unsaved"
        if count(clipped(resident, tail)) != len(tail):
            return "unsaved"
        return _Replay(
            calls=sample.calls,
            conversation=conversation,
            slot=spare,
            tokens=tokens,
            answer=answer[:_ANSWER_TOKENS].tolist(),
            labels=[label for label, _ in chosen],
            end=end,
        )

    def _reserved(self, sample: _Sample) -> int:
        """Cells that an audit leaves free.

        Where slots share cells, a request that arrives during an audit may need as many as the
        budgets allow: those that each conversation may still fill, and one more budget.
        """
        info, pool = self._server.monitor.server, self._server.slots.pool
        n_cells = info.n_slot_cells or 0
        if n_cells >= (info.n_cells or 0):
            return _SPARE_CELLS
        total = sample.budget
        for slot in range(len(pool)):
            found = self._server.conversations.get(pool.holder(slot))
            if found is not None:
                is_own = found is sample.conversation
                allowed = found.session.config.within_cells().budget or n_cells
                budget = sample.budget if is_own else allowed
                total += max(0, budget - found.budgeted.n_resident)
        return total + _SPARE_CELLS

    async def _compared(self, sample: _Sample, replay: _Replay, lease: BackgroundLease) -> str:
        """Generate the answer with all blocks and with those of the turn, and record both."""
        try:
            await self._prefill(replay, lease)
            whole, _ = await lease.run(self._forced(replay, None))
            lease.check()
            body: dict[str, Any] = {
                "tokens": replay.tokens[: replay.end],
                "names": list(replay.labels),
                **replay.conversation.owner,
            }
            adopted = await replay.calls.blocks.run(replay.slot, "block-adopt", body)
            budgeted, accounting = await lease.run(self._forced(replay, int(adopted["epoch"])))
        finally:
            if not lease.is_busy:  # else the lease empties the slot when llama-server is idle
                await self._empty(replay.calls, replay.slot)
        if whole is None or budgeted is None:
            return "no_text"
        if accounting is None or accounting.omitted != sample.n_omitted:
            return "changed"
        found = compare(sample.budget, budgeted, whole)
        sample.conversation.audits.add(found)
        self._server.metrics.count_audit(found.change, found.is_other)
        return "done"

    async def _prefill(self, replay: _Replay, lease: BackgroundLease) -> None:
        """Decode the prompt, in steps that take about as long as a request may wait for one."""
        end, size = 0, _MIN_STEP
        while end < len(replay.tokens):
            end = min(end + size, len(replay.tokens))
            done = await lease.run(replay.calls.stock.prefill(replay.tokens[:end], replay.slot))
            rate = done.decoded / max(done.seconds, 1e-4)
            size = max(_MIN_STEP, min(_MAX_STEP, int(rate * _STEP_S)))

    async def _forced(
        self, replay: _Replay, epoch: int | None
    ) -> tuple[list[Step] | None, TokenAccounting | None]:
        """Generate the answer; without an epoch after the whole prompt."""
        body: dict[str, Any] = {
            "prompt": replay.tokens,
            "id_slot": replay.slot,
            "cache_prompt": True,
            **forced_completion(replay.answer, 1),
        }
        if epoch is not None:
            body["evoke"] = {"epoch": epoch}
        options = CallOptions("audit", is_long=True)
        answer = await replay.calls.client.call("POST", "/completion", body, options)
        return read_steps(answer, replay.answer), TokenAccounting.parse(answer.get("timings"))

    async def _empty(self, calls: ServerCalls, slot: int) -> None:
        """Free the cells of the slot; a failure leaves rows that the next request replaces."""
        try:
            view = SlotView.parse(await calls.blocks.slot(slot, "", LATEST))
            await calls.blocks.empty(view, {"tenant": "", "session": _NOBODY})
        except EvokeError as error:
            _log.debug("slot %d not emptied after an audit: %s", slot, error)
