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


def test_the_latest_observation_counts() -> None:
    ram = RamCache(exists=True)
    ram.note(100, found=False)
    ram.note(300, found=True)
    assert ram.has(300) and not ram.has(302)
    ram.note(200, found=False)
    assert not ram.has(200) and ram.has(199)


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
    assert not ram.exists and ram.loss == 1.0 and not ram.n_returned
    ram.note_reuse(1000, Reuse(cached=600, displaced=1000, shared=600))
    assert not ram.exists and ram.loss == 1.0 and ram.n_returned
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
