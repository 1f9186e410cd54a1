"""Which entry of a store that tenants share goes first when it is full."""

from __future__ import annotations

from collections import Counter
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
