"""Vectors stay within their bytes, the longest unused going first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.retrieval.vectors import VectorCache

ONE = np.ones(4, np.float32)
COST = VectorCache(1 << 20)
COST.put(b"", ONE)


def test_one_vector_costs_more_than_its_numbers() -> None:
    assert COST.size > ONE.nbytes


def test_the_longest_unused_goes_first() -> None:
    cache = VectorCache(3 * COST.size)
    for key in (b"a", b"b", b"c"):
        cache.put(key, ONE)
    assert cache.get(b"a") is not None
    cache.put(b"d", ONE)
    assert [key in cache for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert cache.get(b"b") is None


def test_looking_whether_it_is_there_does_not_use_it() -> None:
    cache = VectorCache(2 * COST.size)
    cache.put(b"a", ONE)
    cache.put(b"b", ONE)
    assert b"a" in cache
    cache.put(b"c", ONE)
    assert b"a" not in cache


def test_what_is_kept_is_a_copy_nobody_can_write_to() -> None:
    cache = VectorCache(1 << 20)
    batch = np.arange(8, dtype=np.float32).reshape(2, 4)
    cache.put(b"a", batch[1])
    batch[:] = 0
    kept = cache.get(b"a")
    assert kept is not None and kept.tolist() == [4, 5, 6, 7] and kept.base is None
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans())), st.integers(1, 6))
def test_size_is_the_sum_and_never_over_the_limit(
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
