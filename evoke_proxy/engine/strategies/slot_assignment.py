"""Slots for requests: waits for them, and saves what conversations have in them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import orjson

from evoke_proxy.adapters.llama.block_api import LATEST, BlockApi, PlanCall
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.servers.slot_pool import taken_by
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.slot_queue import SlotLease, SlotQueue, until_over
from evoke_proxy.engine.turns.forwarding import Forwarding
from evoke_proxy.errors import PlanRefused

_log = logging.getLogger(__name__)


class SlotAssignment:
    """Leases for one request at a time; they are in its Forwarding, for the caller to release."""

    def __init__(
        self,
        upstream: LlamaClient,
        metrics: Metrics,
        slots: SlotQueue,
        conversations: Conversations,
    ) -> None:
        self._blocks = BlockApi(upstream)
        self._metrics = metrics
        self._slots = slots
        self._conversations = conversations

    def wanted(self, way: Forwarding) -> int | None:
        """The slot a request names; None when it names none, or one that does not exist."""
        named = way.id_slot
        return named if named is not None and 0 <= named < len(self._slots.pool) else None

    async def acquire(
        self, way: Forwarding, session: str, tenant: str, guest: bool, slot: int | None = None
    ) -> SlotLease:
        """Wait for a slot, for `slot` when one is named; raises SlotsBusy when none gets free."""
        way.stage = "slot"
        began = asyncio.get_running_loop().time()
        lease = way.own(await self._slots.acquire(session, tenant, guest, way.patience, slot))
        waited_s = asyncio.get_running_loop().time() - began
        self._metrics.queue_seconds.observe(waited_s)
        way.waits["queue"] = way.waits.get("queue", 0.0) + waited_s
        return lease

    async def guest(
        self, way: Forwarding, request: ChatRequest, client: Mapping[str, str], tenant: str
    ) -> None:
        """A slot for a request without a conversation, or as many as it has answers.

        Whose slots they are loses nothing. One that wants more answers than there are slots is
        left to llama-server, which refuses it. Raises SlotsBusy, and EvokeErrors for what
        llama-server does.
        """
        for slot in self._places(way, request):
            lease = await self.acquire(way, f"guest-{id(way)}", tenant, True, slot)
            way.stage = "seat"
            with lease.vacating():
                victim = self._conversations.get(lease.victim)
                if victim is not None and victim.epoch is not None:
                    answer = await self._blocks.slot(lease.slot, victim.tenant, client, LATEST)
                    await self.make_room(victim, SlotView.parse(answer), client)
        if way.lease is not None and not way.is_batch:
            first = self.wanted(way) or 0 if request.n > 1 else way.lease.slot
            place = {"id_slot": orjson.dumps(first)}
            await way.put(place, request.keys)

    async def queue(self, way: Forwarding, request: ChatRequest, tenant: str) -> None:
        """Slots for a request without a conversation where llama-server is to choose which.

        Raises SlotsBusy.
        """
        for slot in self._places(way, request):
            lease = await self.acquire(way, f"guest-{id(way)}", tenant, True, slot)
            lease.vacated()  # nothing is saved of whoever had it

    def _places(self, way: Forwarding, request: ChatRequest) -> Sequence[int | None]:
        """In ascending order, so that two of them never wait for each other."""
        n_slots, wanted = len(self._slots.pool), self.wanted(way)
        if request.n == 1:
            return (wanted,)
        if way.is_batch:  # which slots its prompts get is llama-server's choice
            return range(n_slots)
        return taken_by(request.n, n_slots, wanted or 0)

    async def until_idle(
        self, slot: int, tenant: str, client: Mapping[str, str], enough: Callable[[], bool]
    ) -> None:
        """Wait until llama-server is done with a slot, or `enough` says that it was waited."""

        async def busy() -> bool:
            return await self._blocks.is_processing(slot, tenant, client)

        await until_over(busy, enough)

    async def make_room(
        self, victim: Conversation | None, view: SlotView, client: Mapping[str, str]
    ) -> None:
        """Save what a conversation leaves in a slot; if that fails, it decodes again.

        The caller has a lease of the slot that is not yet `vacated`, so that no turn of the
        conversation runs meanwhile.
        """
        # Another epoch: somebody else was there since, and what is in the slot is not the victim's.
        if victim is None or victim.epoch != view.epoch:
            return
        victim.epoch, victim.n_resident = None, 0
        plan = victim.session.plan_save_all(view)
        try:
            await self._blocks.run_plan(PlanCall(plan, view, victim.owner), client)
        except PlanRefused as refused:
            self._metrics.plan_failures.labels(reason=refused.type).inc()
            _log.warning("session %s leaves its slot unsaved: %s", victim.id, refused)
        else:
            victim.session.saved(plan)

    async def drop(self, gone: Conversation, client: Mapping[str, str]) -> None:
        """Nobody goes on from a conversation any more: its copies are of no use.

        What is being copied of it now is waited for: it would stay for ever.
        """
        async with self._slots.locked(gone.id):
            await self._blocks.drop_copies(gone.labels, gone.tenant, client)
