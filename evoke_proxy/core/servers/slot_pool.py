"""Which session holds which slot of llama-server, and which requests wait for one.

Pure bookkeeping: every call returns what to do. A slot is *held* by the session that finds its rows
there the next time, and *busy* while a request or background work has it. A *guest* runs in a slot
without holding it: what is recorded of the slot stays as it was.

A session is *locked* while anything changes its state: its own request, the saving of its rows by
the request that takes its slot, background work, an operation. At most one request of a session
runs at a time; a guest, which may take several slots, locks none. The lock and the slot are granted
together, so no request waits for one of them while it has the other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot for one request of a session, until it is released.

    `victim` is the session whose rows are in the slot. It stays locked until `vacated`. `left` is
    the slot that the session has moved from. It is reserved until `vacated`. `changed_at` is when
    the latest request or decoding in the slot ended.
    """

    slot: int
    victim: str | None = None
    left: int | None = None
    changed_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Wait:
    """No slot now: `release` or `cancel` of this ticket comes later.

    The waiter with the ticket `displaced`, if any, has lost its place to this one.
    """

    ticket: int
    displaced: int | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The queue is full; `queued` requests wait already."""

    queued: int


@dataclass(frozen=True, slots=True)
class _Waiter:
    ticket: int
    session: str
    guest: bool
    slot: int | None


@dataclass(slots=True)
class _Slot:
    """`session` is that of the request that has it, None for a guest and for background work.

    `victim` is the session that this request keeps locked, `left` the slot that it keeps reserved.
    """

    holder: str | None = None
    busy: bool = False
    guest: bool = False
    background: bool = False
    reserved: bool = False
    session: str | None = None
    victim: str | None = None
    left: int | None = None
    used: float = 0.0
    changed_at: float = 0.0


class SlotPool:
    """The slots of one server and the queue for them, fair between tenants. Times are seconds.

    `max_queue` requests may wait, `tenant_queue` of one tenant (0: all of them). Both can change at
    any time. When the queue is full, the newest waiter of the tenant that has most of it gives its
    place to one of a tenant that has less.
    """

    def __init__(self, n_slots: int, max_queue: int, tenant_queue: int = 0) -> None:
        self._slots = [_Slot() for _ in range(n_slots)]
        self.max_queue = max_queue
        self.tenant_queue = tenant_queue
        self._queues: dict[str, deque[_Waiter]] = {}
        self._next_ticket = 0
        self._locks: Counter[str] = Counter()
        self._short_locks = 0  # of them those that no request has for as long as it runs
        self._removed: dict[int, _Slot] = {}
        self.changed_at = 0.0  # when the latest request or decoding in any slot ended

    def __repr__(self) -> str:
        slots = " ".join(f"{s.holder or '-'}{'*' if s.busy else ''}" for s in self._slots)
        return f"<SlotPool [{slots}] queued={self.queued}>"

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return sum(len(queue) for queue in self._queues.values())

    def queued_of(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
        return len(self._queues.get(tenant, ()))

    def holder(self, slot: int) -> str | None:
        """The session that finds its rows in this slot."""
        return self._slots[slot].holder

    def slot_of(self, session: str) -> int | None:
        """The slot a session holds, busy or not."""
        return next((i for i, s in enumerate(self._slots) if s.holder == session), None)

    def is_locked(self, session: str) -> bool:
        """Whether anything may be changing the state of a session now."""
        return self._locks[session] > 0

    def request(
        self, session: str, tenant: str, now: float, guest: bool = False, slot: int | None = None
    ) -> Grant | Wait | Refuse:
        """A slot for one request of a session, or a place in the queue, or neither.

        Nobody overtakes a waiter of the same tenant, but for one that waits for `slot` and no
        other, or for its own session. IndexError when there is no such slot.
        """
        if slot is not None and not 0 <= slot < len(self._slots):
            raise IndexError(f"there is no slot {slot}")
        waiter = _Waiter(self._next_ticket + 1, session, guest, slot)
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
        """The request in this slot has saved what others left: their session, their slot are free.

        Returns the tickets that get a slot because of it.
        """
        self._vacate(self._at(slot), now)
        return list(self._serve(now))

    def release(self, slot: int, now: float) -> list[tuple[int, Grant]]:
        """The request on this slot is over; the tickets that get a slot because of it."""
        given_back = self._at(slot)
        self._vacate(given_back, now)
        given_back.used = given_back.used if given_back.guest else now
        given_back.changed_at = self.changed_at = now
        if given_back.session is not None:
            self._unlock(given_back.session)
        given_back.busy = given_back.guest = False
        given_back.session = None
        self._removed.pop(slot, None)
        return list(self._serve(now))

    def exchange(self, slot: int, other: int, now: float) -> list[tuple[int, Grant]] | None:
        """Give the request in a slot an idle one instead; at no moment it has neither.

        None, and nothing changes, when the other one is not idle. Nothing is saved of what others
        left there. Returns the tickets that get a slot because of it.
        """
        source, target = self._at(slot), self._slots[other]
        if target.busy:
            return None
        target.busy, target.guest, target.session = True, source.guest, source.session
        if source.session is not None:
            self.forget(source.session)
            target.holder, target.used = source.session, now
        self._vacate(source, now)
        source.busy = source.guest = False
        source.session, source.changed_at = None, now
        self._removed.pop(slot, None)
        return list(self._serve(now))

    def cancel(self, ticket: int, now: float) -> list[tuple[int, Grant]]:
        """A waiter has left; the tickets that may go because it no longer stands in front."""
        self._remove(ticket)
        return list(self._serve(now))

    def begin_background(
        self, slots: Sequence[int], session: str | None = None, alone: bool = True
    ) -> bool:
        """Take idle slots for work of our own, and lock the session that it is of.

        False, and nothing is taken, when one of them is not idle, or the session is locked; with
        `alone` also while any request runs or waits.
        """
        chosen = [self._slots[slot] for slot in slots]
        if any(slot.busy for slot in chosen) or (alone and not self.idle()):
            return False
        if session is not None and not self.hold(session):
            return False
        for slot in chosen:
            slot.busy = slot.background = True
        return True

    def end_background(
        self, slots: Sequence[int], session: str | None, now: float, changed: bool = True
    ) -> list[tuple[int, Grant]]:
        """Give back what `begin_background` took; the tickets that get a slot because of it.

        Not `changed`: the slots hold what they held.
        """
        for slot in slots:
            taken = self._at(slot)
            taken.busy = taken.background = False
            if changed:
                taken.changed_at = self.changed_at = now
            self._removed.pop(slot, None)
        return self.let_go(session, now) if session is not None else list(self._serve(now))

    def hold(self, session: str) -> bool:
        """Lock a session without a slot; False when it is locked already."""
        if self._locks[session]:
            return False
        self._locks[session] += 1
        self._short_locks += 1
        return True

    def let_go(self, session: str, now: float) -> list[tuple[int, Grant]]:
        """End what `hold` began; the tickets that get a slot because of it."""
        self._short_locks -= 1
        self._unlock(session)
        return list(self._serve(now))

    def moved(self, session: str, slot: int) -> None:
        """llama-server has put the session into another slot than it was granted."""
        self.forget(session)
        self._slots[slot].holder = session

    def alone(self) -> bool:
        """Whether at most one request runs, and none waits."""
        return sum(slot.busy for slot in self._slots) <= 1 and not self.queued

    def idle(self) -> bool:
        """Whether no request runs or waits. Background work does not count."""
        running = any(slot.busy and not slot.background for slot in self._slots)
        return not running and not self.queued

    def forget(self, session: str) -> None:
        """The session is gone: a slot it holds is nobody's."""
        for slot in self._slots:
            if slot.holder == session:
                slot.holder = None

    def restart(self, n_slots: int, now: float) -> list[tuple[int, Grant]]:
        """llama-server has restarted with so many slots: no idle one holds anything.

        Requests that run keep their slot and their session's lock until they are released, also in
        slots that do not exist any more. Returns the tickets that get a slot because of it.
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
        """How many more may wait: those whom only short work of ours keeps waiting."""
        return self._short_locks + sum(slot.background for slot in self._slots)

    def _displace_for(self, tenant: str) -> int | None:
        """Take the newest waiter of the tenant that has most out of the queue; its ticket.

        None when `tenant` itself would have most with one more.
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
        """Whether one must not be served before another of its tenant that came first.

        A waiter whose session is locked stands in nobody's way: no slot would do for it now.
        """
        if self._locks[other.session]:
            return False
        return other.slot is None if waiter.slot is None else other.slot == waiter.slot

    def _unlock(self, session: str) -> None:
        self._locks[session] -= 1
        if self._locks[session] <= 0:
            del self._locks[session]

    def _vacate(self, slot: _Slot, now: float) -> None:
        if slot.victim is not None:
            self._short_locks -= 1
            self._unlock(slot.victim)
        if slot.left is not None:
            left = self._at(slot.left)
            left.busy = left.reserved = False
            left.changed_at = now
            self._removed.pop(slot.left, None)
        slot.victim = slot.left = None

    def _serve(self, now: float) -> Iterator[tuple[int, Grant]]:
        while (served := self._serve_one(now)) is not None:
            yield served
        self._queues = {tenant: queue for tenant, queue in self._queues.items() if queue}

    def _serve_one(self, now: float) -> tuple[int, Grant] | None:
        """Round robin: a tenant that was served goes to the end of the line."""
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
        """The slot it names. Else its own, else an empty one, else the one idle for longest. None
        if it must wait.

        A session that is locked waits. It does not wait for a guest in its slot while another slot
        is idle. A slot whose holder is locked is nobody's: its rows could not be saved now.
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
        best = min(idle, key=lambda i: (self._slots[i].holder is not None, self._slots[i].used, i))
        return self._take(best, waiter.session, waiter.guest, now)

    def _take(self, index: int, session: str, guest: bool, now: float) -> Grant:
        slot, own = self._slots[index], self.slot_of(session)
        victim = slot.holder if slot.holder != session else None
        slot.busy, slot.guest = True, guest
        if victim is not None:
            slot.victim = victim
            self._locks[victim] += 1
            self._short_locks += 1
        if not guest:
            slot.session = session
            self._locks[session] += 1
            if own is not None and own != index and not self._slots[own].busy:
                slot.left = own
                self._slots[own].busy = self._slots[own].reserved = True
            self.forget(session)
            slot.holder, slot.used = session, now
        return Grant(index, victim, slot.left, slot.changed_at)


def taken_by(n_answers: int, n_slots: int, first: int) -> tuple[int, ...]:
    """The slots of a request for several answers when all are idle; empty when it has too many.

    llama-server's rule: `first` decodes the prompt, the first of the others get copies of it.
    """
    others = [slot for slot in range(n_slots) if slot != first]
    if n_answers > n_slots:
        return ()
    return tuple(sorted([first, *others[: n_answers - 1]]))
