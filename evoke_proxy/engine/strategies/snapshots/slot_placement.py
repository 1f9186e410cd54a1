"""Where a request of a conversation goes on an unpatched server, and what it finds there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from evoke_proxy.adapters.llama.stock_api import Client, Prefilled
from evoke_proxy.core.model.counts import seconds_of
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.request.look_ahead import STEP, kind_of
from evoke_proxy.core.snapshots.costs import cost_of
from evoke_proxy.core.snapshots.held import Held, SlotStatus, restarted
from evoke_proxy.core.snapshots.snapshots import Match
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.slot_queue import SlotLease, until_over
from evoke_proxy.engine.storage.snapshot_repository import Label
from evoke_proxy.engine.strategies.snapshots.parts import Parts
from evoke_proxy.engine.strategies.snapshots.turn import SnapshotTurn
from evoke_proxy.engine.turns.forwarding import Forwarding
from evoke_proxy.errors import UpstreamError, UpstreamRejected

_log = logging.getLogger(__name__)


class SlotPlacement:
    """Where conversations are; what each has left is its `held`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def prepare(
        self, way: Forwarding, seat: SnapshotTurn, known: Conversation, client: Client
    ) -> None:
        """Put as much of the prompt into a slot as is cheaper to restore than to decode, and save
        its boundary when that is worth it; `seat.slot` is where the request is to go then."""
        assert way.lease is not None
        way.stage = "look"
        seat.before = await self._look(way.lease, client)
        seat.branch = known.branch or known.id
        held, known.held = known.held, None
        state = self._live(held, way.lease.slot, seat.before)
        memory = self._parts.facts.memory
        memory.looked(held, seat.before)
        if state is not None and not state.reaches(seat.prompt):
            await self._parts.calls.erase(state.slot, client)
            held = state = None
        if held is not None:
            memory.came(held, seat.prompt)
        reuse = memory.reuse(held, state is not None, seat.prompt)
        way.decision = "live" if state is not None else "new"
        if state is None and held is not None and held.at > memory.ram_since:
            seat.in_ram, seat.hoped = held, common_prefix(held.tokens, seat.prompt)
            way.decision = "ram"
        restored = await self._restore(way, seat, reuse, client)
        if restored is not None:
            state, way.decision, seat.in_ram = restored, "restored", None
            assert seat.match is not None
            seat.branch = known.branch = seat.match.snapshot.branch
        seat.floor = state.floor if state is not None else 0
        seat.slot = self._pinned(seat, way.lease.slot)
        await self._save(way, seat, state, reuse, client)

    def _live(
        self, held: Held | None, slot: int, looks: Sequence[SlotStatus] | None
    ) -> Held | None:
        """What a conversation has left, if it is still there and can be reached from its lease."""
        if held is None or not held.still(looks):
            return None
        anywhere = self._parts.facts.clears or len(self._parts.slots.pool) == 1
        return held if held.slot == slot or anywhere else None

    def _pinned(self, seat: SnapshotTurn, slot: int) -> int | None:
        """The slot to name; None where llama-server finds a better one itself.

        One slot needs no name. Where idle ones are emptied the one we know of may be empty when the
        request arrives, and one that is named is not filled from RAM. Elsewhere a request that
        names none could be given one that is prepared for another.
        """
        if len(self._parts.slots.pool) == 1 or self._parts.facts.clears:
            return None
        now = next((look for look in seat.before or () if look.id == slot), None)
        empty = now is not None and not now.n_tokens
        return None if seat.in_ram is not None and empty else slot

    async def _look(self, lease: SlotLease, client: Client) -> Sequence[SlotStatus] | None:
        looks = await self._parts.calls.looks(client)
        left = [known.held for known in self._parts.conversations if known.held is not None]
        if looks is not None and restarted(left, looks):
            self.emptied()
            self._parts.facts.forget()
            await self._parts.facts.learn(client, lease)
        return looks

    def emptied(self) -> None:
        """llama-server has started anew: neither slots nor RAM hold anything."""
        for known in self._parts.conversations:
            known.held = None
        self._parts.facts.memory.ram_since = time.monotonic()

    async def _restore(
        self, way: Forwarding, seat: SnapshotTurn, reuse: int, client: Client
    ) -> Held | None:
        """What the slot holds after a restore; None when there was none, or it failed."""
        assert way.lease is not None
        goal = seat.boundary if len(seat.boundary) else seat.prompt[:-1]
        match = self._parts.states.find(seat.tenant, goal)
        if match is None or not self._worth_it(match, reuse):
            return None
        way.stage = "restore"
        if not await self._parts.facts.fresh(client):
            return None
        slot = self._free(way.lease.slot, seat.before)
        if slot is None:
            return None
        seat.match = match  # at once: whoever is cancelled while it runs still has to conclude it
        try:
            restored = await self._parts.states.restore(match, slot, client)
        except UpstreamError:
            seat.match = None  # counted as failed: what comes of the request says nothing about it
            raise
        if not restored:
            seat.match = None
            return None
        floor = match.shared if self._parts.facts.memory.windows else 0
        return Held(slot, match.snapshot.tokens, exact=True, at=time.monotonic(), floor=floor)

    def _free(self, slot: int, looks: Sequence[SlotStatus] | None) -> int | None:
        """A slot to restore into: the one that was granted, if llama-server has nobody in it, else
        an empty one."""
        idle = [look for look in looks or () if not look.busy]
        if looks is None or any(look.id == slot for look in idle):
            return slot
        return (
            min(idle, key=lambda look: look.n_tokens).id
            if idle and self._parts.facts.clears
            else None
        )

    def _worth_it(self, match: Match, reuse: int) -> bool:
        gain = match.shared - reuse
        costs = self._parts.facts.costs
        least = self._parts.config.min_tokens // 2
        return gain >= least and costs.worth_restoring(gain, match.snapshot.n_bytes)

    async def _save(
        self, way: Forwarding, seat: SnapshotTurn, state: Held | None, reuse: int, client: Client
    ) -> None:
        """Decode up to the boundary and no further, save that; not when it is there already."""
        if len(seat.boundary) < self._parts.config.min_tokens or _at(state, seat.boundary):
            return
        why_not = self._parts.states.worth_saving(seat.tenant, seat.boundary, waited_for=True)
        if not why_not and self._parts.states.save_in_s() > 0:
            why_not = "rate"
        pool = self._parts.slots.pool
        if not why_not and self._parts.facts.clears and not (len(pool) == 1 or pool.alone()):
            why_not = "cleared"  # before it could be saved, should another request begin
        if why_not:
            if why_not != "there":
                self._parts.metrics.saves.labels(result=f"skipped_{why_not}").inc()
            return
        way.stage = "prefill"
        try:
            work = self._parts.calls.prefill(seat.boundary, seat.slot, client)
            done = await way.keep_alive(work)
        except UpstreamRejected as error:
            # Too long, most likely: llama-server says so to the client itself.
            self._parts.metrics.saves.labels(result="skipped_rejected").inc()
            _log.info("no boundary: status %d", error.status)
            return
        self._learn(seat, state, done, reuse)
        if len(pool) > 1 and not self._parts.facts.clears:
            # llama-server may have chosen another slot: go there, unless that is another request's.
            lease = way.leases[0]
            if done.slot != lease.slot and not self._parts.slots.exchange(lease, done.slot):
                self._parts.metrics.saves.labels(result="skipped_cleared").inc()
                seat.slot = lease.slot
                return
            seat.slot = done.slot
        way.stage = "save"
        if await self._parts.facts.fresh(client):
            label = self.label(seat, kind_of(seat.request), seat.boundary)
            await self._parts.states.save(done.slot, seat.boundary, label, client)

    async def keep(self, known: Conversation) -> None:
        """Save what a conversation's slot holds, if that can be told and is worth it."""
        held, states = known.held, self._parts.states
        if held is None or not held.exact or states.worth_saving(known.tenant, held.tokens):
            return
        if held.still(await self._parts.calls.looks({})) and await self._parts.facts.fresh({}):
            label = self._labelled(known.tenant, known.branch or known.id, STEP, held.tokens)
            await states.save(held.slot, held.tokens, label, {})

    def label(self, seat: SnapshotTurn, kind: str, tokens: Tokens) -> Label:
        """What a snapshot of these tokens is of."""
        return self._labelled(seat.tenant, seat.branch, kind, tokens)

    def _labelled(self, tenant: str, branch: str, kind: str, tokens: Tokens) -> Label:
        seconds = self._parts.facts.costs.prefill.seconds(len(tokens))
        return Label(tenant, self._parts.facts.fingerprint, branch, kind, seconds)

    def _learn(self, seat: SnapshotTurn, state: Held | None, done: Prefilled, reuse: int) -> None:
        """What a prefill shows of promises."""
        memory = self._parts.facts.memory
        self._parts.facts.costs.prefilled(done.decoded, done.seconds)
        seat.prefilled = done.decoded
        if seat.match is not None:
            self._parts.states.proved(seat.match, done.cached)
            seat.match = None
        elif state is not None and reuse and not state.exact:
            memory.rollback.note(min(reuse, len(seat.boundary)), done.cached)
        self.ram_said(seat, done.cached)

    def ram_said(self, seat: SnapshotTurn, cached: int) -> None:
        """So much was in the cache: if RAM was to have it, did it?"""
        if seat.in_ram is not None:
            self._parts.facts.memory.from_ram(seat.in_ram, seat.hoped, cached)
        seat.in_ram = None

    async def settled(self, way: Forwarding, seat: SnapshotTurn, client: Client) -> None:
        """The answer is over: remember what it has left in its slot."""
        timings = way.observer.timings or {}
        cached, decoded, made = cost_of(timings, way.observer.usage or {})
        self._parts.facts.costs.prefilled(decoded, seconds_of(timings.get("prompt_ms")))
        looks = await self._parts.calls.looks(client)
        if seat.match is not None:
            self._prove(seat.match, cached, decoded)
        if decoded:
            self.ram_said(seat, cached)
        if way.conversation is None or looks is None:
            return
        if not decoded:
            return
        slot, now = self._found(seat, looks, cached + decoded + made), time.monotonic()
        # Where nobody knows in which slot it was, llama-server may have it in RAM all the same.
        place = slot.id if slot is not None else -1
        left = Held(place, seat.prompt, False, now, slot, floor=seat.floor)
        way.conversation.held = left
        pool = self._parts.slots.pool
        if len(pool) > 1 and slot is not None and pool.slot_of(way.conversation.id) != slot.id:
            pool.moved(way.conversation.id, slot.id)

    def _prove(self, match: Match, cached: int, decoded: int) -> None:
        if decoded:
            self._parts.states.proved(match, cached)
        else:
            self._parts.states.unproved(match)

    def _found(
        self, seat: SnapshotTurn, looks: Sequence[SlotStatus], n_tokens: int
    ) -> SlotStatus | None:
        """The slot that an answer was in, after which so many tokens are in it, give or take."""
        if seat.slot is not None:
            return next((look for look in looks if look.id == seat.slot), None)
        if len(looks) == 1:
            return looks[0]
        before = {look.id: look.task for look in seat.before or ()}
        new = [look for look in looks if before.get(look.id) != look.task and not look.busy]
        mine = [look for look in new if abs(look.n_tokens - n_tokens) <= 2]
        return mine[0] if len(mine) == 1 else None

    async def until_idle(
        self, seat: SnapshotTurn, client: Client, enough: Callable[[], bool]
    ) -> None:
        """Wait until llama-server has noticed that its client is gone.

        Where nobody knows which slot it is in: until every request has ended that began since.
        """
        known = {(look.id, look.task) for look in seat.before or ()}
        first: list[set[tuple[int, int | None]]] = []

        async def busy() -> bool:
            looks = [look for look in await self._parts.calls.looks(client) or () if look.busy]
            if seat.slot is not None:
                return any(look.id == seat.slot for look in looks)
            running = {(look.id, look.task) for look in looks} - known
            first.append(running)
            return bool(running & first[0])

        await until_over(busy, enough)

    @staticmethod
    def noted(known: Conversation, held: Held, looks: Sequence[SlotStatus] | None) -> None:
        """More was decoded for a conversation while it is idle."""
        look = next((look for look in looks or () if look.id == held.slot), None)
        known.held = replace(held, look=look)


def _at(state: Held | None, tokens: Tokens) -> bool:
    """Whether a slot holds these tokens and nothing else: there is nothing to decode up to them."""
    return state is not None and state.exact and np.array_equal(state.tokens, tokens)
