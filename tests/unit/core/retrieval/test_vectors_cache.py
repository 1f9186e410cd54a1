"""The cache of vectors: it stays within its size and drops the least recently used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.retrieval.vectors import VectorCache

ONE = np.ones(4, np.float32)
COST = VectorCache(1 << 20)
COST.put(b"", ONE)


def test_the_size_of_a_vector_includes_overhead() -> None:
    assert COST.size > ONE.nbytes


def test_the_least_recently_used_vector_is_dropped_first() -> None:
    cache = VectorCache(3 * COST.size)
    for key in (b"a", b"b", b"c"):
        cache.put(key, ONE)
    assert cache.get(b"a") is not None
    cache.put(b"d", ONE)
    assert [key in cache for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert cache.get(b"b") is None


def test_a_membership_test_does_not_count_as_use() -> None:
    cache = VectorCache(2 * COST.size)
    cache.put(b"a", ONE)
    cache.put(b"b", ONE)
    assert b"a" in cache
    cache.put(b"c", ONE)
    assert b"a" not in cache


def test_a_cached_vector_is_a_read_only_copy() -> None:
    cache = VectorCache(1 << 20)
    batch = np.arange(8, dtype=np.float32).reshape(2, 4)
    cache.put(b"a", batch[1])
    batch[:] = 0
    cached = cache.get(b"a")
    assert cached is not None and cached.tolist() == [4, 5, 6, 7] and cached.base is None
    with pytest.raises(ValueError, match="read-only"):
        cached[0] = 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans())), st.integers(1, 6))
def test_the_size_is_the_sum_of_the_vectors_and_within_the_limit(
    steps: list[tuple[int, int, bool]], room: int
) -> None:
    limit = room * COST.size
    cache, costs = VectorCache(limit), {}
    for number, length, reads in steps:
        key = bytes([number])
        if reads:
            cache.get(key)
            continue
        cache.put(key, np.zeros(length, np.float32))
        costs[key] = COST.size - ONE.nbytes + 4 * length
        assert cache.size <= limit
        assert cache.size == sum(cost for key, cost in costs.items() if key in cache)
        assert len(cache) == sum(key in cache for key in costs)
