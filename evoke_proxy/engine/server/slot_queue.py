"""Leases slots to requests and to background work; `SlotPool` decides who is next.

A request takes a `SlotLease`. Background work takes a `BackgroundLease`, which every new request
preempts. A request that needs the same slot or session waits until the background lease has ended.
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
from evoke_proxy.errors import (
    STATUS_LOADING,
    EvokeError,
    SlotsBusy,
    UpstreamRejected,
    UpstreamTimeout,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

# Runs a coroutine in a task that outlives its caller; the text names it in the log.
Spawn = Callable[[Coroutine[Any, Any, None], str], object]
# Seconds before each of the first polls of a slot, before every later poll, and between warnings.
# A generating slot notices a closed connection with its next token. A slot that decodes a prompt
# checks the connection after a second without any result, and an answer to a poll is a result:
# faster polls would prevent the check.
_FIRST_POLLS_S = (0.0, 0.05, 0.15)
_POLL_S = 1.3
_WARN_EVERY_S = 60.0
# llama-server takes about this many seconds to notice a cancelled call: a call that ends by itself
# within that time is not cancelled.
_GRACE_S = 1.0
# Seconds that a step of decoding ahead may still take when a request arrives, which does not wait
# for a slot yet: cancelling the step takes as long.
STEP_GRACE_S = 0.2


async def until_over(busy: Callable[[], Awaitable[bool]], give_up: Callable[[], bool]) -> None:
    """Wait until llama-server has ended a request whose client has disconnected.

    `busy` queries the slot. A busy slot is never given to the next request, however long it takes.
    The wait ends early when `give_up` returns True. Raises UpstreamError when llama-server cannot
    be reached, or does not say what its slots do.
    """
    loop = asyncio.get_running_loop()
    began, warned_at, n_polls = loop.time(), loop.time(), 0
    while True:
        await asyncio.sleep(_FIRST_POLLS_S[n_polls] if n_polls < len(_FIRST_POLLS_S) else _POLL_S)
        n_polls += 1
        try:
            if not await busy():
                return
        except UpstreamTimeout as error:  # its main loop is occupied: poll again
            _log.debug("%s", error)
        except UpstreamRejected as error:
            if error.status != STATUS_LOADING:
                raise
        if give_up():
            return
        if loop.time() - warned_at > _WARN_EVERY_S:
            warned_at = loop.time()
            _log.warning(
                "llama-server has been busy for %.0f s for a disconnected client; its"
                " slot is not used until it is idle",
                loop.time() - began,
            )


async def finished(work: asyncio.Future[T]) -> T:
    """Wait for work to end, even when the caller is cancelled, and return its result.

    Raises what the work raises, and CancelledError, after the work, when the caller was cancelled.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # mark it as retrieved, so that asyncio does not report it
        raise cancelled
    return work.result()


class Preempted(EvokeError):
    """Background work ends because a request needs the server."""


class SlotLease:
    """One slot for one request, from `SlotQueue.acquire` until it is released.

    A context manager. Releasing is synchronous, and does nothing the second time.

    Attributes:
        slot: the number of the slot.
        victim: the session whose rows may still be in the slot, locked until `vacated`; or None.
        previous: the slot that the request's session has moved from, reserved until `vacated`; or
            None.
        waited: whether the request waited for the slot.
        is_released: whether the lease has ended.
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
        """Whether the slot may have changed since the event loop time `since`."""
        return self._changed_at > since or (self.waited and self._queue.pool.changed_at > since)

    def vacated(self) -> None:
        """Unlock `victim` and `previous`: the rows of others are saved, or are given up."""
        if not (self._is_vacated or self.is_released):
            self._is_vacated = True
            self._queue.vacated(self.slot)

    @contextmanager
    def vacating(self) -> Iterator[None]:
        """Save the rows of others in this context; leaving it in any way calls `vacated`."""
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
    """Slots and the lock of a session for background work, as an async context manager.

    A new request sets `preempted`, which the work checks between its calls, and cancels the call in
    `run`. After a cancelled call a task keeps the lease until `settle` has returned: it waits until
    llama-server is idle. Leaving the context suppresses Preempted.

    Attributes:
        slots: the numbers of the slots.
        session: the session that is locked; None when the work changes no session.
        preempted: whether a request has arrived.
        has_decoded: whether the slots may have changed.
        is_released: whether the lease has ended.
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
        self._is_cancelled = False
        # Whether llama-server may still work on a cancelled call.
        self._is_busy = False
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
        """Give the slots back, at once or when llama-server is idle."""
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

    def slots_changed(self) -> None:
        """Record that the slots have changed by a call that was not made in `run`."""
        self.has_decoded = True

    def release(self) -> None:
        """Give the slots back and wake the next request."""
        if not self.is_released:
            self.is_released = True
            self._queue.background_ended(self)

    @property
    def is_busy(self) -> bool:
        """Whether llama-server may still work on a cancelled call: `settle` then follows."""
        return self._is_busy

    def check(self) -> None:
        """Raise Preempted when a request has arrived."""
        if self.preempted:
            raise Preempted("a request has arrived")

    def preempt(self, grace_s: float) -> None:
        """Set `preempted`, and cancel the call in `run` after `grace_s` seconds."""
        self.preempted = True
        if self._is_cancelled or self._work is None:
            return
        if grace_s <= 0:
            self._cancel()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(grace_s, self._cancel)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a call that a request may cancel.

        Raises Preempted when a request cancels it or has arrived before, and what the call raises.
        """
        if self.preempted:
            work.close()
            raise Preempted("a request has arrived")
        was_busy, self._is_busy, self.has_decoded = self._is_busy, True, True
        try:
            async with asyncio.TaskGroup() as group:
                task = self._work = group.create_task(_outcome(work))
        finally:
            work.close()  # it has not begun where its task was cancelled before
            self._work = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if task.cancelled():
            raise Preempted("a request has arrived")
        result, error = task.result()
        if error is not None:
            raise error
        self._is_busy = was_busy
        return cast(T, result)

    def _cancel(self) -> None:
        self._is_cancelled = True
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
    """Leases the slots of one server, and makes requests wait for them."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._pool = SlotPool(1, limits.queue, limits.tenant_queue)
        self._waiting: dict[int, asyncio.Future[Grant]] = {}
        self._background: list[BackgroundLease] = []
        self._expected = 0
        self._changed = asyncio.Event()
        self.is_closed = False
        # Called by `close`.
        self.on_close: list[Callable[[], None]] = []

    @property
    def pool(self) -> SlotPool:
        """The assignment of slots to sessions."""
        return self._pool

    def adjust(self, limits: LimitsConfig) -> None:
        """Apply other limits to requests that arrive from now on."""
        self._limits = limits
        self._pool.max_queue, self._pool.tenant_queue = limits.queue, limits.tenant_queue

    def restart(self, n_slots: int) -> None:
        """Start again with `n_slots` empty slots, those of a new instance of llama-server.

        Running requests keep their leases, and their sessions stay locked.
        """
        now = self._now() if self._pool.queued else 0.0
        self._wake(self._pool.restart(n_slots, now))

    def close(self) -> None:
        """Set `is_closed`: from now on nothing waits until llama-server is idle.

        Background work continues to its end, because the next proxy process uses its copies, except
        what `on_close` ends.
        """
        self.is_closed = True
        for callback in self.on_close:
            callback()

    async def acquire(
        self,
        session: str,
        tenant: str,
        ephemeral: bool = False,
        slot: int | None = None,
    ) -> SlotLease:
        """Wait for a slot for one request of a session, and preempt all background work.

        `slot` names an existing slot; None accepts any. An `ephemeral` session does not keep the
        slot afterwards. A caller that is cancelled while it waits leaves the queue. Raises
        SlotsBusy when the queue is full, or no slot becomes free in `limits.queue_timeout_s`.
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
            is_awaited = lease.session == session or slot is None or slot in lease.slots
            lease.preempt(_GRACE_S if is_awaited else 0.0)
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
        """Lease a slot (None: all slots) for background work, and lock `session`.

        Returns None when a request has one of the slots or the session; with `alone` also while any
        request runs, waits, or is `expected`. After a cancelled call `spawn` starts a task in which
        `settle` waits until llama-server is idle.
        """
        slots = tuple(range(len(self._pool))) if slot is None else (slot,)
        if not all(0 <= each < len(self._pool) for each in slots) or (alone and self._expected):
            return None
        return self._taken(slots, session, settle, spawn, alone)

    def others(self, own: SlotLease | None) -> BackgroundLease | None:
        """Lease all slots except that of a request, which probes them.

        Returns None when one of them is not idle.
        """
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
        """Preempt all background work; calls longer than `grace_s` seconds are cancelled."""
        for lease in list(self._background):
            lease.preempt(grace_s)

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Keep background work from starting in this context: a request is about to take a slot."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1

    @asynccontextmanager
    async def locked(self, session: str) -> AsyncIterator[None]:
        """Lock a session in this context; waits for its request, preempts its background work."""
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

    def exchange(self, lease: SlotLease, slot: int) -> bool:
        """Move a lease to another slot; returns False when that slot is not idle."""
        granted = self._pool.exchange(lease.slot, slot, self._now())
        if granted is None:
            return False
        lease.slot = slot
        self._wake(granted)
        return True

    def returned(self, slot: int) -> None:
        """Release a slot in the pool; called by its lease."""
        self._wake(self._pool.release(slot, self._now()))

    def vacated(self, slot: int) -> None:
        """Unlock what the lease of a slot had displaced; called by the lease."""
        self._wake(self._pool.vacated(slot, self._now()))

    def background_ended(self, lease: BackgroundLease) -> None:
        """Release the slots of a background lease in the pool; called by the lease."""
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
        """Refuse a waiting request that was displaced by another tenant's request."""
        turn = self._waiting[ticket]
        if not turn.done():
            turn.set_exception(
                SlotsBusy(
                    "the queue for a slot is full, and this client has most of the requests in it;"
                    " try again later"
                )
            )

    def _abandon(self, ticket: int, turn: asyncio.Future[Grant]) -> None:
        """Leave the queue, or release the slot that was granted at the same time."""
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.returned(turn.result().slot)
        else:
            self._wake(self._pool.cancel(ticket, self._now()))

    def _wake(self, granted: Iterable[tuple[int, Grant]]) -> None:
        self._changed.set()
        for ticket, grant in granted:
            turn = self._waiting[ticket]
            if turn.done():  # cancelled, but its task has not run since
                self.returned(grant.slot)
            else:
                turn.set_result(grant)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
