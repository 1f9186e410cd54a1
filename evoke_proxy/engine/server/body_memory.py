"""Limits the memory of request bodies that conversations cache, over all servers of a proxy.

A cached body saves parsing and rendering the part that the next request repeats, and shows where
the next request differs. Without it the next request is parsed and rendered completely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol
from weakref import WeakMethod


class Holder(Protocol):
    """An owner of cached bodies of one tenant.

    Attributes:
        tenant: the tenant whose bodies they are.
        in_use: number of requests that use the bodies now; they are not dropped while it is not 0.
        body_bytes: estimate of the memory that the bodies take, in bytes.
    """

    @property
    def tenant(self) -> str: ...
    @property
    def in_use(self) -> int: ...
    @property
    def body_bytes(self) -> int: ...
    def drop_bodies(self) -> None:
        """Drop all cached bodies."""


# Returns the holders at one server, the least recently used first.
Holders = Callable[[], Iterable[Holder]]


class BodyMemory:
    """Drops cached bodies over a limit: those of the tenant with the most bytes first.

    Of one tenant, the least recently used bodies are dropped first. `limit_mib` may be replaced.
    """

    def __init__(self, limit_mib: int) -> None:
        self.limit_mib = limit_mib
        self._holders: list[WeakMethod[Holders]] = []
        # An upper bound of `n_bytes`: what the latest count found, and all that was added since.
        self._most_bytes = 0.0

    def add(self, holders: Holders) -> None:
        """Include the holders that a method returns, until the object of the method is deleted."""
        self._most_bytes = math.inf  # they are counted by the next `trim`
        self._holders.append(WeakMethod(holders))

    @property
    def n_bytes(self) -> int:
        """Estimate of the memory of all cached bodies, in bytes."""
        return sum(holder.body_bytes for holder in self._all())

    def record_growth(self, n_bytes: int) -> None:
        """Record that one holder has this many bytes now; it may have had fewer before."""
        self._most_bytes += n_bytes

    def trim(self) -> None:
        """Drop bodies until the limit is met; those that a request uses stay.

        The holders are read only when there may be more bytes than the limit allows.
        """
        if self._most_bytes <= self.limit_mib << 20:
            return
        by_tenant: dict[str, list[tuple[Holder, int]]] = {}
        sizes: dict[str, int] = {}
        for holder in self._all():
            size = holder.body_bytes
            if size:
                sizes[holder.tenant] = sizes.get(holder.tenant, 0) + size
                if not holder.in_use:
                    by_tenant.setdefault(holder.tenant, []).append((holder, size))
        self._most_bytes = sum(sizes.values())
        over = sum(sizes.values()) - (self.limit_mib << 20)
        while over > 0 and by_tenant:
            most = max(by_tenant, key=lambda tenant: sizes[tenant])
            holder, size = by_tenant[most].pop(0)
            holder.drop_bodies()
            sizes[most] -= size
            over -= size
            self._most_bytes -= size
            if not by_tenant[most]:
                del by_tenant[most]

    def _all(self) -> Iterable[Holder]:
        living = [(reference, reference()) for reference in self._holders]
        self._holders = [reference for reference, holders in living if holders is not None]
        for _, holders in living:
            if holders is not None:
                yield from holders()
