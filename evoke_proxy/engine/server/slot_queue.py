"""Leases of slots: the pool decides who is next, this makes requests wait and wakes them.

A request takes a `SlotLease`. Work that no request waits for takes a `BackgroundLease`, which every
request that comes preempts, and awaits where it wants the same slot or session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.servers.slot_pool import Grant, Refuse, SlotPool
from evoke_proxy.errors import EvokeError, SlotsBusy, UpstreamRejected, UpstreamTimeout

_log = logging.getLogger(__name__)
T = TypeVar("T")

# Runs a coroutine in a task that outlives its caller; the text names it in the log.
Spawn = Callable[[Coroutine[Any, Any, None], str], object]


# A generating slot notices a closed connection with its next token. One that decodes a prompt looks
# for it after a second without any result, and an answer to us is a result: asking more often would
# keep it from noticing.
_FIRST_ASKED_S = (0.0, 0.05, 0.15)
_POLL_S = 1.3
_WARN_EVERY_S = 60.0
# llama-server needs about so long to notice that it is to stop: what ends by itself until then is
# not cut off.
_GRACE_S = 1.0


async def until_over(busy: Callable[[], Awaitable[bool]], give_up: Callable[[], bool]) -> None:
    """Wait until llama-server is done with a request whose client is gone.

    A slot that is still busy is never given to the next request, however long that takes. The wait
    ends early only when `give_up` says so, or when llama-server cannot be reached or says nothing
    about its slots: then nothing of ours runs there, or nobody can tell.
    """
    loop = asyncio.get_running_loop()
    began, warned_at, asked = loop.time(), loop.time(), 0
    while True:
        await asyncio.sleep(_FIRST_ASKED_S[asked] if asked < len(_FIRST_ASKED_S) else _POLL_S)
        asked += 1
        try:
            if not await busy():
                return
        except UpstreamTimeout as error:  # its main loop is occupied: ask again
            _log.debug("%s", error)
        except UpstreamRejected as error:
            if error.status != 503:
                raise
        if give_up():
            return
        if loop.time() - warned_at > _WARN_EVERY_S:
            warned_at = loop.time()
            _log.warning(
                "llama-server has been busy for %.0f s with a request whose client is gone; its"
                " slot is not used until it is idle",
                loop.time() - began,
            )


async def finished(work: asyncio.Future[T]) -> T:
    """The result of work that must end before its caller does, however often that is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # retrieved: nobody else will
        raise cancelled
    return work.result()


class Preempted(EvokeError):
    """A request came, and background work ended for it."""


class SlotLease:
    """One slot for one request, from `SlotQueue.acquire` until it is released.

    `victim` is the session whose rows may still be in the slot. It stays locked until `vacated`.
    `left` is the slot that the session has moved from. It is reserved until then.
    Releasing is synchronous and does nothing the second time, so that an exit stack can own it.
    """

    def __init__(self, queue: SlotQueue, grant: Grant, waited: bool) -> None:
        self.slot = grant.slot
        self.victim = grant.victim
        self.previous = grant.previous
        self.waited = waited
        self._changed_at = grant.changed_at
        self._queue = queue
        self._is_vacated = grant.victim is None and grant.previous is None
        self.is_released = False

    def __repr__(self) -> str:
        return f"<SlotLease {self.slot}{' released' if self.is_released else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def has_changed(self, since: float) -> bool:
        """Whether what was seen of the server at a time may not be so any more for this slot."""
        return self._changed_at > since or (self.waited and self._queue.pool.changed_at > since)

    def vacated(self) -> None:
        """What others had left in the slot is saved, or will not be: their sessions may go on."""
        if not (self._is_vacated or self.is_released):
            self._is_vacated = True
            self._queue.vacated(self.slot)

    @contextmanager
    def vacating(self) -> Iterator[None]:
        """A block in which the rows of others are saved; they are `vacated` however it ends."""
        try:
            yield
        finally:
            self.vacated()

    def release(self) -> None:
        """Give the slot back and wake the next request."""
        if not self.is_released:
            self.is_released = True
            self._queue.returned(self.slot)


class BackgroundLease:
    """Slots, and the lock of a session, for work that no request waits for.

    Use as an async context manager. A request that comes sets `preempted`, which is to be looked at
    between calls, and cuts off what is in `run`. After a call was cut off the lease goes to a task
    that waits until llama-server is idle, by `settle`; the slots are given back after that.
    """

    def __init__(
        self,
        queue: SlotQueue,
        slots: tuple[int, ...],
        session: str | None,
        settle: Callable[[], Awaitable[None]] | None,
        spawn: Spawn | None,
    ) -> None:
        self.slots = slots
        self.session = session
        self.preempted = False
        self.has_decoded = False
        self._queue = queue
        self._settle = settle
        self._spawn = spawn
        self._work: asyncio.Task[Any] | None = None
        self._cut_off = False
        self._is_busy = False  # llama-server may still be at what was cut off
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False
        self.is_released = False

    def __repr__(self) -> str:
        return f"<BackgroundLease {self.slots} {self.session or ''}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.end()
        return isinstance(error, Preempted)

    def end(self) -> None:
        """Give the slots back, at once or when llama-server is idle again."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._is_busy and self._settle is not None and self._spawn is not None:
            work = self._release_when_idle(self._settle)
            try:
                self._spawn(work, "waiting for a slot to be idle")
                return
            except RuntimeError:  # the proxy is stopping
                work.close()
        self.release()

    def release(self) -> None:
        """Give the slots back and wake the next request."""
        if not self.is_released:
            self.is_released = True
            self._queue.background_ended(self)

    def check(self) -> None:
        """Raise Preempted when a request has come."""
        if self.preempted:
            raise Preempted("a request has come")

    def preempt(self, grace_s: float) -> None:
        """A request has come: end what is in `run` when that takes longer than `grace_s`."""
        self.preempted = True
        if self._cut_off or self._work is None:
            return
        if grace_s <= 0:
            self._cut()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(grace_s, self._cut)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Decode what a request may cut off; Preempted when one does, or has come before."""
        if self.preempted:
            work.close()
            raise Preempted("a request has come")
        was_busy, self._is_busy, self.has_decoded = self._is_busy, True, True
        try:
            async with asyncio.TaskGroup() as group:
                task = self._work = group.create_task(_outcome(work))
        finally:
            self._work = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if task.cancelled():
            raise Preempted("a request has come")
        made, error = task.result()
        if error is not None:
            raise error
        self._is_busy = was_busy
        return cast(T, made)

    def _cut(self) -> None:
        self._cut_off = True
        if self._work is not None:
            self._work.cancel()

    async def _release_when_idle(self, settle: Callable[[], Awaitable[None]]) -> None:
        try:
            await settle()
        finally:
            self.release()


async def _outcome(work: Coroutine[Any, Any, T]) -> tuple[T | None, Exception | None]:
    try:
        return await work, None
    except Exception as error:
        return None, error


class SlotQueue:
    """The slots of the server as something to wait for."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._pool = SlotPool(1, limits.queue, limits.tenant_queue)
        self._waiting: dict[int, asyncio.Future[Grant]] = {}
        self._background: list[BackgroundLease] = []
        self._expected = 0
        self._changed = asyncio.Event()
        self.is_closed = False

    @property
    def pool(self) -> SlotPool:
        """Who holds what now."""
        return self._pool

    def adjust(self, limits: LimitsConfig) -> None:
        """Other bounds for whoever comes from now on."""
        self._limits = limits
        self._pool.max_queue, self._pool.tenant_queue = limits.queue, limits.tenant_queue

    def restart(self, n_slots: int) -> None:
        """A server with so many empty slots has appeared; what runs keeps its lease until its end.

        A session whose request runs stays locked: no second one of it begins.
        """
        now = self._now() if self._pool.queued else 0.0
        self._wake(self._pool.restart(n_slots, now))

    def close(self) -> None:
        """The engine ends: nothing waits for llama-server to become idle any more.

        What is being copied is copied to its end: the next proxy goes on from it.
        """
        self.is_closed = True

    async def acquire(
        self,
        session: str,
        tenant: str,
        ephemeral: bool = False,
        slot: int | None = None,
    ) -> SlotLease:
        """A slot for one request of a session; SlotsBusy when the queue or the time for it ends.

        It is `slot` where one is named, which must exist. An `ephemeral` session does not keep the
        slot afterwards. A caller that is cancelled while it waits leaves its place to the next.
        All background work is preempted.
        """
        pool = self._pool
        answer = pool.request(session, tenant, self._now(), ephemeral, slot)
        if isinstance(answer, Refuse):
            raise SlotsBusy(f"{answer.queued} requests wait for a slot already; try again later")
        if isinstance(answer, Grant):
            self.preempt()
            return SlotLease(self, answer, waited=False)
        if answer.displaced is not None:
            self._displace(answer.displaced)
        for lease in self._background:
            wanted = lease.session == session or slot is None or slot in lease.slots
            lease.preempt(_GRACE_S if wanted else 0.0)
        grant = await self._wait(answer.ticket)
        return SlotLease(self, grant, waited=True)

    def background(
        self,
        slot: int | None,
        session: str | None = None,
        settle: Callable[[], Awaitable[None]] | None = None,
        spawn: Spawn | None = None,
        alone: bool = True,
    ) -> BackgroundLease | None:
        """A slot, None: all of them, for work that no request waits for, with its session locked.

        None when a request has one of them or the session; with `alone` also while any request
        runs, waits, or is `expected`. `settle` waits until llama-server is done with a call that
        was cut off, in a task of `spawn`.
        """
        slots = tuple(range(len(self._pool))) if slot is None else (slot,)
        if not all(0 <= each < len(self._pool) for each in slots) or (alone and self._expected):
            return None
        return self._taken(slots, session, settle, spawn, alone)

    def others(self, own: SlotLease | None) -> BackgroundLease | None:
        """All slots but the one of a request, for what it has to try out in them; None when one of
        them is not idle."""
        slots = tuple(i for i in range(len(self._pool)) if own is None or i != own.slot)
        return self._taken(slots, None, None, None, alone=False)

    def _taken(
        self,
        slots: tuple[int, ...],
        session: str | None,
        settle: Callable[[], Awaitable[None]] | None,
        spawn: Spawn | None,
        alone: bool,
    ) -> BackgroundLease | None:
        if not self._pool.begin_background(slots, session, alone):
            return None
        lease = BackgroundLease(self, slots, session, settle, spawn)
        self._background.append(lease)
        return lease

    def preempt(self, grace_s: float = 0.0) -> None:
        """A request has come: background work ends, what takes longer than `grace_s` is cut off."""
        for lease in list(self._background):
            lease.preempt(grace_s)

    @contextmanager
    def expected(self) -> Iterator[None]:
        """A block in which a request is on its way to a slot: no background work begins."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1

    @asynccontextmanager
    async def locked(self, session: str) -> AsyncIterator[None]:
        """A block in which nothing else changes a session; waits for what changes it now.

        Background work of the session is preempted.
        """
        while not self._pool.lock(session):
            for lease in list(self._background):
                if lease.session == session:
                    lease.preempt(_GRACE_S)
            self._changed.clear()
            await self._changed.wait()
        try:
            yield
        finally:
            self._wake(self._pool.unlock(session, self._now()))

    def release(self, lease: SlotLease) -> None:
        """Give a slot back and wake who is next."""
        lease.release()

    def exchange(self, lease: SlotLease, slot: int) -> bool:
        """Have a lease be of another slot; False, and it stays, when that one is not idle."""
        granted = self._pool.exchange(lease.slot, slot, self._now())
        if granted is None:
            return False
        lease.slot = slot
        self._wake(granted)
        return True

    def returned(self, slot: int) -> None:
        """A lease of this slot has been released."""
        self._wake(self._pool.release(slot, self._now()))

    def vacated(self, slot: int) -> None:
        """The request in this slot has saved what others left there."""
        self._wake(self._pool.vacated(slot, self._now()))

    def background_ended(self, lease: BackgroundLease) -> None:
        """A background lease has been released."""
        self._background.remove(lease)
        now, changed = self._now(), lease.has_decoded
        self._wake(self._pool.end_background(lease.slots, lease.session, now, changed))

    async def _wait(self, ticket: int) -> Grant:
        turn: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = turn
        limit_s = self._limits.queue_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.wait([turn])
                return turn.result()
        except TimeoutError as error:
            self._abandon(ticket, turn)
            raise SlotsBusy(f"no slot became free in {limit_s:.0f} s; try again later") from error
        except BaseException:
            self._abandon(ticket, turn)
            raise
        finally:
            del self._waiting[ticket]

    def _displace(self, ticket: int) -> None:
        """End the wait of a request that has lost its place to another tenant's."""
        turn = self._waiting[ticket]
        if not turn.done():
            turn.set_exception(
                SlotsBusy(
                    "the queue for a slot is full, and this client has most of the requests in it;"
                    " try again later"
                )
            )

    def _abandon(self, ticket: int, turn: asyncio.Future[Grant]) -> None:
        """Give back the place in the queue, or the slot that was granted in the same moment."""
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.returned(turn.result().slot)
        else:
            self._wake(self._pool.cancel(ticket, self._now()))

    def _wake(self, granted: Iterable[tuple[int, Grant]]) -> None:
        self._changed.set()
        for ticket, grant in granted:
            turn = self._waiting[ticket]
            if turn.done():  # cancelled, but not yet told so
                self.returned(grant.slot)
            else:
                turn.set_result(grant)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
