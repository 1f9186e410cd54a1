"""Which entry of a store that tenants share goes first when it is full."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def first_of_largest(entries: Iterable[T], tenant_of: Callable[[T], str]) -> T | None:
    """The first entry, in the order given, of the tenant that has most; None when there is none.

    A store that forgets by this rule forgets nothing of a tenant that has no more than an equal
    share, whatever the others put in.
    """
    kept = list(entries)
    counts = Counter(map(tenant_of, kept))
    most = max(counts.values(), default=0)
    return next((entry for entry in kept if counts[tenant_of(entry)] == most), None)


class FairQueue:
    """Texts that wait under a key, of several tenants.

    They are taken in turns between tenants, the latest of each first. When there are too many, the
    oldest of the tenant that has most is dropped.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, OrderedDict[bytes, str]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def put(self, tenant: str, key: bytes, text: str) -> None:
        """Put one in as the latest of its tenant; a key that waits already is moved there."""
        theirs = self._waiting.setdefault(tenant, OrderedDict())
        self._length += key not in theirs
        theirs[key] = text
        theirs.move_to_end(key)

    def take(self) -> tuple[bytes, str]:
        """The next one; its tenant goes to the end of the line. KeyError when there is none."""
        if not self._waiting:
            raise KeyError("nothing waits")
        tenant = next(iter(self._waiting))
        theirs = self._waiting.pop(tenant)
        taken = theirs.popitem()
        self._length -= 1
        if theirs:
            self._waiting[tenant] = theirs
        return taken

    def drop(self) -> bytes:
        """Drop the oldest of the tenant that has most; its key. KeyError when there is none."""
        if not self._waiting:
            raise KeyError("nothing waits")
        tenant = max(self._waiting, key=lambda name: len(self._waiting[name]))
        key, _ = self._waiting[tenant].popitem(last=False)
        self._length -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        return key

    def clear(self) -> None:
        """Drop all."""
        self._waiting.clear()
        self._length = 0
