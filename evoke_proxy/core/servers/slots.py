"""Which session holds which slot of llama-server, and who waits.

Pure bookkeeping: every call returns what is to be done. A slot is *held* by the session that will
find it again, and *busy* while a request runs in it. A *guest* runs in a slot without holding it:
what was known of the slot before is known of it afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Grant:
    """The slot is the session's until released; the rows of `victim`, if anybody, are in it."""

    slot: int
    victim: str | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """No slot now: `release` or `cancel` of this ticket comes later."""

    ticket: int


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
    """`session` is the one whose request runs here; None when it is idle or runs a guest."""

    holder: str | None = None
    session: str | None = None
    busy: bool = False
    guest: bool = False
    used: float = 0.0


class SlotPool:
    """The slots of one server and the queue for them, fair between tenants. Times are seconds.

    `max_queue`, how many may wait, can change at any time.
    """

    def __init__(self, n_slots: int, max_queue: int) -> None:
        self._n_slots = n_slots
        # Longer while requests run in slots that the server does not have any more.
        self._slots = [_Slot() for _ in range(n_slots)]
        self.max_queue = max_queue
        self._queues: dict[str, deque[_Waiter]] = {}
        self._next_ticket = 0

    def __repr__(self) -> str:
        slots = " ".join(f"{s.holder or '-'}{'*' if s.busy else ''}" for s in self._slots)
        return f"<SlotPool [{slots}] queued={self.queued}>"

    def __len__(self) -> int:
        return self._n_slots

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return sum(len(queue) for queue in self._queues.values())

    def holder(self, slot: int) -> str | None:
        """The session that will find this slot again."""
        return self._slots[slot].holder

    def slot_of(self, session: str) -> int | None:
        """The slot a session holds, busy or not."""
        return next((i for i, s in enumerate(self._slots) if s.holder == session), None)

    def request(
        self, session: str, tenant: str, now: float, guest: bool = False, slot: int | None = None
    ) -> Grant | Wait | Refuse:
        """A slot for one request of a session, or a place in the queue, or neither.

        Nobody overtakes a waiter of the same tenant, but for one that waits for `slot` and no
        other. IndexError when there is no such slot.
        """
        if slot is not None and not 0 <= slot < self._n_slots:
            raise IndexError(f"there is no slot {slot}")
        waiter = _Waiter(self._next_ticket + 1, session, guest, slot)
        queue = self._queues.get(tenant, ())
        if not any(_behind(waiter, other) for other in queue):
            grant = self._grant(waiter, now)
            if grant is not None:
                return grant
        if self.queued >= self.max_queue:
            return Refuse(self.queued)
        self._next_ticket += 1
        self._queues.setdefault(tenant, deque()).append(waiter)
        return Wait(waiter.ticket)

    def release(self, slot: int, now: float) -> list[tuple[int, Grant]]:
        """The request on this slot is over; the tickets that get a slot because of it."""
        given_back = self._slots[slot]
        given_back.used = given_back.used if given_back.guest else now
        given_back.busy = given_back.guest = False
        given_back.session = None
        self._trim()
        return list(self._serve(now))

    def cancel(self, ticket: int, now: float) -> list[tuple[int, Grant]]:
        """A waiter has left; the tickets that may go because it no longer stands in front."""
        for queue in self._queues.values():
            for waiter in [waiter for waiter in queue if waiter.ticket == ticket]:
                queue.remove(waiter)
        return list(self._serve(now))

    def moved(self, session: str, slot: int) -> None:
        """llama-server has put the session into another slot than it was granted."""
        self.forget(session)
        self._slots[slot].holder = session

    def alone(self) -> bool:
        """Whether at most one request runs, and none waits."""
        return sum(slot.busy for slot in self._slots) <= 1 and not self.queued

    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return not any(slot.busy for slot in self._slots) and not self.queued

    def forget(self, session: str) -> None:
        """The session is gone: a slot it holds is nobody's."""
        for slot in self._slots:
            if slot.holder == session:
                slot.holder = None

    def restart(self, n_slots: int, now: float) -> list[tuple[int, Grant]]:
        """llama-server restarted with `n_slots`: no idle slot holds anything.

        Requests that run keep their slot until it is released, even where the new server has fewer.
        Returns the tickets that get a slot because there are more of them.
        """
        for slot in self._slots:
            slot.holder = slot.session
        self._n_slots = n_slots
        self._slots += [_Slot() for _ in range(n_slots - len(self._slots))]
        self._trim()
        for queue in self._queues.values():
            for at, waiter in enumerate(queue):
                if waiter.slot is not None and waiter.slot >= n_slots:
                    queue[at] = replace(waiter, slot=None)
        return list(self._serve(now))

    def _trim(self) -> None:
        """Remove idle slots that the server does not have."""
        while len(self._slots) > self._n_slots and not self._slots[-1].busy:
            self._slots.pop()

    def _serve(self, now: float) -> Iterator[tuple[int, Grant]]:
        while (served := self._serve_one(now)) is not None:
            yield served
        self._queues = {tenant: queue for tenant, queue in self._queues.items() if queue}

    def _serve_one(self, now: float) -> tuple[int, Grant] | None:
        """Round robin: a tenant that was served goes to the end of the line."""
        for tenant, queue in list(self._queues.items()):
            for at, waiter in enumerate(queue):
                if any(_behind(waiter, queue[i]) for i in range(at)):
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

        A session whose own request runs waits for it, wherever that is: no two requests of one
        session run at once. It does not wait for a guest in its slot while another slot is idle.
        """
        if any(slot.session == waiter.session for slot in self._slots):
            return None
        own = self.slot_of(waiter.session)
        idle = [i for i in range(self._n_slots) if not self._slots[i].busy]
        if waiter.slot is not None:
            idle = [waiter.slot] if not self._slots[waiter.slot].busy else []
        elif own in idle:
            idle = [own]
        if not idle:
            return None
        best = min(idle, key=lambda i: (self._slots[i].holder is not None, self._slots[i].used, i))
        return self._take(best, waiter.session, waiter.guest, now)

    def _take(self, index: int, session: str, guest: bool, now: float) -> Grant:
        slot = self._slots[index]
        victim = slot.holder if slot.holder != session else None
        slot.busy, slot.guest = True, guest
        if not guest:
            self.forget(session)
            slot.holder, slot.used = session, now
            slot.session = session
        return Grant(index, victim)


def taken_by(n_answers: int, n_slots: int, first: int) -> tuple[int, ...]:
    """The slots of a request for several answers when all are idle; empty when it has too many.

    llama-server's rule: `first` decodes the prompt, the first of the others get copies of it.
    """
    others = [slot for slot in range(n_slots) if slot != first]
    if n_answers > n_slots:
        return ()
    return tuple(sorted([first, *others[: n_answers - 1]]))


def _behind(waiter: _Waiter, other: _Waiter) -> bool:
    """Whether one must not be served before another of its tenant that came first."""
    return other.slot is None if waiter.slot is None else other.slot == waiter.slot
