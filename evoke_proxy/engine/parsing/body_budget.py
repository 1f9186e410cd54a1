"""Limits the memory of the request bodies of all running requests, shared by tenants.

Bytes count when they arrive, not when they are announced. One tenant may use three times the memory
that is free, so another tenant always finds room. When a body does not fit, the newest body of the
tenant with the most bytes is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evoke_proxy.errors import BodyMemoryFull

# Seconds that a body which does not fit waits for other requests to end.
_WAIT_S = 2.0
# Bytes of each body that are not counted, so that small requests never wait for memory.
FREE_BYTES = 64 * 1024
# The most memory of one tenant, as a multiple of the free memory.
_OF_FREE = 3
# A parsed body counts three times: its bytes, its parsed form, and the bytes that are forwarded.
COPIES = 3


class BodyShare:
    """The memory of the body of one request."""

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
        """Wait until a body of this length fits; raises BodyMemoryFull after `_WAIT_S`.

        Nothing is reserved: a body that never arrives takes no memory from others. Only the tenant
        with the most bytes waits here; for others room is made while their body arrives.
        """
        n_needed = self._copies * max(0, n_bytes - FREE_BYTES)
        fits = self._budget.fits
        await self._budget.wait_for(
            lambda: fits(self, n_needed) or self._budget.largest() != self.tenant
        )

    async def take(self, n_bytes: int) -> None:
        """Count bytes that have arrived; raises BodyMemoryFull when there is no room in time."""
        free = min(self._free, n_bytes)
        self._free -= free
        n_needed = self._copies * (n_bytes - free)
        if n_needed and not self._budget.fits(self, n_needed):
            await self._budget.make_room(self, n_needed)
        self.n_bytes += n_needed
        self._budget.add(self.tenant, n_needed)

    @contextmanager
    def reading(self, stop: asyncio.Timeout) -> Iterator[None]:
        """A block in which the body is read and may be refused in favour of another tenant.

        A refusal expires `stop`; the caller then raises BodyMemoryFull.
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
    """Counts the bytes of all running requests' bodies; `limit_mib` returns the limit in MiB."""

    def __init__(self, limit_mib: Callable[[], int]) -> None:
        self._limit_mib = limit_mib
        self._shares: dict[BodyShare, None] = {}  # oldest first
        self._by_tenant: dict[str, int] = {}
        self._total = 0
        self._notices: set[asyncio.Future[None]] = set()

    @property
    def n_bytes(self) -> int:
        """The bytes of all bodies."""
        return self._total

    @contextmanager
    def share(self, tenant: str, copies: int = 1) -> Iterator[BodyShare]:
        """The share of one request, returned when the block ends."""
        share = BodyShare(self, tenant, copies)
        self._shares[share] = None
        try:
            yield share
        finally:
            del self._shares[share]
            self.add(tenant, -share.n_bytes)
            self._notify()

    def add(self, tenant: str, n_bytes: int) -> None:
        """Add bytes to the count of a tenant; a negative number removes them."""
        self._total += n_bytes
        left = self._by_tenant.get(tenant, 0) + n_bytes
        if left:
            self._by_tenant[tenant] = left
        else:
            self._by_tenant.pop(tenant, None)

    def fits(self, share: BodyShare, n_bytes: int) -> bool:
        """Whether a body may take `n_bytes` more, and no older body of its tenant waits."""
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
        """The tenant with the most bytes; None when there are none."""
        sizes = self._by_tenant
        return max(sizes, key=lambda tenant: sizes[tenant]) if sizes else None

    async def make_room(self, share: BodyShare, n_bytes: int) -> None:
        """Wait until `n_bytes` fit; refuses a body of the tenant with the most bytes if needed."""
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
        """Refuse the newest arriving body of a tenant, unless it is refused already."""
        for share in reversed(self._shares):
            if share.tenant == tenant and share.arriving and share.n_bytes:
                if not share.refused:
                    share.refuse()
                return

    def _newest_waiting(self, tenant: str) -> BodyShare | None:
        waiting = (s for s in reversed(self._shares) if s.tenant == tenant and s.waiting)
        return next(waiting, None)

    async def wait_for(self, holds: Callable[[], bool], share: BodyShare | None = None) -> None:
        """Wait until a condition holds; raises BodyMemoryFull after `_WAIT_S`.

        Of the waiting bodies of a tenant the newest fails first, so that older ones can complete.
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
