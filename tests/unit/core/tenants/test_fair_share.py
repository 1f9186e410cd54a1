"""Fair sharing between tenants, in queues and caches that are full."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.retrieval.vectors import VectorCache
from evoke_proxy.core.tenants.fair_share import FairQueue, first_of_largest


@given(st.lists(st.sampled_from("xyz"), max_size=40))
def test_the_first_entry_of_the_largest_tenant_is_chosen(tenants: list[str]) -> None:
    entries = list(enumerate(tenants))
    found = first_of_largest(entries, lambda entry: entry[1])
    counts = Counter(tenants)
    if found is None:
        assert not entries
    else:
        assert counts[found[1]] == max(counts.values())
        assert all(counts[of] < counts[found[1]] for at, of in entries if at < found[0])


def test_a_queue_drops_the_oldest_entry_of_the_largest_tenant() -> None:
    queue = FairQueue()
    for number in range(2):
        queue.put("quiet", b"q%d" % number, f"q{number}")
    for number in range(50):
        queue.put("loud", b"l%d" % number, f"l{number}")
        while len(queue) > 6:
            assert queue.drop().startswith(b"l")
    assert len(queue) == 6


def test_a_queue_serves_tenants_in_turn_with_the_latest_entry_first() -> None:
    queue = FairQueue()
    for number in range(4):
        queue.put("loud", b"l%d" % number, "")
    queue.put("quiet", b"q0", "")
    queue.put("loud", b"l0", "")  # put again, so that it is the latest
    taken = [key for _ in range(len(queue)) for key in queue.take(1, 9)]
    assert sorted(taken[:2]) == [b"l0", b"q0"] and taken[2:] == [b"l3", b"l2", b"l1"]
    assert not queue


def test_a_tenant_that_joins_is_served_before_the_one_that_was_served_latest() -> None:
    queue = FairQueue()
    for number in range(9):
        queue.put("loud", b"l%d" % number, "")
    assert list(queue.take(2, 9)) == [b"l8", b"l7"]
    queue.put("quiet", b"q0", "")
    assert [list(queue.take(2, 9)) for _ in range(3)] == [[b"q0"], [b"l6", b"l5"], [b"l4", b"l3"]]


def test_texts_that_are_taken_at_once_are_limited_in_number_and_length() -> None:
    queue = FairQueue()
    for number, length in enumerate((9, 90, 6, 3, 3, 2, 2)):
        queue.put("", b"%d" % number, "a" * length)
    taken = []
    while queue:
        taken.append("".join(key.decode() for key in queue.take(3, 9)))
    assert taken == ["654", "32", "1", "0"]
    assert len(queue) == 0


def test_a_full_cache_keeps_the_vectors_of_a_tenant_within_its_share() -> None:
    cache = VectorCache(20_000, tenant_of=lambda key: key[:1])
    vector = np.ones(64, np.float32)
    for number in range(5):
        cache.put(b"q%d" % number, vector)
    for number in range(500):
        cache.put(b"l%d" % number, vector)
        assert cache.size <= 20_000
    assert all(b"q%d" % number in cache for number in range(5)) and b"l499" in cache
