"""Leases slots for requests, and saves the rows that other conversations have in them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import orjson

from evoke_proxy.adapters.llama.block_api import LATEST, BlockApi, PlanCall
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.servers.slot_pool import slots_for_answers
from evoke_proxy.engine.gateway import ForwardedBody
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.slot_queue import SlotLease, until_over
from evoke_proxy.engine.server.strategy import ServerResources
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
from evoke_proxy.errors import PlanRefused

_log = logging.getLogger(__name__)


class SlotAssignment:
    """Leases slots of one server, and saves the rows in them."""

    def __init__(self, server: ServerResources) -> None:
        self._server = server

    def named(self, request: ParsedChat) -> int | None:
        """The slot that a request names; None without one, or when it does not exist."""
        named = request.id_slot
        n_slots = len(self._server.slots.pool)
        return named if named is not None and 0 <= named < n_slots else None

    async def acquire_ephemeral(
        self,
        request: ParsedChat,
        scope: TurnScope,
        save: Callable[[SlotLease], Awaitable[None]] | None = None,
    ) -> None:
        """Lease one slot for each answer of a request.

        `save` is called for each, to save the rows of others in it; None: they are not saved. The
        request belongs to no conversation. llama-server refuses a request for more answers than it
        has slots. Raises SlotsBusy, and what `save` raises.
        """
        for slot in self._slots_of(request):
            lease = await scope.acquire(f"ephemeral-{id(scope)}", ephemeral=True, slot=slot)
            with lease.vacating():
                if save is not None:
                    await save(lease)

    async def acquire_emptied(self, request: ParsedChat, scope: TurnScope) -> ForwardedBody:
        """Lease one slot for each answer of a request, and save the rows of others in them.

        Returns the body, which names the slot. Raises SlotsBusy, and EvokeErrors when a call fails.
        """
        for slot in self._slots_of(request):
            lease = await scope.acquire(f"ephemeral-{id(scope)}", ephemeral=True, slot=slot)
            scope.trace.stage = "seat"
            with lease.vacating():
                victim = self._server.conversations.get(lease.victim)
                if victim is not None and victim.budgeted.epoch is not None:
                    blocks = scope.turn.calls.blocks
                    answer = await blocks.slot(lease.slot, victim.tenant, LATEST)
                    await self.save_rows(victim, SlotView.parse(answer), blocks)
        turn = scope.turn
        if not turn.slots or request.is_batch:
            return turn.forwarded
        first = self.named(request) or 0 if request.chat.n > 1 else turn.slots[0]
        return await turn.with_members({"id_slot": orjson.dumps(first)}, request.chat.keys)

    def _slots_of(self, request: ParsedChat) -> Sequence[int | None]:
        """The slots to lease, ascending, so that two requests never wait for each other."""
        n_slots, named = len(self._server.slots.pool), self.named(request)
        if request.chat.n == 1:
            return (named,)
        if request.is_batch:  # llama-server chooses the slots of its prompts
            return range(n_slots)
        return slots_for_answers(request.chat.n, n_slots, named or 0)

    @staticmethod
    async def until_idle(turn: PreparedTurn, give_up: Callable[[], bool]) -> None:
        """Wait until the slots of a turn are idle, or `give_up` returns True; see `until_over`."""
        blocks, tenant = turn.calls.blocks, turn.request.tenant
        for slot in turn.slots:
            is_busy = partial(blocks.is_processing, slot, tenant)
            await until_over(is_busy, give_up)

    async def save_rows(
        self, victim: Conversation | None, view: SlotView, blocks: BlockApi
    ) -> None:
        """Save the rows of a conversation that loses its slot.

        If llama-server refuses, the rows are lost and the next turn of the conversation decodes
        them again. Does nothing without a victim. The caller has a lease of the slot that is not
        yet `vacated`, so no turn of the victim runs during the call.
        """
        # Another epoch: another request used the slot since, and its rows are not the victim's.
        if victim is None or victim.budgeted.epoch != view.epoch:
            return
        victim.budgeted.rows_lost()
        plan = victim.session.plan_save_all(view)
        try:
            await blocks.run_plan(PlanCall(plan, view, victim.owner))
        except PlanRefused as refused:
            self._server.metrics.plan_failures.labels(reason=refused.type).inc()
            _log.warning("session %s leaves its slot unsaved: %s", victim.id, refused)
        else:
            victim.session.saved(plan)

    async def drop_copies(self, conversation: Conversation, blocks: BlockApi) -> None:
        """Delete the copies of a forgotten conversation, after running copies of it have ended."""
        async with self._server.slots.locked(conversation.id):
            await blocks.drop_copies(conversation.labels, conversation.tenant)
