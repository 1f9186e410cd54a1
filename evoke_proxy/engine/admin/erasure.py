"""Forgetting conversations for good: their rows, copies, files, vectors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from evoke_proxy.adapters.llama.block_api import LATEST, BlockApi, PlanCall, copies_of
from evoke_proxy.core.model.plan import Evict, Plan
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.snapshots.snapshots import Snapshot
from evoke_proxy.engine.admin.context import Reach
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.errors import EvokeError, RequestError, UpstreamRejected

_log = logging.getLogger(__name__)
# Whether a snapshot or a record is meant, by whose and of which session it is.
Mine = Callable[[str, str], bool]


class Eraser:
    """What it returns says what was forgotten, and in `left` what it could not reach."""

    def __init__(self, reach: Reach) -> None:
        self._its = reach
        self._blocks = BlockApi(reach.upstream)

    async def delete(self, known: list[Conversation], mine: Mine) -> dict[str, Any]:
        """Forget these, and what is `mine` on disk; RequestError (409),
        and nothing is changed, while one of them is used.

        They are taken out of the list one by one: to free hundreds of sessions at once would hold
        up the event loop.
        """
        busy = [item.id for item in known if item.in_use]
        if busy:
            raise RequestError(f"requests are under way of {', '.join(busy)}", "session_busy", 409)
        for item in known:  # at once: nothing is to go on from them any more
            self._its.conversations.forget(item)
            del item
        ids = {one.id for one in known}
        await self._its.keeper.wait_until_idle(ids)
        left: list[str] = []
        known.reverse()
        while known:
            left += await self._forget(known.pop())
            await asyncio.sleep(0)
        gone = await self._off_disk(mine, left) if self._its.keeper.is_enabled else ()
        for id in ids | {item.branch for item in gone}:
            self._its.feed.publish("deleted", session=id)
        return {"sessions": len(ids), "snapshots": len(gone), "left": left}

    async def wipe(self, tenant: str) -> dict[str, Any]:
        """All of one tenant, and what cannot be told by tenant: vectors, snapshots set aside."""
        await self._its.keeper.wait_until_idle()
        known = [item for item in self._its.conversations if item.tenant == tenant]
        vault = self._its.keeper.repository if self._its.keeper.is_enabled else None
        done = await self.delete(known, lambda owner, _: owner == tenant)
        if self._its.watch.server.patched:
            try:
                everything = {"all": True, "tenant": tenant}
                await self._blocks.run(0, "block-drop", everything, {})
            except EvokeError as error:
                done["left"].append(f"copies in llama-server: {error}")
        elif self._its.watch.server.lacking != "unreachable":
            done["left"].append("what llama-server has in its own RAM cache, until it ends")
        if vault is not None:
            vault.forget_aside()
            await vault.wait_for_deletions()
        self._its.embedding.forget()
        return done

    async def _off_disk(self, mine: Mine, left: list[str]) -> Sequence[Snapshot]:
        """The snapshots that are gone, and the records with them."""
        vault = self._its.keeper.repository
        gone = [item for item in vault.snapshots if mine(item.tenant, item.branch)]
        for snapshot in gone:
            vault.delete(snapshot, "asked")
        if gone:
            await vault.wait_for_deletions()
        sessions = {
            own.session for own in await vault.record_owners() if mine(own.tenant, own.session)
        }
        for session in sessions:
            vault.remove_record(session)
        if sessions and any(own.session in sessions for own in await vault.record_owners()):
            left.append("records on disk")
        return gone

    async def _forget(self, known: Conversation) -> list[str]:
        """Everything of one that its snapshots do not hold; what is left of it."""
        left: list[str] = []
        try:
            slot = await self._place(known)
            if slot is not None:
                await self._empty(slot, known)
        except EvokeError as error:
            _log.warning("session %s is left in its slot: %s", known.id, error)
            left.append(f"rows in its slot: {error}")
        self._its.slots.pool.forget(known.id)
        self._its.records.forget(known.id)
        self._its.keeper.forget_contents(known)
        try:
            if self._its.watch.server.patched:
                async with self._its.slots.locked(known.id):  # its rows may be being saved now
                    await self._drop(known)
        except EvokeError as error:
            left.append(f"copies in llama-server: {error}")
        return left

    async def _drop(self, known: Conversation) -> None:
        """Its copies, those too that it has forgotten itself."""
        answer = await self._blocks.slot(0, known.tenant, {})
        labels = known.labels.union(copies_of(answer, known.id))
        if labels:
            await self._blocks.drop_copies(labels, known.tenant, {})

    async def _place(self, known: Conversation) -> int | None:
        """The slot that still has its rows, as far as is known."""
        slot = self._its.slots.pool.slot_of(known.id)
        if self._its.watch.server.patched:
            return slot if known.epoch is not None else None
        held, n_slots = known.snapshots.contents, len(self._its.slots.pool)
        # It may be in a slot that is none of ours: where requests go one at a time, one is.
        if held is None or not 0 <= held.slot < n_slots:
            return None
        if self._its.routed is not None and not await self._its.routed.is_loaded():
            return None
        slots = await self._its.keeper.list_slots()
        left = [it.snapshots.contents for it in self._its.conversations if it.snapshots.contents]
        others = [other for other in left if other.slot == held.slot]
        taken = not held.is_unchanged(slots) and any(it.is_unchanged(slots) for it in others)
        return None if taken else held.slot

    async def _empty(self, slot: int, known: Conversation) -> None:
        """Nobody else's request is in the slot meanwhile; raises what llama-server refuses."""
        name = f"erasing-{known.id}"
        with await self._its.slots.acquire(name, known.tenant, True, slot=slot) as lease:
            lease.vacated()
            view = None
            if self._its.watch.server.patched:
                answer = await self._blocks.slot(slot, known.tenant, {}, LATEST)
                view = SlotView.parse(answer)
                if view.epoch != known.epoch:
                    return  # somebody else's rows by now
            try:
                await self._its.upstream.call("POST", f"/slots/{slot}?action=erase", {})
            except UpstreamRejected:
                if view is None:
                    raise
                await self._evict_all(view, known)

    async def _evict_all(self, view: SlotView, known: Conversation) -> None:
        """A server that erases no slots (it runs without --slot-save-path) keeps its last row."""
        rows = list(view.resident)
        if rows:
            rows[-1] = type(rows[-1])(rows[-1].start, rows[-1].end - 1)
        plan = Plan(evicts=tuple(Evict(row) for row in rows if len(row)), reason="deleted")
        await self._blocks.run_plan(PlanCall(plan, view, known.owner), {})
