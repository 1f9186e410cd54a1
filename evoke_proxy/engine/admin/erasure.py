"""Deletes sessions permanently: rows, copies, files, vectors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import Any

from evoke_proxy.core.snapshots.snapshots import Snapshot
from evoke_proxy.engine.routing.served_model import ServedModel
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.errors import EvokeError, RequestError

_log = logging.getLogger(__name__)
# Whether to delete a snapshot or record of a tenant and a session.
Selector = Callable[[str, str], bool]


# Other tasks run after as many steps of a deletion.
_STEPS = 32


async def _in_steps(items: Iterable[str]) -> AsyncIterator[str]:
    """Yield the items; the event loop runs other tasks now and then."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _STEPS == 0:
            await asyncio.sleep(0)


class SessionEraser:
    """Deletes sessions at one llama-server.

    A result has the numbers of deleted `sessions` and `snapshots`, and in `left` one line for each
    part that could not be deleted.
    """

    def __init__(self, context: ServedModel) -> None:
        self._context = context
        self._server = context.server

    async def delete(self, conversations: list[Conversation], selects: Selector) -> dict[str, Any]:
        """Delete these conversations, and the files on disk that `selects` chooses.

        Raises RequestError (409), and deletes nothing, while a request of one of them runs. The
        list is emptied step by step: freeing hundreds of sessions at once blocks the event loop.
        """
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
        await self._wait_until_idle(ids)
        left: list[str] = []
        conversations.reverse()
        while conversations:
            left += await self._delete_live(conversations.pop())
            await asyncio.sleep(0)
        snapshots = await self._delete_stored(selects, left)
        async for id in _in_steps(ids | {item.branch for item in snapshots}):
            self._server.resources.feed.publish("deleted", session=id)
        return {"sessions": len(ids), "snapshots": len(snapshots), "left": left}

    async def wipe(self, tenant: str) -> dict[str, Any]:
        """Delete all data of a tenant, and what has no tenant: vectors, quarantined snapshots."""
        context = self._context
        # Forgotten sessions may still be written, too.
        await self._wait_until_idle()
        conversations = [item for item in self._server.conversations if item.tenant == tenant]
        result = await self.delete(conversations, lambda owner, _session: owner == tenant)
        if self._server.info.obstacle != "unreachable":
            try:
                if left := await self._server.strategy.drop_tenant(tenant):
                    result["left"].append(left)
            except EvokeError as error:
                result["left"].append(f"copies in llama-server: {error}")
        if (repository := context.repository) is not None:
            repository.forget_aside()
            await repository.wait_for_deletions()
        context.embedding.forget()
        return result

    async def _wait_until_idle(self, sessions: Collection[str] | None = None) -> None:
        """Wait until nothing of these sessions (None: of any) is being written to disk."""
        for strategy in self._server.strategies.each():
            await strategy.wait_until_idle(sessions)

    async def _delete_stored(self, selects: Selector, left: list[str]) -> Sequence[Snapshot]:
        """Delete snapshots and records on disk; returns the deleted snapshots."""
        repository = self._context.repository
        if repository is None:
            return ()
        selected = [item for item in repository.snapshots if selects(item.tenant, item.branch)]
        for snapshot in selected:
            repository.delete(snapshot, "asked")
        if selected:
            await repository.wait_for_deletions()
        owners = await repository.record_owners()
        sessions = {own.session for own in owners if selects(own.tenant, own.session)}
        async for session in _in_steps(sessions):
            repository.remove_record(session)
        if sessions and any(own.session in sessions for own in await repository.record_owners()):
            left.append("records on disk")
        return selected

    async def _delete_live(self, conversation: Conversation) -> list[str]:
        """Delete the rows and copies of a conversation; returns what could not be deleted."""
        context = self._context
        left: list[str] = []
        try:
            await self._erase_rows(conversation)
        except EvokeError as error:
            _log.warning(
                "the rows of session %s could not be deleted from its slot: %s",
                conversation.id,
                error,
            )
            left.append(f"rows in its slot: {error}")
        self._server.slots.pool.forget(conversation.id)
        context.records.forget(conversation.id)
        for strategy in self._server.strategies.each():
            strategy.forget_contents(conversation)
        try:
            await self._server.strategy.drop_copies(conversation)
        except EvokeError as error:
            left.append(f"copies in llama-server: {error}")
        return left

    async def _erase_rows(self, conversation: Conversation) -> None:
        """Erase the slots that still have rows of a conversation; raises UpstreamError."""
        for strategy in self._server.strategies.each():
            slot = await strategy.slot_with_rows(conversation)
            if slot is None:
                continue
            session = f"erasing-{conversation.id}"
            # No request has the slot meanwhile.
            with await self._server.slots.acquire(
                session, conversation.tenant, True, slot=slot
            ) as lease:
                lease.vacated()
                await strategy.erase_rows(slot, conversation)
