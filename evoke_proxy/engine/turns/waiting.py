"""Waiting for a slot: the pool decides who is next, this makes them wait and wakes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.servers.slots import Grant, Refuse, SlotPool
from evoke_proxy.errors import SlotsBusy

# What to do for a client again and again while it waits; what it raises ends the waiting.
Patience = Callable[[], Awaitable[None]]


# llama-server looks for a closed connection after a second without any result, and an answer to
# us is a result: asking more often would keep it from noticing that its client is gone.
_ASK_AGAIN_S = 1.5
_ASK_TIMES = 40


async def until_over(busy: Callable[[], Awaitable[bool]], enough: Callable[[], bool]) -> None:
    """Wait until llama-server is done with a request whose client is gone: it may not know yet.

    Not for ever, and no longer once `enough` says so.
    """
    for wait_s in (0.0, 0.05, *[_ASK_AGAIN_S] * _ASK_TIMES):
        await asyncio.sleep(wait_s)
        if not await busy() or enough():
            return


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot until it is released; `victim` is the session whose rows may still be in it."""

    slot: int
    victim: str | None
    waited: bool
    pool: SlotPool


class SlotQueue:
    """The slots of the server as something to wait for."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._pool = SlotPool(1, limits.queue)
        self._waiting: dict[tuple[int, int], asyncio.Future[Grant]] = {}

    @property
    def pool(self) -> SlotPool:
        """Who holds what now."""
        return self._pool

    def adjust(self, limits: LimitsConfig) -> None:
        """Other bounds for whoever comes from now on."""
        self._limits = limits
        self._pool.max_queue = limits.queue

    def restart(self, n_slots: int) -> None:
        """Another server with so many empty slots; requests that run keep their leases."""
        self._wake(self._pool, self._pool.restart(n_slots, self._now()))

    async def acquire(
        self,
        session: str,
        tenant: str,
        guest: bool = False,
        patience: Patience | None = None,
        slot: int | None = None,
    ) -> Lease:
        """A slot for one request of a session; SlotsBusy when the queue or the time for it ends.

        It is `slot` where one is named, which must exist. A guest does not hold the slot
        afterwards. `patience` is called every `keepalive_s` of waiting. A caller that is cancelled
        while it waits leaves its place to the next.
        """
        pool = self._pool
        answer = pool.request(session, tenant, self._now(), guest, slot)
        if isinstance(answer, Refuse):
            raise SlotsBusy(f"{answer.queued} requests wait for a slot already; try again later")
        if isinstance(answer, Grant):
            return Lease(answer.slot, answer.victim, False, pool)
        grant = await self._wait(pool, answer.ticket, patience)
        return Lease(grant.slot, grant.victim, True, pool)

    def release(self, lease: Lease) -> None:
        """Give a slot back and wake who is next."""
        self._wake(lease.pool, lease.pool.release(lease.slot, self._now()))

    async def _wait(self, pool: SlotPool, ticket: int, patience: Patience | None) -> Grant:
        key = (id(pool), ticket)
        turn: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiting[key] = turn
        limit_s = self._limits.queue_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not (await asyncio.wait([turn], timeout=self._limits.keepalive_s))[0]:
                    if patience is not None:
                        await patience()
                return turn.result()
        except TimeoutError as error:
            self._abandon(pool, ticket, turn)
            raise SlotsBusy(f"no slot became free in {limit_s:.0f} s; try again later") from error
        except BaseException:
            self._abandon(pool, ticket, turn)
            raise
        finally:
            del self._waiting[key]

    def _abandon(self, pool: SlotPool, ticket: int, turn: asyncio.Future[Grant]) -> None:
        """Give back the place in the queue, or the slot that was granted in the same moment."""
        if turn.done() and not turn.cancelled():
            self._wake(pool, pool.release(turn.result().slot, self._now()))
        else:
            self._wake(pool, pool.cancel(ticket, self._now()))

    def _wake(self, pool: SlotPool, granted: Iterable[tuple[int, Grant]]) -> None:
        for ticket, grant in granted:
            turn = self._waiting[(id(pool), ticket)]
            if turn.done():  # cancelled, but not yet told so
                self._wake(pool, pool.release(grant.slot, self._now()))
            else:
                turn.set_result(grant)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
