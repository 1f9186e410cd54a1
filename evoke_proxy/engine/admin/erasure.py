"""Deletes sessions permanently: rows, copies, files, vectors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from evoke_proxy.adapters.llama.block_api import LATEST, PlanCall, copies_of
from evoke_proxy.core.model.plan import Evict, Plan
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.snapshots.snapshots import Snapshot
from evoke_proxy.engine.routing.served_model import ServedModel
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.errors import EvokeError, RequestError, UpstreamRejected

_log = logging.getLogger(__name__)
# Whether to delete a snapshot or record of a tenant and a session.
Selector = Callable[[str, str], bool]


class SessionEraser:
    """Deletes sessions at one llama-server.

    A result has the numbers of deleted `sessions` and `snapshots`, and in `left` one line for each
    part that could not be deleted.
    """

    def __init__(self, context: ServedModel) -> None:
        self._context = context
        self._server = context.server
        self._blocks = context.server.resources.calls.blocks

    async def delete(self, conversations: list[Conversation], selects: Selector) -> dict[str, Any]:
        """Delete these conversations, and the files on disk that `selects` chooses.

        Raises RequestError (409), and deletes nothing, while a request of one of them runs. The
        list is emptied step by step: freeing hundreds of sessions at once blocks the event loop.
        """
        context = self._context
        busy = [item.id for item in conversations if item.in_use]
        if busy:
            raise RequestError(
                f"requests of these sessions run now: {', '.join(busy)}", "session_busy", 409
            )
        for item in conversations:  # before any await, so that no request continues them
            self._server.conversations.forget(item)
            del item
        ids = {item.id for item in conversations}
        # After this, nothing of them is being written to disk.
        await context.snapshots.wait_until_idle(ids)
        left: list[str] = []
        conversations.reverse()
        while conversations:
            left += await self._delete_live(conversations.pop())
            await asyncio.sleep(0)
        snapshots = await self._delete_stored(selects, left) if context.snapshots.is_enabled else ()
        for id in ids | {item.branch for item in snapshots}:
            self._server.resources.feed.publish("deleted", session=id)
        return {"sessions": len(ids), "snapshots": len(snapshots), "left": left}

    async def wipe(self, tenant: str) -> dict[str, Any]:
        """Delete all data of a tenant, and what has no tenant: vectors, quarantined snapshots."""
        context = self._context
        # Forgotten sessions may still be written, too.
        await context.snapshots.wait_until_idle()
        conversations = [item for item in self._server.conversations if item.tenant == tenant]
        repository = context.snapshots.repository if context.snapshots.is_enabled else None
        result = await self.delete(conversations, lambda owner, _session: owner == tenant)
        if self._server.info.patched:
            try:
                await self._blocks.run(0, "block-drop", {"all": True, "tenant": tenant})
            except EvokeError as error:
                result["left"].append(f"copies in llama-server: {error}")
        elif self._server.info.obstacle != "unreachable":
            result["left"].append("the RAM cache of llama-server, until it is restarted")
        if repository is not None:
            repository.forget_aside()
            await repository.wait_for_deletions()
        context.embedding.forget()
        return result

    async def _delete_stored(self, selects: Selector, left: list[str]) -> Sequence[Snapshot]:
        """Delete snapshots and records on disk; returns the deleted snapshots."""
        repository = self._context.snapshots.repository
        selected = [item for item in repository.snapshots if selects(item.tenant, item.branch)]
        for snapshot in selected:
            repository.delete(snapshot, "asked")
        if selected:
            await repository.wait_for_deletions()
        owners = await repository.record_owners()
        sessions = {own.session for own in owners if selects(own.tenant, own.session)}
        for session in sessions:
            repository.remove_record(session)
        if sessions and any(own.session in sessions for own in await repository.record_owners()):
            left.append("records on disk")
        return selected

    async def _delete_live(self, conversation: Conversation) -> list[str]:
        """Delete the rows and copies of a conversation; returns what could not be deleted."""
        context = self._context
        left: list[str] = []
        try:
            slot = await self._slot_with_rows(conversation)
            if slot is not None:
                await self._empty(slot, conversation)
        except EvokeError as error:
            _log.warning(
                "the rows of session %s could not be deleted from its slot: %s",
                conversation.id,
                error,
            )
            left.append(f"rows in its slot: {error}")
        self._server.slots.pool.forget(conversation.id)
        context.records.forget(conversation.id)
        context.snapshots.forget_contents(conversation)
        try:
            if self._server.info.patched:
                # Taking the lock waits for a call that saves rows of the session.
                async with self._server.slots.locked(conversation.id):
                    await self._drop_copies(conversation)
        except EvokeError as error:
            left.append(f"copies in llama-server: {error}")
        return left

    async def _drop_copies(self, conversation: Conversation) -> None:
        """Delete the copies of a session, including those that the session no longer lists."""
        answer = await self._blocks.slot(0, conversation.tenant)
        labels = conversation.labels.union(copies_of(answer, conversation.id))
        if labels:
            await self._blocks.drop_copies(labels, conversation.tenant)

    async def _slot_with_rows(self, conversation: Conversation) -> int | None:
        """The slot that still has the rows of a conversation; None when no slot is known to."""
        context = self._context
        slot = self._server.slots.pool.slot_of(conversation.id)
        if self._server.info.patched:
            return slot if conversation.budgeted.epoch is not None else None
        contents, n_slots = conversation.snapshots.contents, len(self._server.slots.pool)
        # With snapshots.one_at_a_time, llama-server may have more slots than the pool.
        if contents is None or not 0 <= contents.slot < n_slots:
            return None
        if self._server.client.model and not await self._server.client.is_loaded():
            return None
        slots = await context.snapshots.list_slots()
        all_contents = [it.snapshots.contents for it in self._server.conversations]
        others = [other for other in all_contents if other and other.slot == contents.slot]
        is_reused = not contents.is_unchanged(slots) and any(
            other.is_unchanged(slots) for other in others
        )
        return None if is_reused else contents.slot

    async def _empty(self, slot: int, conversation: Conversation) -> None:
        """Erase a slot while no request has it; raises UpstreamError."""
        session = f"erasing-{conversation.id}"
        with await self._server.slots.acquire(
            session, conversation.tenant, True, slot=slot
        ) as lease:
            lease.vacated()
            view = None
            if self._server.info.patched:
                answer = await self._blocks.slot(slot, conversation.tenant, LATEST)
                view = SlotView.parse(answer)
                if view.epoch != conversation.budgeted.epoch:
                    return  # the slot has the rows of another session now
            try:
                await self._server.client.call("POST", f"/slots/{slot}?action=erase", {})
            except UpstreamRejected:
                if view is None:
                    raise
                await self._evict_all(view, conversation)

    async def _evict_all(self, view: SlotView, conversation: Conversation) -> None:
        """Evict all rows except the last, at a server that cannot erase (no --slot-save-path)."""
        rows = list(view.resident)
        if rows:
            rows[-1] = type(rows[-1])(rows[-1].start, rows[-1].end - 1)
        evicts = tuple(Evict(row) for row in rows if len(row))
        # Without `reuse=0` the next request could continue the tokens of the slot, all omitted.
        plan = Plan(evicts=evicts, reuse=0, reason="deleted")
        await self._blocks.run_plan(PlanCall(plan, view, conversation.owner))
