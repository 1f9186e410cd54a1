"""The estimate of what the RAM cache of a stock server keeps."""

from __future__ import annotations

from evoke_proxy.core.snapshots.ram_cache import RamCache, Reuse


def test_everything_is_expected_in_a_cache_that_has_lost_nothing() -> None:
    ram = RamCache(exists=True)
    assert ram.has(10**9) and ram.loss == 0.0
    assert not RamCache().has(1) and RamCache().loss == 1.0


def test_what_is_found_shows_that_there_is_a_cache() -> None:
    ram = RamCache()
    ram.note(100, found=True)
    assert ram.exists and ram.has(100) and ram.loss == 0.0


def test_the_limit_is_between_what_was_kept_and_what_was_lost() -> None:
    ram = RamCache(exists=True)
    ram.note(100, found=True)
    ram.note(1000, found=False)
    assert ram.has(500) and not ram.has(600)
    ram.note(500, found=True)
    assert ram.has(700) and not ram.has(800)


def test_a_single_loss_does_not_count_against_many_finds() -> None:
    ram = RamCache(exists=True)
    for depth in (500, 600, 700):
        ram.note(depth, found=True)
    ram.note(100, found=False)
    assert ram.has(650)


def test_a_cache_is_tried_again_after_a_loss_later_each_time() -> None:
    ram = RamCache(exists=True)
    waits = list[int]()
    for _ in range(3):
        ram.note(600, found=False)
        waits.append(0)
        while not ram.has(1000):
            ram.note_unused()
            waits[-1] += 1
    assert waits == [16, 32, 64]


def test_losses_alone_lower_the_limit_to_half_each_time() -> None:
    ram = RamCache(exists=True)
    ram.note(1000, found=False)
    assert ram.has(499) and not ram.has(500)
    ram.note(400, found=False)
    assert ram.has(199) and not ram.has(200)


def test_observations_of_long_ago_are_forgotten() -> None:
    ram = RamCache(exists=True)
    for _ in range(40):
        ram.note(900, found=True)
    for _ in range(40):
        ram.note(300, found=False)
    assert not ram.has(300) and ram.loss == 1.0


def test_the_loss_is_the_share_of_returning_conversations() -> None:
    ram = RamCache(exists=True)
    ram.note(100, found=True)
    ram.note(200, found=True)
    ram.note(300, found=False)
    ram.note_unused()
    assert ram.loss == 0.5


def test_what_others_have_as_well_does_not_show_that_there_is_a_cache() -> None:
    ram = RamCache()
    ram.note_reuse(1000, Reuse(cached=800, displaced=800, shared=800))
    ram.note_reuse(1000, Reuse(cached=0, displaced=0, shared=0))
    assert not ram.exists and ram.loss == 1.0
    ram.note_reuse(1000, Reuse(cached=600, displaced=1000, shared=600))
    assert not ram.exists and ram.loss == 1.0
    ram.note_reuse(1000, Reuse(cached=900, displaced=1000, shared=600))
    assert ram.exists


def test_the_loss_follows_larger_conversations_after_many_that_were_found() -> None:
    ram = RamCache(exists=True)
    for _ in range(1000):
        ram.note(3000, found=True)
    assert ram.loss == 0.0
    for _ in range(4):
        ram.note(200_000, found=False)
    assert ram.loss > 0.1


def n_until_tried(ram: RamCache, depth: int) -> int:
    """How many contents are not looked for until those at a depth are tried again."""
    n = 0
    while not ram.has(depth):
        ram.note_unused()
        n += 1
    return n


def test_after_each_loss_it_takes_longer_until_the_cache_is_tried_again() -> None:
    ram, waits = RamCache(exists=True), []
    for _ in range(4):
        ram.note(100_000, found=False)
        ram.note(10_000, found=True)  # smaller contents do not make a try sooner
        waits.append(n_until_tried(ram, 100_000))
    assert waits == sorted(set(waits)) and waits[-1] >= 4 * waits[0]
