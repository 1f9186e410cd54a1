"""Fair use of stores and queues that tenants share."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def first_of_largest(entries: Iterable[T], tenant_of: Callable[[T], str]) -> T | None:
    """The first entry of the tenant that has most entries; None when there are no entries.

    A store that evicts by this rule never evicts an entry of a tenant with at most an equal share.
    """
    all_entries = list(entries)
    counts = Counter(map(tenant_of, all_entries))
    most = max(counts.values(), default=0)
    return next((entry for entry in all_entries if counts[tenant_of(entry)] == most), None)


class FairQueue:
    """A queue of texts with unique keys, fair between tenants.

    Tenants take turns; within a tenant the latest text comes first.
    """

    def __init__(self) -> None:
        # By tenant, the one whose turn is next first, unless it was the latest.
        self._waiting: dict[str, OrderedDict[bytes, str]] = {}
        self._latest = ""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def put(self, tenant: str, key: bytes, text: str) -> None:
        """Add a text as the tenant's latest; a queued key becomes the latest."""
        texts = self._waiting.setdefault(tenant, OrderedDict())
        self._length += key not in texts
        texts[key] = text
        texts.move_to_end(key)

    def take(self, most: int, chars: int) -> dict[bytes, str]:
        """Remove and return the next texts, by key, which are of one tenant.

        They are at most `most`, and have `chars` characters in all, unless one alone has more.
        KeyError when the queue is empty.
        """
        if not self._waiting:
            raise KeyError("the queue is empty")
        others = (tenant for tenant in self._waiting if tenant != self._latest)
        tenant = self._latest = next(others, self._latest)
        texts = self._waiting.pop(tenant)
        taken = dict([texts.popitem()])
        left = chars - len(next(iter(taken.values())))
        while texts and len(taken) < most and len(texts[next(reversed(texts))]) <= left:
            key, text = texts.popitem()
            taken[key] = text
            left -= len(text)
        self._length -= len(taken)
        if texts:
            self._waiting[tenant] = texts
        return taken

    def drop(self) -> bytes:
        """Remove the oldest text of the tenant that has most; returns its key.

        KeyError when the queue is empty.
        """
        if not self._waiting:
            raise KeyError("the queue is empty")
        tenant = max(self._waiting, key=lambda name: len(self._waiting[name]))
        key, _ = self._waiting[tenant].popitem(last=False)
        self._length -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        return key

    def clear(self) -> None:
        """Remove all texts."""
        self._waiting.clear()
        self._length = 0
