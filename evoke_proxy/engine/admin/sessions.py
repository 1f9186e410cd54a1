"""Shows operators the sessions at one llama-server, and changes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evoke_proxy import __version__
from evoke_proxy.adapters.llama.block_api import LATEST, BlockApi, PlanCall, copies_in
from evoke_proxy.core.model.blocks import Span, clipped, count
from evoke_proxy.core.model.plan import Drop, Evict, Plan
from evoke_proxy.core.policy.pins import change_pins, check_least_budget
from evoke_proxy.core.policy.registry import block_scores
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.request.options import SESSION_NAMES
from evoke_proxy.core.session.block_map import RowLocations, block_map, spans, totals
from evoke_proxy.core.session.identity import hint_of_name
from evoke_proxy.core.snapshots.snapshots import (
    Snapshot,
    branch_summary,
    by_branch,
    snapshot_fields,
)
from evoke_proxy.engine.admin.erasure import SessionEraser
from evoke_proxy.engine.routing.served_model import ServedModel
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.storage.export import archive
from evoke_proxy.errors import EvokeError, PlanRefused, RequestError

_log = logging.getLogger(__name__)
# llama-server answers between two decodes; a view for operators does not wait longer than this.
_VIEW_TIMEOUT_S = 2.0
# The block map of a session with more blocks, or with a longer question, is made in a thread.
_MAX_INLINE_BLOCKS, _MAX_INLINE_CHARS = 64, 512
# llama-server lists changed copies, but not deleted ones: after this time the whole list is read
# again.
_FULL_LIST_S = 30.0
_MAX_TENANTS = 8


@dataclass(slots=True)
class _CopyList:
    """The copies of one tenant; the whole list was read at `read_at` (monotonic seconds)."""

    version: int
    blocks: dict[str, Mapping[str, Any]]
    read_at: float


class CopyLists:
    """Caches the list of a tenant's copies, and reads only the changes."""

    def __init__(self, blocks: BlockApi) -> None:
        self._blocks = blocks
        self._lists: OrderedDict[str, _CopyList] = OrderedDict()

    async def slot(
        self, slot: int, tenant: str
    ) -> tuple[dict[str, Any], Mapping[str, Mapping[str, Any]]]:
        """The state of a slot, and all copies of a tenant, by label; raises UpstreamError.

        A copy that was deleted in the last half minute may still be listed. A tenant may have so
        many that reading all of them in each call would delay other requests.
        """
        cached = self._lists.get(tenant)
        if cached is not None and time.monotonic() - cached.read_at > _FULL_LIST_S:
            cached = None
        since = str(cached.version) if cached is not None else ""
        answer = await self._blocks.slot(slot, tenant, since)
        version = int(answer.get("version") or 0)
        blocks = dict(await asyncio.to_thread(copies_in, answer))
        if cached is not None and version >= cached.version:
            cached.version = version
            cached.blocks.update(blocks)
        else:
            cached = _CopyList(version, blocks, time.monotonic())
        if version:
            self._lists[tenant] = cached
            self._lists.move_to_end(tenant)
        while len(self._lists) > _MAX_TENANTS:
            self._lists.popitem(last=False)
        return answer, cached.blocks


class SessionAdmin:
    """Shows and changes the sessions at one llama-server, or of one model behind a router.

    Methods that take an `id` raise RequestError (404) when no session has it, and (409) when a
    request of that session runs and the change needs its slot.
    """

    def __init__(self, context: ServedModel) -> None:
        self.context = context
        self.eraser = SessionEraser(context)
        self._server = context.server
        self._feed = context.server.resources.feed
        self._blocks = context.server.resources.calls.blocks
        self._copies = CopyLists(self._blocks)
        # By session: the location of its blocks in the latest answer of llama-server.
        self._last_locations: dict[str, RowLocations] = {}

    @property
    def branches(self) -> dict[str, list[Snapshot]]:
        """Snapshots by the session that they belong to."""
        repository = self.context.repository
        return by_branch(repository.snapshots) if repository is not None else {}

    def rows(self, branches: dict[str, list[Snapshot]]) -> Iterator[dict[str, Any]]:
        """One row for each live session, the most recently used first.

        The snapshots of live sessions are removed from `branches`.
        """
        for conversation in reversed(list(self._server.conversations)):
            if not conversation.ephemeral:
                yield self._row(conversation, branches)

    def has(self, id: str) -> bool:
        """Whether the session is live here."""
        return self._server.conversations.get(id) is not None

    def status(self) -> dict[str, Any]:
        """The state of the server, without a call of it."""
        pool, monitor = self._server.slots.pool, self._server.monitor
        server, policy = monitor.server, monitor.policy
        trouble = self._server.strategy.problem
        return {
            "version": __version__,
            "server": monitor.describe(),
            "reachable": server.obstacle != "unreachable" or monitor.key_problem is not None,
            "build": server.build,
            "slots": [pool.holder(slot) for slot in range(len(pool))],
            "queued": pool.queued,
            "policy": policy.name,
            "budget": policy.budget,
            "degraded": monitor.is_degraded or (trouble is not None and not trouble.is_off),
            "snapshots_off": trouble is not None and trouble.is_off,
            "event": self._feed.latest,
        }

    async def show(self, id: str) -> dict[str, Any]:
        """One session: the location of each block, the latest turns, the snapshots."""
        conversation, items = self._find(id)
        snapshots: dict[str, Any] = {"snapshots": [snapshot_fields(item) for item in items]}
        if conversation is None:
            nothing = {"blocks": [], "totals": totals(()), "history": []}
            return stored_row(id, items) | nothing | snapshots
        where, is_fresh = await self._locate(conversation)
        blocks = await self._block_map(conversation, where, self._server.monitor.config.page.names)
        return (
            self._row(conversation, {_branch(conversation): items})
            | snapshots
            | {
                "fresh": is_fresh,
                "blocks": blocks,
                "totals": totals(blocks),
                "history": [turn.to_json() for turn in conversation.history],
            }
        )

    def fork(self, id: str, name: str) -> dict[str, Any]:
        """Name a branch of a session: requests with this name begin with the rows it has.

        Returns the row of the branch. Raises RequestError: 400 for a name that no header can carry,
        409 when it is in use, and where llama-server cannot share rows between sessions.
        """
        hint = hint_of_name(name)
        if hint is None:
            raise RequestError(f"name: must be {SESSION_NAMES}")
        parent = self._live(id)
        info, has_directory = self._server.info, self.context.records.slot_snapshots is not None
        if not (info.can_share or (info.needs_full_state and has_directory)):
            raise RequestError(
                "this llama-server cannot share rows between sessions, so that a branch would be"
                " decoded anew",
                "cannot_share",
                409,
            )
        branch = self._server.conversations.fork(parent, hint)
        if branch is None:
            raise RequestError(f"another session has the name {name!r}", "name_in_use", 409)
        self._feed.publish("session", session=branch.id, forked_from=id)
        return self._row(branch, {})

    def pin(self, id: str, pinned: bool) -> None:
        """Pin or unpin a session: it and its snapshots are never removed for others."""
        conversation, items = self._find(id)
        if conversation is not None:
            conversation.pin(pinned)
            self.context.records.update_overrides(conversation)
        if (repository := self.context.repository) is not None:
            for item in items:
                repository.pin(item, pinned)
        self._feed.publish("session", session=id, pinned=pinned)

    def set_budget(self, id: str, budget: int | None, own: bool = True) -> None:
        """Give a session a budget in tokens from its next turn on; None: no bound.

        A budget beyond the cells of a slot counts as these cells. With `own` false it gets the
        default budget. Raises BudgetTooSmall when the budget cannot hold what must stay.
        """
        conversation = self._live(id)
        policy = self._server.monitor.policy
        config = replace(conversation.session.config, budget=budget if own else policy.budget)
        check_least_budget(config)
        conversation.set_budget(config, own)
        self.context.records.update_overrides(conversation)
        self._feed.publish("session", session=id, budget=config.within_cells().budget)

    def pin_block(self, id: str, span: Span, pinned: bool) -> None:
        """Pin or unpin these positions: pinned ones stay in the cache, from the next turn on.

        Raises PinBudgetExceeded when too many tokens would be pinned.
        """
        conversation = self._live(id)
        session, blocks = conversation.session, conversation.session.layout.blocks
        inside = [block.span for block in blocks.pick(blocks.within([span]))]
        if not inside:
            raise RequestError(f"no block lies in [{span.start}, {span.end})", "unknown_block", 404)
        config = session.config.within_cells()
        pins = change_pins(session.pins, session.layout, span, pinned, config)
        conversation.pin_blocks(pins)
        self.context.records.update_overrides(conversation)
        self._feed.publish("block", session=id, pinned=pinned, spans=spans(inside))

    async def drop_block(self, id: str, span: Span) -> None:
        """Drop the rows and copies of these positions; recovering them needs decoding."""
        conversation = self._live(id)
        async with self._in_slot(conversation) as view:
            layout = conversation.session.layout
            inside = layout.blocks.pick(layout.blocks.within([span]))
            labels = {block.label for block in inside}
            labels |= {item.label for item in layout.ranges if span.encloses(item.span)}
            drops = tuple(Drop(label) for label in sorted(labels))
            rows = () if view is None else clipped(view.resident, span)
            plan = Plan(evicts=tuple(Evict(row) for row in rows), drops=drops, reason="operator")
            n_evicted = sum(count(clipped(rows, block.span)) > 0 for block in inside)
            try:
                if view is not None:
                    await self._blocks.run_plan(PlanCall(plan, view, conversation.owner))
                elif labels:
                    await self._blocks.drop_copies(labels, conversation.tenant)
            except PlanRefused as refused:
                raise RequestError(
                    f"llama-server refuses to drop the blocks: {refused}", refused.type, 409
                ) from refused
            metrics = self._server.resources.metrics
            metrics.count_evictions("operator", n_evicted)
            conversation.session.failed(labels)
            conversation.budgeted.rows_evicted(count(rows))
        self._feed.publish("block", session=id, dropped=spans([span]), evicted=spans(rows))

    async def delete(self, id: str) -> dict[str, Any]:
        """Delete a session: rows, copies, snapshots; see SessionEraser.delete."""
        conversation, _ = self._find(id)
        ids = {id} if conversation is None else {conversation.id, _branch(conversation)}
        live = [conversation] if conversation is not None else []
        return await self.eraser.delete(live, lambda _tenant, session: session in ids)

    async def wipe(self, tenant: str) -> dict[str, Any]:
        """Delete everything of a tenant; see SessionEraser.wipe."""
        return await self.eraser.wipe(tenant)

    async def export(self, id: str) -> Iterator[bytes]:
        """A tar archive of a session, in pieces; see `archive`."""
        conversation, items = self._find(id)
        repository, row = self.context.repository, {}
        # Without a repository there are no items either.
        directory = repository.files.directory if repository is not None else Path()
        if conversation is not None:
            where, is_fresh = await self._locate(conversation)
            row = self._row(conversation, {}) | {
                "fresh": is_fresh,
                "prompt": conversation.tokens.tolist(),
                "blocks": await self._block_map(conversation, where, names=True),
                "history": [turn.to_json() for turn in conversation.history],
            }
        return archive(directory, items, {"session": row})

    def _row(
        self, conversation: Conversation, branches: dict[str, list[Snapshot]]
    ) -> dict[str, Any]:
        items = branches.pop(_branch(conversation), [])
        return conversation.summary(self._server.slots.pool) | {
            "snapshots": len(items),
            "bytes": sum(item.n_bytes for item in items),
            "live": True,
            "own_budget": conversation.own_budget,
            "limit": conversation.session.config.within_cells().budget,
        }

    async def _block_map(
        self, conversation: Conversation, where: RowLocations, names: bool
    ) -> list[dict[str, Any]]:
        """The blocks of a session.

        A long map is made in a thread, and not while a turn is planned, which uses the same index.
        """
        session = conversation.session

        def make() -> list[dict[str, Any]]:
            layout, turn = session.layout, session.decided
            scores = None
            if turn is not None and len(turn.view.blocks) == len(layout.blocks):
                scores = block_scores(turn.view, turn.query, turn.config)
            return block_map(layout, where, scores, session.pins, names)

        decided = session.decided
        is_long = len(session.layout.blocks) > _MAX_INLINE_BLOCKS or (
            decided is not None and len(decided.query.text) > _MAX_INLINE_CHARS
        )
        return await self._server.resources.worker.run(conversation, is_long, make)

    async def _locate(self, conversation: Conversation) -> tuple[RowLocations, bool]:
        """The location of the rows and copies of a session, and whether it is current.

        When llama-server does not answer in time, the location is that of its latest answer.
        """
        server, slot = self._server.info, self._server.slots.pool.slot_of(conversation.id)
        if not server.answers_block_calls:
            return RowLocations(), not server.sleeping
        try:
            async with asyncio.timeout(_VIEW_TIMEOUT_S):
                answer, copies = await self._copies.slot(slot or 0, conversation.tenant)
            view = SlotView.parse(answer)
        except (EvokeError, TimeoutError) as error:
            _log.info(
                "session %s is shown as it was after its latest answer: %s",
                conversation.id,
                error or "llama-server is busy",
            )
            return self._last_locations.get(conversation.id, RowLocations()), False
        has_rows = slot is not None and (
            conversation.in_use or conversation.budgeted.epoch == view.epoch
        )
        rows, n_tokens = (view.resident, view.n_tokens) if has_rows else ((), 0)
        labels = conversation.session.layout.usable_copies
        if len(labels) > _MAX_INLINE_BLOCKS:
            where = await asyncio.to_thread(RowLocations.parse, copies, labels, rows, n_tokens)
        else:
            where = RowLocations.parse(copies, labels, rows, n_tokens)
        live = {item.id for item in self._server.conversations}
        self._last_locations = {
            id: locations for id, locations in self._last_locations.items() if id in live
        }
        self._last_locations[conversation.id] = where
        return where, True

    @asynccontextmanager
    async def _in_slot(self, conversation: Conversation) -> AsyncIterator[SlotView | None]:
        """Lease the slot of a session, or lock the session when it has no slot.

        Yields the state of the slot; None when the slot has no rows of the session. No turn of the
        session runs meanwhile. Raises RequestError (409) when one runs already.
        """
        if conversation.in_use:
            raise RequestError(
                "a request of this session runs now; try again later", "session_busy", 409
            )
        slots, id = self._server.slots, conversation.id
        with conversation.using():
            slot = slots.pool.slot_of(id)
            if slot is None or conversation.budgeted.epoch is None:
                async with slots.locked(id):
                    yield None
                return
            with await slots.acquire(id, conversation.tenant, slot=slot) as lease:
                lease.vacated()
                answer = await self._blocks.slot(slot, conversation.tenant, LATEST)
                view = SlotView.parse(answer)
                yield view if view.epoch == conversation.budgeted.epoch else None

    def _find(self, id: str) -> tuple[Conversation | None, list[Snapshot]]:
        conversation = self._server.conversations.get(id)
        if conversation is not None and conversation.ephemeral:
            conversation = None
        branch = _branch(conversation) if conversation is not None else id
        items = self.branches.get(branch, [])
        if conversation is None and not items:
            raise RequestError(f"no session is called {id!r}", "unknown_session", 404)
        return conversation, items

    def _live(self, id: str) -> Conversation:
        conversation, _ = self._find(id)
        if conversation is None:
            raise RequestError(
                "this session is only stored on disk, so this change does not apply to it",
                "session_not_live",
                409,
            )
        return conversation


def stored_row(id: str, items: Sequence[Snapshot]) -> dict[str, Any]:
    """The row of a session that exists only as snapshots on disk."""
    return branch_summary(id, items) | {"live": False, "name": None, "turns": 0}


def _branch(conversation: Conversation) -> str:
    return conversation.snapshots.branch or conversation.id
