"""Snapshots: the best match for a prompt, and which are deleted for room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_fixtures import NOW, snapshot, tokens

from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.request.look_ahead import PREFIX, STEP
from evoke_proxy.core.snapshots.snapshots import (
    Bounds,
    Place,
    best,
    has_room,
    superseded,
    surplus,
)

HOUR = 3600.0
ROOMY = Bounds(10**12, 1000, 24 * HOUR, 0, 0)


def test_the_longest_snapshot_that_the_prompt_continues_is_best() -> None:
    short, long = snapshot("short", [1, 2]), snapshot("long", [1, 2, 3])
    other = snapshot("other", [1, 2, 9, 9, 9])
    found = best([short, other, long], tokens(1, 2, 3, 4), partial=False)
    assert found is not None and (found.snapshot, found.shared, found.extends) == (long, 3, True)


def test_a_partial_match_is_for_memories_that_can_be_cut_back() -> None:
    other = snapshot("other", [1, 2, 9])
    assert best([other], tokens(1, 2, 3), partial=False) is None
    found = best([other], tokens(1, 2, 3), partial=True)
    assert found is not None and (found.shared, found.extends) == (2, False)


def test_suspect_and_unrelated_snapshots_never_match() -> None:
    suspect = snapshot("s", [1, 2], suspect=True)
    assert best([suspect, snapshot("x", [7, 7])], tokens(1, 2, 3), partial=True) is None


def test_a_new_snapshot_outlives_one_that_was_often_restored_before() -> None:
    """A conversation that goes on has a new snapshot, which was not restored yet."""
    often = snapshot("often", [1], hits=20.0, used=NOW - HOUR)
    new = snapshot("new", [2], used=NOW)
    assert surplus([new, often], replace(ROOMY, max_count=1), 10**9, NOW) == [(often, "count")]


def test_a_branch_keeps_its_newest_of_each_kind() -> None:
    first, second = snapshot("1", [1]), snapshot("2", [1, 2])
    step, pinned = snapshot("3", [1], kind=STEP), snapshot("4", [1], pinned=True)
    elsewhere, edited = snapshot("5", [1], branch="c"), snapshot("6", [9])
    snapshots = [first, second, step, pinned, elsewhere, edited]
    assert superseded(snapshots, second) == [first]


def test_a_new_snapshot_may_replace_one_that_it_does_not_begin_with() -> None:
    answered, step = snapshot("1", [1, 2, 8], kind=STEP), snapshot("2", [1, 2], kind=STEP)
    pinned = snapshot("3", [1, 2, 8], kind=STEP, pinned=True)
    elsewhere = snapshot("4", [1, 2, 8], kind=STEP, branch="c")
    new = snapshot("5", [1, 2, 3, 9], kind=STEP)
    snapshots = [answered, step, pinned, elsewhere, new]
    assert superseded(snapshots, new) == [step]
    assert superseded(snapshots, new, Place(of=answered.tokens)) == [answered, step]
    assert superseded(snapshots, new, Place(of_prefixes=False, of=answered.tokens)) == [answered]
    assert superseded(snapshots, new, Place(of_prefixes=False)) == []


def test_prefixes_of_a_branch_stay_because_other_conversations_may_begin_with_each() -> None:
    first, second = (snapshot(id, [1, 2][:n], kind=PREFIX) for n, id in ((1, "1"), (2, "2")))
    step = snapshot("3", [1, 2, 3], kind=STEP)
    assert superseded([first, second], second) == []
    assert superseded([first, second, step], step) == []


@pytest.mark.parametrize(
    ("bounds", "free", "reason"),
    [
        (replace(ROOMY, max_count=2), 10**9, "count"),
        (replace(ROOMY, max_bytes=2500), 10**9, "bytes"),
        (replace(ROOMY, max_bytes=None), 2000, "bytes"),  # half of 2,000 + 3 x 1,000
        (replace(ROOMY, min_free_bytes=1500), 1000, "free_space"),
        (replace(ROOMY, tenant_bytes=2500), 10**9, "tenant"),
    ],
)
def test_the_least_recently_used_snapshots_are_deleted_first(
    bounds: Bounds, free: int, reason: str
) -> None:
    used = {"a": NOW - 1, "b": NOW - 2, "c": NOW}
    snapshots = [snapshot(name, [1], used=at) for name, at in used.items()]
    assert [(item.id, why) for item, why in surplus(snapshots, bounds, free, NOW)] == [
        ("b", reason)
    ]
    assert surplus(snapshots, ROOMY, 10**9, NOW) == []


def test_without_a_size_snapshots_take_half_of_the_disk_and_at_most_256_gib() -> None:
    bounds = Bounds.of(SnapshotsConfig())
    assert bounds.max_bytes is None
    assert bounds.bytes_allowed(disk_bytes=100 << 30) == 50 << 30
    assert bounds.bytes_allowed(disk_bytes=2000 << 30) == 256 << 30
    sized = Bounds.of(SnapshotsConfig(max_mib=1024))
    assert sized.bytes_allowed(disk_bytes=100 << 30) == 1 << 30


def test_old_snapshots_are_deleted_unless_pinned() -> None:
    old = snapshot("old", [1], used=NOW - 25 * HOUR)
    pinned = snapshot("pinned", [1], used=NOW - 25 * HOUR, pinned=True)
    assert surplus([old, pinned], ROOMY, 10**9, NOW) == [(old, "age")]
    assert surplus([pinned], replace(ROOMY, max_bytes=1), 10**9, NOW) == []


snapshots = st.lists(
    st.builds(
        lambda size, tenant, pinned, hits, ago: (size, tenant, pinned, hits, ago),
        st.integers(1, 5000),
        st.sampled_from("xyz"),
        st.booleans(),
        st.floats(0, 10),
        st.floats(0, 30 * HOUR),
    ),
    max_size=12,
)


@given(snapshots, st.integers(0, 20000), st.integers(0, 6), st.integers(0, 9000))
def test_the_remaining_snapshots_keep_the_limits_or_are_pinned(
    descriptions: list[tuple[int, str, bool, float, float]], max_bytes: int, count: int, quota: int
) -> None:
    snapshots = [
        snapshot(str(i), [i], n_bytes=size, tenant=who, pinned=pin, hits=hits, used=NOW - ago)
        for i, (size, who, pin, hits, ago) in enumerate(descriptions)
    ]
    bounds = replace(ROOMY, max_bytes=max_bytes, max_count=count, tenant_bytes=quota)
    gone = [item for item, _ in surplus(snapshots, bounds, 10**9, NOW)]
    assert len({item.id for item in gone}) == len(gone)
    assert not any(item.pinned for item in gone)
    kept = [item for item in snapshots if item not in gone]
    unpinned = [item for item in kept if not item.pinned]
    within = len(kept) <= count and sum(item.n_bytes for item in kept) <= max_bytes
    assert within or not unpinned
    for who in {item.tenant for item in unpinned} if quota else ():
        assert sum(item.n_bytes for item in kept if item.tenant == who) <= quota
    further = [item for item, _ in surplus(kept, bounds, 10**9, NOW)]
    assert further == []


def test_room_counts_free_space_and_deletable_snapshots() -> None:
    snapshots = [snapshot("a", [1]), snapshot("b", [1], pinned=True)]
    bounds = replace(ROOMY, max_bytes=3000, min_free_bytes=500)
    assert has_room(snapshots, bounds, "t", 2000, 2000)
    assert not has_room(snapshots, bounds, "t", 2001, 10**9)
    assert not has_room(snapshots, bounds, "t", 2000, 1400)
    quota = replace(bounds, tenant_bytes=1500)  # a pinned one of 1000 is in it
    assert has_room(snapshots, quota, snapshots[1].tenant, 500, 2000)
    assert not has_room(snapshots, quota, snapshots[1].tenant, 501, 2000)
    assert has_room(snapshots, quota, "another", 1500, 2000)


def test_there_is_no_room_when_pinned_snapshots_reach_the_count_limit() -> None:
    pinned = [snapshot(str(i), [i], tenant="x", pinned=True) for i in range(3)]
    assert not has_room(pinned, replace(ROOMY, max_count=3), "x", 10, 10**9)
    assert has_room(pinned, replace(ROOMY, max_count=4), "x", 10, 10**9)
    other = snapshot("other", [9], tenant="y")
    full, five = replace(ROOMY, max_count=4), replace(ROOMY, max_count=5)
    assert not has_room([*pinned, other], full, "x", 10, 10**9), (
        "tenant x has the most, and all are pinned"
    )
    assert has_room([*pinned, other], full, "y", 10, 10**9), (
        "the older snapshot of y can be deleted"
    )
    assert has_room([*pinned, other, snapshot("own", [8], tenant="x")], five, "x", 10, 10**9)


@given(snapshots, st.integers(0, 20000), st.integers(0, 6), st.integers(0, 9000))
def test_a_snapshot_with_room_is_not_deleted_at_once(
    descriptions: list[tuple[int, str, bool, float, float]], max_bytes: int, count: int, quota: int
) -> None:
    snapshots = [
        snapshot(str(i), [i], n_bytes=size, tenant=who, pinned=pin, hits=hits, used=NOW - ago / 2)
        for i, (size, who, pin, hits, ago) in enumerate(descriptions)
    ]
    bounds = replace(ROOMY, max_bytes=max_bytes, max_count=count, tenant_bytes=quota)
    new = snapshot("new", [99], n_bytes=1000, tenant="x", used=NOW + 1)
    gone = [item for item, _ in surplus([*snapshots, new], bounds, 10**9, NOW)]
    assert has_room(snapshots, bounds, "x", 1000, 10**9 + 1000) == (new not in gone)


@pytest.mark.parametrize("reason", ["count", "bytes", "free_space"])
def test_a_tenant_that_keeps_saving_loses_its_own_snapshots(reason: str) -> None:
    bounds, free = ROOMY, 10**9
    if reason == "count":
        bounds = replace(ROOMY, max_count=6)
    elif reason == "bytes":
        bounds = replace(ROOMY, max_bytes=6000)
    else:
        bounds, free = replace(ROOMY, min_free_bytes=20_000), 0
    # The quiet tenant's snapshots were used least recently.
    kept = [snapshot(f"q{i}", [i], tenant="quiet", used=NOW - HOUR) for i in range(2)]
    for number in range(40):
        kept.append(snapshot(f"l{number}", [number], tenant="loud"))
        left = free if reason != "free_space" else 26_000 - sum(item.n_bytes for item in kept)
        gone = surplus(kept, bounds, left, NOW)
        assert all(item.tenant == "loud" and why == reason for item, why in gone)
        kept = [item for item in kept if item not in [item for item, _ in gone]]
    assert len(kept) == 6
