"""Memory for request bodies that conversations remember, bounded in bytes over all of them.

A remembered body saves parsing and rendering what the next request repeats, and tells where the
next one departs from it. Without it the next request is read as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol
from weakref import WeakMethod


class Holder(Protocol):
    """What remembers bodies of one tenant."""

    @property
    def tenant(self) -> str: ...
    @property
    def in_use(self) -> int: ...
    @property
    def body_bytes(self) -> int: ...
    def drop_bodies(self) -> None: ...


# The holders of one model's engine, the longest unused first.
Holders = Callable[[], Iterable[Holder]]


class BodyMemory:
    """Drops bodies of the tenant that has most, its longest unused first."""

    def __init__(self, limit_mib: int) -> None:
        self.limit_mib = limit_mib
        self._holders: list[WeakMethod[Holders]] = []

    def add(self, holders: Holders) -> None:
        """Count these, too, for as long as the object of this method lives."""
        self._holders.append(WeakMethod(holders))

    @property
    def n_bytes(self) -> int:
        """What all of them hold now, estimated."""
        return sum(holder.body_bytes for holder in self._all())

    def shed(self) -> None:
        """Be within the limit again; what a request is using stays."""
        by_tenant: dict[str, list[tuple[Holder, int]]] = {}
        sizes: dict[str, int] = {}
        for holder in self._all():
            size = holder.body_bytes
            if size:
                sizes[holder.tenant] = sizes.get(holder.tenant, 0) + size
                if not holder.in_use:
                    by_tenant.setdefault(holder.tenant, []).append((holder, size))
        over = sum(sizes.values()) - (self.limit_mib << 20)
        while over > 0 and by_tenant:
            most = max(by_tenant, key=lambda tenant: sizes[tenant])
            holder, size = by_tenant[most].pop(0)
            holder.drop_bodies()
            sizes[most] -= size
            over -= size
            if not by_tenant[most]:
                del by_tenant[most]

    def _all(self) -> Iterable[Holder]:
        living = [(reference, reference()) for reference in self._holders]
        self._holders = [reference for reference, holders in living if holders is not None]
        for _, holders in living:
            if holders is not None:
                yield from holders()
