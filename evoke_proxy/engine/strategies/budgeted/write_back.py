"""Write-behind: what a conversation leaves in its slot is copied while nobody needs the server.

A block that has a copy leaves the cache without one being made, in a plan or by the engine itself.
Copies are made in small calls under a background lease of the slot, which a request ends between
two of them. A call is refused by llama-server when the slot is not any more as it was looked at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.model.plan import Plan, Save
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.slot_queue import BackgroundLease, SlotQueue, until_over
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.errors import PlanRefused

_log = logging.getLogger(__name__)

# After a reply most clients that are going to answer at once have done so.
_PAUSE_S = 0.02
# Tokens of one call: milliseconds for which nothing else runs.
_BATCH_TOKENS = 256
# Host memory that is left for copies of what is not in the cache any more.
_SPARE = 0.25


class WriteBack:
    """Conversations whose blocks are to be copied, and one task that does it when it can."""

    def __init__(
        self,
        upstream: LlamaClient,
        metrics: Metrics,
        slots: SlotQueue,
        chores: BackgroundTasks,
        records: SessionPersistence,
    ) -> None:
        self._blocks = BlockApi(upstream)
        self._metrics = metrics
        self._slots = slots
        self._chores = chores
        self._records = records
        self._waiting: dict[str, tuple[Conversation, Mapping[str, str]]] = {}
        self._running = False

    def add(self, conversation: Conversation, headers: Mapping[str, str]) -> None:
        """Have the blocks of a conversation copied; `headers` carry the key for the calls."""
        self._waiting[conversation.id] = (conversation, headers)

    def start(self) -> None:
        """Begin to copy when the server is idle and blocks are waiting."""
        if len(self._waiting) > len(self._slots.pool):  # some have lost their slots
            slot_of, waiting = self._slots.pool.slot_of, self._waiting
            self._waiting = {id: waiting[id] for id in waiting if slot_of(id) is not None}
        if self._waiting and not self._running and self._slots.pool.idle():
            self._running = True
            self._chores.run(self._run(), "copying blocks")

    async def _run(self) -> None:
        """One conversation after the other, until a request comes or nothing is left."""
        try:
            await asyncio.sleep(_PAUSE_S)
            while self._waiting:
                # Taken out first: a turn that ends meanwhile is put behind what waits.
                known, client = self._waiting.pop(next(iter(self._waiting)))
                slot, result = self._slots.pool.slot_of(known.id), "done"
                if slot is not None and known.budgeted.epoch is not None:
                    lease = self._lease(slot, known, client)
                    if lease is None:
                        self._waiting.setdefault(known.id, (known, client))
                        return
                    result = "interrupted"
                    async with lease:
                        result = await self._copied(known, lease, client)
                self._metrics.writebacks.labels(result=result).inc()
                if result == "interrupted":
                    self._waiting.setdefault(known.id, (known, client))
                    return
        finally:
            self._running = False

    def _lease(
        self, slot: int, known: Conversation, client: Mapping[str, str]
    ) -> BackgroundLease | None:
        """The slot of a conversation, for as long as no request comes."""

        async def settle() -> None:
            async def busy() -> bool:
                return await self._blocks.is_processing(slot, known.tenant, client)

            await until_over(busy, lambda: self._slots.is_closed)

        return self._slots.background(slot, known.id, settle, self._chores.run)

    async def _copied(
        self, known: Conversation, lease: BackgroundLease, client: Mapping[str, str]
    ) -> str:
        """Copy one conversation's unsaved blocks; how it ended, a label of `writebacks`."""
        try:
            await self._copy(known, lease, client)
        except PlanRefused as refused:
            _log.debug("session %s not copied: %s", known.id, refused)
            return "refused"
        return "done"

    async def _copy(
        self, known: Conversation, lease: BackgroundLease, client: Mapping[str, str]
    ) -> None:
        """All of its unsaved blocks; Preempted when a request comes between two calls."""
        (slot,) = lease.slots
        await self._records.ready(known, lease, client)
        lease.check()
        since = self._records.since(known)
        answer = await self._blocks.slot(slot, known.tenant, client, since)
        view = SlotView.parse(answer)
        if view.epoch != known.budgeted.epoch or view.busy:
            return
        expect = {"n_tokens": view.n_tokens, "tokens_hash": answer.get("tokens_hash")}
        session = known.session
        # To come back after a restart it needs what was generated, too.
        everything = session.plan_save_all(view).saves if self._records.on else ()
        saves = everything or session.unsaved(view)
        for batch in _batches(saves[: _room(answer, saves)]):
            lease.check()
            ops = Plan(saves=batch).ops()
            call = {"epoch": view.epoch, "ops": ops, "expect": expect, **known.owner}
            await self._blocks.run(slot, "block-plan", call, client)
            self._metrics.written_behind.inc(len(batch))
            known.session.saved(Plan(saves=batch))
            self._records.copied(known, [save.label for save in batch])
        lease.check()
        await self._records.keep(known, view, answer, client, lease)


def _room(answer: Mapping[str, Any], saves: Sequence[Save]) -> int:
    """How many of these copies fit the host memory that is free without a copy having to go."""
    ram, rows = answer.get("ram") or {}, answer.get("row_bytes") or 0
    free = ram.get("budget", 0) * (1 - _SPARE) - ram.get("used", 0)
    for n, save in enumerate(saves):
        free -= len(save.span) * rows
        if free < 0:
            return n
    return len(saves)


def _batches(saves: Sequence[Save]) -> Iterator[tuple[Save, ...]]:
    """The saves in their order, each batch of a block at least and of so many tokens at most."""
    batch: list[Save] = []
    for save in saves:
        if batch and sum(len(item.span) for item in batch) + len(save.span) > _BATCH_TOKENS:
            yield tuple(batch)
            batch = []
        batch.append(save)
    if batch:
        yield tuple(batch)
