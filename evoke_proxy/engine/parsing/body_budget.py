"""Memory for the request bodies of all requests under way, bounded in bytes and shared by tenants.

Bytes count when they arrive, not when they are announced. One tenant may hold three times what is
left free, so that there is room for another at any time. Where a body does not fit, the newest body
of the tenant that holds most is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evoke_proxy.errors import BodyMemoryFull

# A body that does not fit waits this long for others to end.
_WAIT_S = 2.0
# So much of each body is not counted: small requests never wait for memory.
FREE_BYTES = 64 * 1024
# What one tenant may hold, as a multiple of what is free then.
_OF_FREE = 3
# A parsed body counts three times: its bytes, what was parsed of it, and what is forwarded.
COPIES = 3


class BodyShare:
    """The memory that the body of one request takes."""

    def __init__(self, budget: BodyBudget, tenant: str, copies: int) -> None:
        self.tenant = tenant
        self.n_bytes = 0
        self.arriving = True
        self.waiting = False
        self.refused = False
        self._budget = budget
        self._copies = copies
        self._free = FREE_BYTES
        self._stop: asyncio.Timeout | None = None

    async def announce(self, n_bytes: int) -> None:
        """Wait until a body of this length fits; BodyMemoryFull when it does not in time.

        Nothing is reserved: a body that never arrives takes no room from others. A tenant that does
        not hold most is not kept waiting: others make room for it as its body arrives.
        """
        wanted = self._copies * max(0, n_bytes - FREE_BYTES)
        fits = self._budget.fits
        await self._budget.wait_for(
            lambda: fits(self, wanted) or self._budget.largest() != self.tenant
        )

    async def take(self, n_bytes: int) -> None:
        """Count bytes that have arrived; BodyMemoryFull when there is no room for them in time."""
        free = min(self._free, n_bytes)
        self._free -= free
        wanted = self._copies * (n_bytes - free)
        if wanted and not self._budget.fits(self, wanted):
            await self._budget.make_room(self, wanted)
        self.n_bytes += wanted
        self._budget.add(self.tenant, wanted)

    @contextmanager
    def reading(self, stop: asyncio.Timeout) -> Iterator[None]:
        """While the body is read it may be refused in favour of another tenant.

        Expiry of `stop` then ends the reading, and BodyMemoryFull is raised instead.
        """
        self._stop = stop
        try:
            yield
        finally:
            self.arriving = False
            self._stop = None

    def refuse(self) -> None:
        """End the reading of this body."""
        self.refused = True
        if self._stop is not None:
            self._stop.reschedule(asyncio.get_running_loop().time())


class BodyBudget:
    """Counts the bytes of all request bodies under way; `limit_mib` says how many there may be."""

    def __init__(self, limit_mib: Callable[[], int]) -> None:
        self._limit_mib = limit_mib
        self._shares: dict[BodyShare, None] = {}  # in the order of their arrival
        self._by_tenant: dict[str, int] = {}
        self._total = 0
        self._notices: set[asyncio.Future[None]] = set()

    @property
    def n_bytes(self) -> int:
        """What all bodies take now."""
        return self._total

    @contextmanager
    def share(self, tenant: str, copies: int = 1) -> Iterator[BodyShare]:
        """The share of one request, which is given back when the request ends."""
        share = BodyShare(self, tenant, copies)
        self._shares[share] = None
        try:
            yield share
        finally:
            del self._shares[share]
            self.add(tenant, -share.n_bytes)
            self._notify()

    def add(self, tenant: str, n_bytes: int) -> None:
        """Count bytes of a tenant, or count them no longer."""
        self._total += n_bytes
        left = self._by_tenant.get(tenant, 0) + n_bytes
        if left:
            self._by_tenant[tenant] = left
        else:
            self._by_tenant.pop(tenant, None)

    def fits(self, share: BodyShare, n_bytes: int) -> bool:
        """Whether a body may take so many bytes more, and no older one of its tenant waits."""
        free = (self._limit_mib() << 20) - self._total - n_bytes
        if self._by_tenant.get(share.tenant, 0) + n_bytes > _OF_FREE * free:
            return False
        for other in self._shares:
            if other is share:
                break
            if other.waiting and other.tenant == share.tenant:
                return False
        return True

    def largest(self) -> str | None:
        """The tenant that holds most; None when nothing is held."""
        held = self._by_tenant
        return max(held, key=lambda tenant: held[tenant]) if held else None

    async def make_room(self, share: BodyShare, n_bytes: int) -> None:
        """Wait until so many bytes fit; refuse a body of the tenant that has most, if need be."""
        share.waiting = True
        try:
            await self.wait_for(lambda: self._fits_or_refuses(share, n_bytes), share)
        finally:
            share.waiting = False
            self._notify()

    def _fits_or_refuses(self, share: BodyShare, n_bytes: int) -> bool:
        if self.fits(share, n_bytes):
            return True
        most = self.largest()
        if most is not None and most != share.tenant:
            self._refuse_newest(most)
        return False

    def _refuse_newest(self, tenant: str) -> None:
        """Refuse the newest body of a tenant that is still arriving, one at a time."""
        for share in reversed(self._shares):
            if share.tenant == tenant and share.arriving and share.n_bytes:
                if not share.refused:
                    share.refuse()
                return

    def _newest_waiting(self, tenant: str) -> BodyShare | None:
        waiting = (s for s in reversed(self._shares) if s.tenant == tenant and s.waiting)
        return next(waiting, None)

    async def wait_for(self, holds: Callable[[], bool], share: BodyShare | None = None) -> None:
        """Wait until something holds; BodyMemoryFull after `_WAIT_S`.

        Of the waiting bodies of a tenant the newest gives up first, so that the older ones end.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _WAIT_S
        while not holds():
            left = until - loop.time()
            if left <= 0:
                newest = self._newest_waiting(share.tenant) if share is not None else None
                if newest in (None, share):
                    raise BodyMemoryFull
                left = _WAIT_S
            notice: asyncio.Future[None] = loop.create_future()
            self._notices.add(notice)
            timer = loop.call_later(left, _set, notice)
            try:
                await notice
            finally:
                timer.cancel()
                self._notices.discard(notice)

    def _notify(self) -> None:
        for notice in self._notices:
            _set(notice)
        self._notices = set()


def _set(notice: asyncio.Future[None]) -> None:
    if not notice.done():
        notice.set_result(None)
