"""Deletes sessions for good: rows, copies, files, vectors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from evoke_proxy.adapters.llama.block_api import LATEST, BlockApi, PlanCall, copies_of
from evoke_proxy.core.model.plan import Evict, Plan
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.snapshots.snapshots import Snapshot
from evoke_proxy.engine.routing.served_model import ServedModel
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.errors import EvokeError, RequestError, UpstreamRejected

_log = logging.getLogger(__name__)
# Whether a snapshot or record is to be deleted, by its tenant and its session.
Selector = Callable[[str, str], bool]


class SessionEraser:
    """Deletes sessions at one llama-server.

    Results have the numbers of deleted `sessions` and `snapshots`, and in `left` one line for
    each thing that could not be reached.
    """

    def __init__(self, context: ServedModel) -> None:
        self._context = context
        self._blocks = BlockApi(context.client)

    async def delete(self, conversations: list[Conversation], selects: Selector) -> dict[str, Any]:
        """Delete these conversations, and the files on disk that `selects` chooses.

        Raises RequestError (409), and deletes nothing, while a request of one of them runs. The
        list is emptied one by one: freeing hundreds of sessions at once would block the event loop.
        """
        context = self._context
        busy = [item.id for item in conversations if item.in_use]
        if busy:
            raise RequestError(f"requests are under way of {', '.join(busy)}", "session_busy", 409)
        for item in conversations:  # at once: no request may continue them
            context.conversations.forget(item)
            del item
        ids = {item.id for item in conversations}
        await context.snapshots.wait_until_idle(
            ids
        )  # nothing of them is being written to disk after this
        left: list[str] = []
        conversations.reverse()
        while conversations:
            left += await self._delete_live(conversations.pop())
            await asyncio.sleep(0)
        snapshots = await self._delete_stored(selects, left) if context.snapshots.is_enabled else ()
        for id in ids | {item.branch for item in snapshots}:
            context.feed.publish("deleted", session=id)
        return {"sessions": len(ids), "snapshots": len(snapshots), "left": left}

    async def wipe(self, tenant: str) -> dict[str, Any]:
        """Delete everything of a tenant, and what names no tenant: vectors, unusable snapshots."""
        context = self._context
        await (
            context.snapshots.wait_until_idle()
        )  # what is written for sessions already forgotten, too
        conversations = [item for item in context.conversations if item.tenant == tenant]
        repository = context.snapshots.repository if context.snapshots.is_enabled else None
        result = await self.delete(conversations, lambda owner, _session: owner == tenant)
        if context.monitor.server.patched:
            try:
                await self._blocks.run(0, "block-drop", {"all": True, "tenant": tenant}, {})
            except EvokeError as error:
                result["left"].append(f"copies in llama-server: {error}")
        elif context.monitor.server.lacking != "unreachable":
            result["left"].append("what llama-server has in its own RAM cache, until it ends")
        if repository is not None:
            repository.forget_aside()
            await repository.wait_for_deletions()
        context.embedding.forget()
        return result

    async def _delete_stored(self, selects: Selector, left: list[str]) -> Sequence[Snapshot]:
        """Delete snapshots and records on disk; the snapshots that were deleted."""
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
        """Delete the rows and copies of a conversation; what could not be reached."""
        context = self._context
        left: list[str] = []
        try:
            slot = await self._slot_with_rows(conversation)
            if slot is not None:
                await self._empty(slot, conversation)
        except EvokeError as error:
            _log.warning("rows of session %s are left in a slot: %s", conversation.id, error)
            left.append(f"rows in its slot: {error}")
        context.slots.pool.forget(conversation.id)
        context.records.forget(conversation.id)
        context.snapshots.forget_contents(conversation)
        try:
            if context.monitor.server.patched:
                # The lock waits for a call that saves rows of the session now.
                async with context.slots.locked(conversation.id):
                    await self._drop_copies(conversation)
        except EvokeError as error:
            left.append(f"copies in llama-server: {error}")
        return left

    async def _drop_copies(self, conversation: Conversation) -> None:
        """Delete its copies, also those that the session does not list any more."""
        answer = await self._blocks.slot(0, conversation.tenant, {})
        labels = conversation.labels.union(copies_of(answer, conversation.id))
        if labels:
            await self._blocks.drop_copies(labels, conversation.tenant, {})

    async def _slot_with_rows(self, conversation: Conversation) -> int | None:
        """The slot that still has its rows, as far as the proxy can tell."""
        context = self._context
        slot = context.slots.pool.slot_of(conversation.id)
        if context.monitor.server.patched:
            return slot if conversation.budgeted.epoch is not None else None
        contents, n_slots = conversation.snapshots.contents, len(context.slots.pool)
        # Where requests run one at a time, llama-server may have more slots than the pool.
        if contents is None or not 0 <= contents.slot < n_slots:
            return None
        if context.client.model and not await context.client.is_loaded():
            return None
        slots = await context.snapshots.list_slots()
        all_contents = [it.snapshots.contents for it in context.conversations]
        others = [other for other in all_contents if other and other.slot == contents.slot]
        is_reused = not contents.is_unchanged(slots) and any(
            other.is_unchanged(slots) for other in others
        )
        return None if is_reused else contents.slot

    async def _empty(self, slot: int, conversation: Conversation) -> None:
        """Erase a slot while no request has it; raises UpstreamError."""
        session, context = f"erasing-{conversation.id}", self._context
        with await context.slots.acquire(session, conversation.tenant, True, slot=slot) as lease:
            lease.vacated()
            view = None
            if context.monitor.server.patched:
                answer = await self._blocks.slot(slot, conversation.tenant, {}, LATEST)
                view = SlotView.parse(answer)
                if view.epoch != conversation.budgeted.epoch:
                    return  # the rows are those of another session by now
            try:
                await context.client.call("POST", f"/slots/{slot}?action=erase", {})
            except UpstreamRejected:
                if view is None:
                    raise
                await self._evict_all(view, conversation)

    async def _evict_all(self, view: SlotView, conversation: Conversation) -> None:
        """Evict all rows but the last, on a server that runs without --slot-save-path."""
        rows = list(view.resident)
        if rows:
            rows[-1] = type(rows[-1])(rows[-1].start, rows[-1].end - 1)
        plan = Plan(evicts=tuple(Evict(row) for row in rows if len(row)), reason="deleted")
        await self._blocks.run_plan(PlanCall(plan, view, conversation.owner), {})
