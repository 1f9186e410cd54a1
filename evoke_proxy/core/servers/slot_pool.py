"""Assigns slots of llama-server to sessions, and queues the requests that wait for one.

The pool does no I/O: calls return decisions. The *holder* of a slot is the session whose rows
are in it. A slot is *busy* while a request or background work uses it. An *ephemeral* request runs
in a slot without becoming its holder.

A session is *locked* while anything changes its state: its own request, a request that saves its
rows before it takes its slot, background work, an operation. At most one request of a session runs
at a time. An ephemeral request may use several slots and locks no session. Lock and slot are
granted together, so no request waits for one while it has the other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot for one request of a session, until it is released.

    Attributes:
        slot: number of the slot.
        victim: session whose rows are in the slot; locked until `vacated`.
        previous: slot that the session has moved from; reserved until `vacated`.
        changed_at: when the latest request or decoding in the slot ended.
    """

    slot: int
    victim: str | None = None
    previous: int | None = None
    changed_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Wait:
    """The request waits; a later call on the pool returns its ticket with the grant.

    `displaced` is the ticket of the waiter that this one removed from a full queue, if any.
    """

    ticket: int
    displaced: int | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The queue is full; `queued` requests are waiting."""

    queued: int


@dataclass(frozen=True, slots=True)
class _Waiter:
    ticket: int
    session: str
    ephemeral: bool
    slot: int | None


@dataclass(slots=True)
class _Slot:
    """State of one slot.

    Attributes:
        holder: session whose rows are in the slot.
        busy: whether a request or background work uses it, or a request keeps it reserved.
        ephemeral: whether the request that uses it is ephemeral.
        background: whether background work uses it.
        session: session of the running request; None for ephemeral requests and background work.
        victim: session that the running request keeps locked.
        previous: slot that the running request keeps reserved.
        last_used: when the holder last used it.
        changed_at: when the latest request or decoding ended.
    """

    holder: str | None = None
    busy: bool = False
    ephemeral: bool = False
    background: bool = False
    session: str | None = None
    victim: str | None = None
    previous: int | None = None
    last_used: float = 0.0
    changed_at: float = 0.0


class SlotPool:
    """The slots of one server and the queue for them, fair between tenants. Times are seconds.

    Attributes:
        max_queue: maximum number of waiting requests; may change at any time. When the queue is
            full, the newest waiter of the tenant that has most is removed for a tenant that has
            fewer.
        tenant_queue: maximum number of waiting requests of one tenant; 0 for no limit.
        changed_at: when the latest request or decoding in any slot ended.
    """

    def __init__(self, n_slots: int, max_queue: int, tenant_queue: int = 0) -> None:
        self._slots = [_Slot() for _ in range(n_slots)]
        self.max_queue = max_queue
        self.tenant_queue = tenant_queue
        self._queues: dict[str, deque[_Waiter]] = {}
        self._next_ticket = 0
        self._locks: Counter[str] = Counter()
        self._short_locks = 0  # number of locks that are shorter than a request
        self._removed: dict[int, _Slot] = {}
        self.changed_at = 0.0

    def __repr__(self) -> str:
        slots = " ".join(f"{s.holder or '-'}{'*' if s.busy else ''}" for s in self._slots)
        return f"<SlotPool [{slots}] queued={self.queued}>"

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def queued(self) -> int:
        """Number of waiting requests."""
        return sum(len(queue) for queue in self._queues.values())

    def holder(self, slot: int) -> str | None:
        """The session whose rows are in this slot."""
        return self._slots[slot].holder

    def slot_of(self, session: str) -> int | None:
        """The slot that has a session's rows, busy or not."""
        return next((i for i, s in enumerate(self._slots) if s.holder == session), None)

    def is_locked(self, session: str) -> bool:
        """Whether anything may be changing a session's state."""
        return self._locks[session] > 0

    def request(
        self,
        session: str,
        tenant: str,
        now: float,
        ephemeral: bool = False,
        slot: int | None = None,
    ) -> Grant | Wait | Refuse:
        """Request a slot for a session: granted, queued or refused.

        A request does not overtake waiters of the same tenant, except those that wait for a
        certain slot or for their own session. IndexError when `slot` does not exist.
        """
        if slot is not None and not 0 <= slot < len(self._slots):
            raise IndexError(f"there is no slot {slot}")
        waiter = _Waiter(self._next_ticket + 1, session, ephemeral, slot)
        queue = self._queues.get(tenant, ())
        if not any(self._is_behind(waiter, other) for other in queue):
            grant = self._grant(waiter, now)
            if grant is not None:
                return grant
        displaced: int | None = None
        if self.tenant_queue and len(queue) >= self.tenant_queue + self._allowance():
            return Refuse(len(queue))
        if self.queued >= self.max_queue + self._allowance():
            displaced = self._displace_for(tenant)
            if displaced is None:
                return Refuse(self.queued)
        self._next_ticket += 1
        self._queues.setdefault(tenant, deque()).append(waiter)
        return Wait(waiter.ticket, displaced)

    def vacated(self, slot: int, now: float) -> list[tuple[int, Grant]]:
        """Unlock the victim and free the previous slot, once the request has saved their rows.

        Returns the tickets that this grants a slot.
        """
        self._vacate(self._at(slot), now)
        return list(self._serve(now))

    def release(self, slot: int, now: float) -> list[tuple[int, Grant]]:
        """End the request in this slot. Returns the tickets that this grants a slot."""
        released = self._at(slot)
        self._vacate(released, now)
        released.last_used = released.last_used if released.ephemeral else now
        released.changed_at = self.changed_at = now
        if released.session is not None:
            self._unlock(released.session)
        released.busy = released.ephemeral = False
        released.session = None
        self._removed.pop(slot, None)
        return list(self._serve(now))

    def exchange(self, slot: int, other: int, now: float) -> list[tuple[int, Grant]] | None:
        """Move the request in a slot to another, idle slot in one step.

        Rows of other sessions there are not saved. Returns the tickets that this grants a slot, or
        None, with nothing changed, when the other slot is busy.
        """
        source, target = self._at(slot), self._slots[other]
        if target.busy:
            return None
        target.busy, target.ephemeral, target.session = True, source.ephemeral, source.session
        if source.session is not None:
            self.forget(source.session)
            target.holder, target.last_used = source.session, now
        self._vacate(source, now)
        source.busy = source.ephemeral = False
        source.session, source.changed_at = None, now
        self._removed.pop(slot, None)
        return list(self._serve(now))

    def cancel(self, ticket: int, now: float) -> list[tuple[int, Grant]]:
        """Remove a waiter. Returns the tickets that this grants a slot."""
        self._remove(ticket)
        return list(self._serve(now))

    def begin_background(
        self, slots: Sequence[int], session: str | None = None, alone: bool = True
    ) -> bool:
        """Take idle slots for background work, and lock the session that it concerns.

        Returns False, with nothing taken, when a slot is busy or the session is locked; with
        `alone` also while any request runs or waits.
        """
        chosen = [self._slots[slot] for slot in slots]
        if any(slot.busy for slot in chosen) or (alone and not self.idle()):
            return False
        if session is not None and not self.lock(session):
            return False
        for slot in chosen:
            slot.busy = slot.background = True
        return True

    def end_background(
        self, slots: Sequence[int], session: str | None, now: float, changed: bool = True
    ) -> list[tuple[int, Grant]]:
        """Return the slots of `begin_background`. Returns the tickets that this grants a slot.

        `changed` says whether the content of the slots may have changed.
        """
        for slot in slots:
            taken = self._at(slot)
            taken.busy = taken.background = False
            if changed:
                taken.changed_at = self.changed_at = now
            self._removed.pop(slot, None)
        return self.unlock(session, now) if session is not None else list(self._serve(now))

    def lock(self, session: str) -> bool:
        """Lock a session without a slot; returns False when it is locked."""
        if self._locks[session]:
            return False
        self._locks[session] += 1
        self._short_locks += 1
        return True

    def unlock(self, session: str, now: float) -> list[tuple[int, Grant]]:
        """Undo `lock`. Returns the tickets that this grants a slot."""
        self._short_locks -= 1
        self._unlock(session)
        return list(self._serve(now))

    def record_move(self, session: str, slot: int) -> None:
        """Record that llama-server put the session into another slot than it was granted."""
        self.forget(session)
        self._slots[slot].holder = session

    @property
    def n_busy(self) -> int:
        """The number of busy slots."""
        return sum(slot.busy for slot in self._slots)

    def alone(self) -> bool:
        """Whether at most one slot is busy, and no request waits."""
        return self.n_busy <= 1 and not self.queued

    def idle(self) -> bool:
        """Whether no request runs or waits, apart from background work."""
        running = any(slot.busy and not slot.background for slot in self._slots)
        return not running and not self.queued

    def forget(self, session: str) -> None:
        """Forget a session: its slot has no holder any more."""
        for slot in self._slots:
            if slot.holder == session:
                slot.holder = None

    def restart(self, n_slots: int, now: float) -> list[tuple[int, Grant]]:
        """Record that llama-server restarted with `n_slots` slots: idle slots have no holder.

        Running requests keep slot and lock until they are released, even when the slot no longer
        exists. Returns the tickets that this grants a slot.
        """
        for slot in self._slots:
            slot.holder = slot.session
        for queue in self._queues.values():
            for at, waiter in enumerate(queue):
                if waiter.slot is not None and waiter.slot >= n_slots:
                    queue[at] = replace(waiter, slot=None)
        for index in range(n_slots, len(self._slots)):
            if self._slots[index].busy:
                self._removed[index] = self._slots[index]
        added = [
            self._removed.pop(i) if i in self._removed else _Slot()
            for i in range(len(self._slots), n_slots)
        ]
        self._slots = [*self._slots[:n_slots], *added]
        return list(self._serve(now))

    def _at(self, slot: int) -> _Slot:
        return self._slots[slot] if slot < len(self._slots) else self._removed[slot]

    def _allowance(self) -> int:
        """Number of waiters allowed beyond the limits: one for each short task of the proxy."""
        return self._short_locks + sum(slot.background for slot in self._slots)

    def _displace_for(self, tenant: str) -> int | None:
        """Remove the newest waiter of the tenant that has most; returns its ticket.

        None when `tenant` would have most with one more waiter.
        """
        most = max(self._queues, key=lambda name: len(self._queues[name]), default=tenant)
        if len(self._queues.get(most, ())) <= len(self._queues.get(tenant, ())) + 1:
            return None
        ticket = self._queues[most][-1].ticket
        self._remove(ticket)
        return ticket

    def _remove(self, ticket: int) -> None:
        for queue in self._queues.values():
            for waiter in [waiter for waiter in queue if waiter.ticket == ticket]:
                queue.remove(waiter)

    def _is_behind(self, waiter: _Waiter, other: _Waiter) -> bool:
        """Whether a waiter must not be served before an earlier one of its tenant.

        An earlier waiter whose session is locked blocks no other: no slot would serve it now.
        """
        if self._locks[other.session]:
            return False
        return other.slot is None if waiter.slot is None else other.slot == waiter.slot

    def _unlock(self, session: str) -> None:
        self._locks[session] -= 1
        if self._locks[session] <= 0:
            del self._locks[session]

    def _vacate(self, slot: _Slot, now: float) -> None:
        """Unlock the victim and free the previous slot of the request in this slot."""
        if slot.victim is not None:
            self._short_locks -= 1
            self._unlock(slot.victim)
        if slot.previous is not None:
            previous = self._at(slot.previous)
            previous.busy = False
            previous.changed_at = now
            self._removed.pop(slot.previous, None)
        slot.victim = slot.previous = None

    def _serve(self, now: float) -> Iterator[tuple[int, Grant]]:
        while (served := self._serve_one(now)) is not None:
            yield served
        self._queues = {tenant: queue for tenant, queue in self._queues.items() if queue}

    def _serve_one(self, now: float) -> tuple[int, Grant] | None:
        """Serve one waiter, in round robin over tenants."""
        for tenant, queue in list(self._queues.items()):
            for at, waiter in enumerate(queue):
                if any(self._is_behind(waiter, queue[i]) for i in range(at)):
                    continue
                grant = self._grant(waiter, now)
                if grant is not None:
                    queue.remove(waiter)
                    self._queues[tenant] = self._queues.pop(tenant)
                    return waiter.ticket, grant
        return None

    def _grant(self, waiter: _Waiter, now: float) -> Grant | None:
        """Grant the requested slot, else the session's own, an empty one, or the longest idle one.

        None when the request must wait: its session is locked, or no slot is available. A slot
        whose holder is locked is not available, because its rows could not be saved now. A session
        does not wait for an ephemeral request in its own slot while another slot is idle.
        """
        if self._locks[waiter.session]:
            return None
        own = self.slot_of(waiter.session)
        idle = [
            index
            for index, slot in enumerate(self._slots)
            if not slot.busy and not (slot.holder is not None and self._locks[slot.holder])
        ]
        if waiter.slot is not None:
            idle = [waiter.slot] if waiter.slot in idle else []
        elif own in idle:
            idle = [own]
        if not idle:
            return None
        best = min(
            idle, key=lambda i: (self._slots[i].holder is not None, self._slots[i].last_used, i)
        )
        return self._take(best, waiter.session, waiter.ephemeral, now)

    def _take(self, index: int, session: str, ephemeral: bool, now: float) -> Grant:
        """Give an idle slot to a request, with the locks that it needs."""
        slot, own = self._slots[index], self.slot_of(session)
        victim = slot.holder if slot.holder != session else None
        slot.busy, slot.ephemeral = True, ephemeral
        if victim is not None:
            slot.victim = victim
            self._locks[victim] += 1
            self._short_locks += 1
        if not ephemeral:
            slot.session = session
            self._locks[session] += 1
            if own is not None and own != index and not self._slots[own].busy:
                slot.previous = own
                self._slots[own].busy = True
            self.forget(session)
            slot.holder, slot.last_used = session, now
        return Grant(index, victim, slot.previous, slot.changed_at)


def slots_for_answers(n_answers: int, n_slots: int, first: int) -> tuple[int, ...]:
    """The slots that a request for several answers uses; empty when there are too few.

    llama-server decodes the prompt in `first` and copies it to the lowest other slots.
    """
    others = [slot for slot in range(n_slots) if slot != first]
    if n_answers > n_slots:
        return ()
    return tuple(sorted([first, *others[: n_answers - 1]]))
