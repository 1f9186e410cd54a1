"""What an operator may see and change of conversations, of live ones and of those on disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from evoke_proxy import __version__
from evoke_proxy.adapters.llama.block_api import LATEST, BlockApi, PlanCall
from evoke_proxy.core.model.blocks import Span, clipped, count
from evoke_proxy.core.model.plan import Drop, Evict, Plan
from evoke_proxy.core.policy import pins
from evoke_proxy.core.policy.bounds import check_room
from evoke_proxy.core.policy.registry import worth
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.session.block_map import Whereabouts, block_map, spans, totals
from evoke_proxy.core.snapshots.snapshots import Snapshot, branch_summary, by_branch, described
from evoke_proxy.engine.admin.context import Reach
from evoke_proxy.engine.admin.copies import Copies
from evoke_proxy.engine.admin.erasure import Eraser
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.storage.export import archive
from evoke_proxy.errors import EvokeError, PlanRefused, RequestError

_log = logging.getLogger(__name__)
# llama-server answers between two decodes; who only looks does not wait for long ones.
_LOOK_S = 2.0
# The map of more blocks is made in a thread.
_MOST_BLOCKS = 64


class Operator:
    """Ids are those of `sessions`; RequestError (404) for one that is none, (409) for one that a
    request is using when it is to be changed in its slot."""

    def __init__(self, reach: Reach) -> None:
        self._its = reach
        self._blocks = BlockApi(reach.upstream)
        self._eraser = Eraser(reach)
        self._copies = Copies(reach.upstream)
        self._seen: dict[str, Whereabouts] = {}

    @property
    def branches(self) -> dict[str, list[Snapshot]]:
        """Snapshots by the session they are of."""
        strategy = self._its.keeper
        return by_branch(strategy.repository.snapshots) if strategy.is_enabled else {}

    def rows(self, branches: dict[str, list[Snapshot]]) -> Iterator[dict[str, Any]]:
        """Every one, the latest used first; what they have on disk is taken out of `branches`."""
        for known in reversed(list(self._its.conversations)):
            if not known.passing:
                yield self._summary(known, branches)

    def has(self, id: str) -> bool:
        """Whether it is live, and one of these."""
        return self._its.conversations.get(id) is not None

    def status(self) -> dict[str, Any]:
        """What is known of the whole without asking anybody."""
        pool, watch = self._its.slots.pool, self._its.watch
        server, policy = watch.server, watch.config.policy
        return {
            "version": __version__,
            "server": watch.described(),
            "reachable": server.lacking != "unreachable",
            "build": server.build,
            "slots": [pool.holder(slot) for slot in range(len(pool))],
            "queued": pool.queued,
            "policy": policy.name,
            "budget": policy.budget,
            "event": self._its.feed.latest,
        }

    async def show(self, id: str) -> dict[str, Any]:
        """One of them: where each of its blocks is, its latest turns, its snapshots."""
        known, items = self._find(id)
        said: dict[str, Any] = {"snapshots": [described(item) for item in items]}
        if known is None:
            return on_disk(id, items) | {"blocks": [], "totals": totals(()), "history": []} | said
        where, fresh = await self._where(known)
        blocks = await self._map(known, where, self._its.watch.config.page.names)
        row = self._summary(known, {_branch(known): items})
        said |= {"fresh": fresh, "blocks": blocks, "totals": totals(blocks)}
        return row | said | {"history": [turn.shown() for turn in known.history]}

    def pin(self, id: str, pinned: bool) -> None:
        """A pinned one is not forgotten, and its snapshots stay whatever room they take."""
        known, items = self._find(id)
        if known is not None:
            known.pinned = pinned
            self._its.records.reordered(known)
        for item in items:
            self._its.keeper.repository.pin(item, pinned)
        self._its.feed.publish("session", session=id, pinned=pinned)

    def set_budget(self, id: str, budget: int | None, own: bool = True) -> None:
        """From its next turn on it may keep so many tokens, None: all; not `own`: what the others
        may. BudgetTooSmall when that cannot hold what must stay."""
        known = self._live(id)
        policy = self._its.watch.config.policy
        config = replace(known.session.config, budget=budget if own else policy.budget)
        check_room(config)
        known.own_budget, known.session.config = own, config
        self._its.records.reordered(known)
        self._its.feed.publish("session", session=id, budget=config.budget)

    def pin_block(self, id: str, span: Span, pinned: bool) -> None:
        """These positions stay in the cache from the next turn on; PinBudgetExceeded when that
        were too many."""
        known = self._live(id)
        session, blocks = known.session, known.session.layout.blocks
        own = [block.span for block in blocks.pick(blocks.within([span]))]
        if not own:
            raise RequestError(f"no block lies in [{span.start}, {span.end})", "unknown_block", 404)
        session.pins = pins.changed(session.pins, session.layout, span, pinned, session.config)
        self._its.records.reordered(known)
        self._its.feed.publish("block", session=id, pinned=pinned, spans=spans(own))

    async def drop_block(self, id: str, span: Span) -> None:
        """Their rows and copies are gone, until the client's text is decoded again."""
        known = self._live(id)
        async with self._in_slot(known) as view:
            layout = known.session.layout
            inside = layout.blocks.pick(layout.blocks.within([span]))
            labels = {block.label for block in inside}
            labels |= {item.label for item in layout.ranges if span.encloses(item.span)}
            drops = tuple(Drop(label) for label in sorted(labels))
            rows = () if view is None else clipped(view.resident, span)
            plan = Plan(evicts=tuple(Evict(row) for row in rows), drops=drops, reason="operator")
            try:
                if view is not None:
                    await self._blocks.run_plan(PlanCall(plan, view, known.owner), {})
                elif labels:
                    await self._blocks.drop_copies(labels, known.tenant, {})
            except PlanRefused as refused:
                raise RequestError(f"llama-server: {refused}", refused.type, 409) from refused
            known.session.failed(labels)
            known.n_resident -= count(rows)
        self._its.feed.publish("block", session=id, dropped=spans([span]), evicted=spans(rows))

    async def delete(self, id: str) -> dict[str, Any]:
        """Forget it: rows, copies, snapshots; how far that went."""
        known, _ = self._find(id)
        ids = {id} if known is None else {known.id, _branch(known)}
        there = [known] if known is not None else []
        return await self._eraser.delete(there, lambda _, of: of in ids)

    async def wipe(self, tenant: str) -> dict[str, Any]:
        """Forget all of a tenant; how far that went."""
        return await self._eraser.wipe(tenant)

    async def export(self, id: str) -> Iterator[bytes]:
        """A tar of it, see `archive`."""
        known, items = self._find(id)
        directory, about = self._its.keeper.repository.files.directory, {}
        if known is not None:
            where, fresh = await self._where(known)
            about = self._summary(known, {}) | {
                "fresh": fresh,
                "prompt": known.tokens.tolist(),
                "blocks": await self._map(known, where, names=True),
                "history": [turn.shown() for turn in known.history],
            }
        return archive(directory, items, {"session": about})

    def _summary(self, known: Conversation, branches: dict[str, list[Snapshot]]) -> dict[str, Any]:
        items = branches.pop(_branch(known), [])
        kept = {"snapshots": len(items), "bytes": sum(item.n_bytes for item in items)}
        own = {"live": True, "own_budget": known.own_budget}
        limit = known.session.config.budget
        return known.summary(self._its.slots.pool) | kept | own | {"limit": limit}

    async def _map(
        self, known: Conversation, where: Whereabouts, names: bool
    ) -> list[dict[str, Any]]:
        """Its blocks. Of thousands that takes long, so a thread does it, while no turn of the
        session is planned: both use its index."""
        session = known.session

        def mapped() -> list[dict[str, Any]]:
            layout, turn = session.layout, session.decided
            scores = None
            if turn is not None and len(turn.view.blocks) == len(layout.blocks):
                scores = worth(turn.view, turn.question, turn.config)
            return block_map(layout, where, scores, session.pins, names)

        return await known.computed(mapped, len(session.layout.blocks) > _MOST_BLOCKS)

    async def _where(self, known: Conversation) -> tuple[Whereabouts, bool]:
        """Where its rows and copies are; False with what was seen last when nobody says now."""
        server, slot = self._its.watch.server, self._its.slots.pool.slot_of(known.id)
        if not server.patched or server.sleeping:
            return Whereabouts(), not server.sleeping
        try:
            async with asyncio.timeout(_LOOK_S):
                answer = await self._copies.ask(slot or 0, known.tenant)
            view = SlotView.parse(answer)
        except (EvokeError, TimeoutError) as error:
            _log.info("session %s cannot be looked at now: %s", known.id, error or "busy")
            return self._seen.get(known.id, Whereabouts()), False
        there = slot is not None and (known.in_use or known.epoch == view.epoch)
        rows, length = (view.resident, view.n_tokens) if there else ((), 0)
        where = Whereabouts.parse(answer, known.labels, rows, length)
        self._seen = {k.id: self._seen[k.id] for k in self._its.conversations if k.id in self._seen}
        self._seen[known.id] = where
        return where, True

    @asynccontextmanager
    async def _in_slot(self, known: Conversation) -> AsyncIterator[SlotView | None]:
        """Its slot, nobody else's meanwhile; None when its rows are in none.

        No turn of it runs meanwhile, whether it has a slot or not.
        """
        busy = RequestError("a request of this session is under way", "session_busy", 409)
        if known.in_use:
            raise busy
        with known.using():
            slot = self._its.slots.pool.slot_of(known.id)
            if slot is None or known.epoch is None:
                async with self._its.slots.locked(known.id):
                    yield None
                return
            with await self._its.slots.acquire(known.id, known.tenant, slot=slot) as lease:
                lease.vacated()
                answer = await self._blocks.slot(slot, known.tenant, {}, LATEST)
                view = SlotView.parse(answer)
                yield view if view.epoch == known.epoch else None

    def _find(self, id: str) -> tuple[Conversation | None, list[Snapshot]]:
        known = self._its.conversations.get(id)
        if known is not None and known.passing:
            known = None
        items = self.branches.get(_branch(known) if known is not None else id, [])
        if known is None and not items:
            raise RequestError(f"no session is called {id!r}", "unknown_session", 404)
        return known, items

    def _live(self, id: str) -> Conversation:
        known, _ = self._find(id)
        if known is None:
            raise RequestError("this session is on disk only", "session_not_live", 409)
        return known


def on_disk(id: str, items: Sequence[Snapshot]) -> dict[str, Any]:
    """What is shown of a session that only its snapshots are left of."""
    return branch_summary(id, items) | {"live": False, "name": None, "turns": 0}


def _branch(known: Conversation) -> str:
    return known.snapshots.branch or known.id
