"""Copies blocks from the slots to host memory while no request uses the server.

A block that has a copy is evicted without further work, by a plan or by llama-server itself. Copies
are made in small calls under a background lease of the slot, which a request preempts between two
calls. llama-server refuses a call when the slot has changed since it was read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from evoke_proxy.adapters.llama.block_api import BlockApi, PlanCall, of_session
from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.model.plan import Plan, Save, batches
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.slot_queue import BackgroundLease, SlotQueue, until_over
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.engine.strategies.budgeted.turn import SlotJob
from evoke_proxy.errors import PlanRefused

_log = logging.getLogger(__name__)

# Seconds before copying begins: most clients that send their next request at once have sent it.
_PAUSE_S = 0.02
# Seconds between two attempts to lease a slot that other background work has.
_RETRY_S = 0.1
# The most tokens of one call, or one larger block: a call blocks decoding for milliseconds.
_BATCH_TOKENS = 256
# Share of the host memory for copies that is left free for blocks that a plan evicts.
_SPARE_SHARE = 0.25


class WriteBack:
    """Copies the blocks of waiting conversations in one background task."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        slots: SlotQueue,
        tasks: BackgroundTasks,
        records: SessionPersistence,
    ) -> None:
        self._metrics = metrics
        self._slots = slots
        self._tasks = tasks
        self._records = records
        # Conversations to copy by id, the first one next, each with what makes its calls.
        self._waiting: dict[str, tuple[Conversation, ServerCalls]] = {}
        # Whether the task that copies runs.
        self._is_running = False

    def add(self, conversation: Conversation, calls: ServerCalls) -> None:
        """Queue a conversation, which is copied with `calls`."""
        self._waiting[conversation.id] = (conversation, calls)

    def start(self) -> None:
        """Start copying if the server is idle and conversations are waiting."""
        if len(self._waiting) > len(self._slots.pool):  # some conversations have lost their slots
            slot_of, waiting = self._slots.pool.slot_of, self._waiting
            self._waiting = {id: waiting[id] for id in waiting if slot_of(id) is not None}
        if self._waiting and not self._is_running and self._slots.pool.idle():
            self._is_running = True
            self._tasks.run(self._run(), "copying blocks")

    async def _run(self) -> None:
        """Copy the waiting conversations one by one until a request arrives.

        Other background work may have a slot, such as the check of saving after a restart of
        llama-server. Copying then waits for it and does not end, because the end of the next
        request, which would start it again, may be hours away.
        """
        try:
            await asyncio.sleep(_PAUSE_S)
            while self._waiting:
                # Removed first, so that a turn which ends during the copying can add it again.
                conversation, calls = self._waiting.pop(next(iter(self._waiting)))
                slot = self._slots.pool.slot_of(conversation.id)
                if slot is None or conversation.budgeted.epoch is None:
                    continue
                lease = self._lease(slot, conversation, calls.blocks)
                if lease is None:
                    self._waiting.setdefault(conversation.id, (conversation, calls))
                    if self._slots.is_closed or not self._slots.pool.idle():
                        return
                    await asyncio.sleep(_RETRY_S)
                    continue
                result = "interrupted"
                job = SlotJob(conversation=conversation, calls=calls, lease=lease)
                async with lease:
                    result = await self._copy(job)
                self._metrics.writebacks.labels(result=result).inc()
                if result == "interrupted":
                    self._waiting.setdefault(conversation.id, (conversation, calls))
                    return
        finally:
            self._is_running = False

    def _lease(
        self, slot: int, conversation: Conversation, blocks: BlockApi
    ) -> BackgroundLease | None:
        """Lease the slot of a conversation; None when a request runs or waits."""

        async def settle() -> None:
            is_busy = partial(blocks.is_processing, slot, conversation.tenant)
            await until_over(is_busy, lambda: self._slots.is_closed)

        return self._slots.background(slot, conversation.id, settle, self._tasks.run)

    async def _copy(self, job: SlotJob) -> str:
        """Copy the blocks of a conversation; the result is a label of `writebacks`."""
        try:
            await self._copy_unsaved(job)
        except PlanRefused as refused:
            _log.debug("session %s not copied: %s", job.conversation.id, refused)
            return "refused"
        return "done"

    async def _copy_unsaved(self, job: SlotJob) -> None:
        """Copy the unsaved blocks and record the session.

        Raises Preempted between two calls when a request arrives, and PlanRefused.
        """
        conversation, lease, blocks = job.conversation, job.lease, job.calls.blocks
        await self._records.decode_next_turn(job)
        lease.check()
        since = self._records.copies_since(conversation)
        is_own = of_session(conversation.id)
        answer = await blocks.slot(job.slot, conversation.tenant, since, is_own)
        view = SlotView.parse(answer)
        if view.epoch != conversation.budgeted.epoch or view.busy:
            return
        expected = {"n_tokens": view.n_tokens, "tokens_hash": answer.get("tokens_hash")}
        session = conversation.session
        everything = session.plan_save_all(view).saves if self._records.saves_answers else ()
        saves = everything or session.unsaved(view)
        for batch in batches(saves[: _n_fitting(answer, saves)], _BATCH_TOKENS):
            lease.check()
            ops = Plan(saves=batch).ops()
            call = {"epoch": view.epoch, "ops": ops, "expect": expected, **conversation.owner}
            await blocks.run(job.slot, "block-plan", call)
            self._metrics.written_behind.inc(len(batch))
            session.saved(Plan(saves=batch))
            self._records.note_copied(conversation, [save.label for save in batch])
        lease.check()
        if await self._evict_surplus(job, view):
            answer = await blocks.slot(job.slot, conversation.tenant, since, is_own)
            view = SlotView.parse(answer)
        await self._records.save(job, view, answer)

    async def _evict_surplus(self, job: SlotJob, view: SlotView) -> bool:
        """Bring a slot within its budget after a turn that had none; False when it is already."""
        conversation = job.conversation
        if not conversation.budgeted_history.was_full:
            return False
        plan = conversation.session.surplus(view)
        if plan.moves_nothing:
            return False
        epoch = await job.calls.blocks.run_plan(PlanCall(plan, view, conversation.owner))
        n_rows = sum(len(evict.span) for evict in plan.evicts)
        conversation.budgeted.surplus_evicted(epoch, n_rows)
        self._metrics.count_evictions("after_turn", len(plan.evicts))
        return True


def _n_fitting(answer: Mapping[str, Any], saves: Sequence[Save]) -> int:
    """The number of copies that fit into free host memory without replacing others."""
    ram, row_bytes = answer.get("ram") or {}, answer.get("row_bytes") or 0
    free = ram.get("budget", 0) * (1 - _SPARE_SHARE) - ram.get("used", 0)
    for n, save in enumerate(saves):
        free -= len(save.span) * row_bytes
        if free < 0:
            return n
    return len(saves)
