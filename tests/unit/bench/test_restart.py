"""The restart bench: its plan and its rows."""

from __future__ import annotations

import argparse

from bench import restart


def test_everything_is_measured_once_before_anything_twice() -> None:
    options = argparse.Namespace(models=["dense"], sizes=[1024], arms=["cold", "ours"], repeats=3)
    units = [(unit.arm, unit.seed) for unit in restart.plan(options)]
    assert units[:3] == [("cold", 0), ("ours", 0), ("cold", 1000)]
    for repeats, longest in ((1, 1), (3, 1), (5, 2)):
        long = {"models": ["dense-long"], "sizes": None, "arms": ["ours"], "repeats": repeats}
        assert len(restart.plan(argparse.Namespace(**long))) == longest


def test_a_row_has_the_medians_of_its_repeats() -> None:
    runs = zip(
        ("cold", "ours", "cold", "ours", "cold"), (100.0, 10.0, 300.0, 30.0, 200.0), strict=True
    )
    cold, ours = restart.medians(
        [
            {"model": "dense", "tokens": 1024, "arm": arm, "ttft_ms": ttft, "decoded": 7}
            for arm, ttft in runs
        ]
    )
    assert (cold["runs"], cold["ttft_ms"], cold["ttft_min"], cold["ttft_max"]) == (3, 200, 100, 300)
    assert (ours["runs"], ours["ttft_ms"], ours["vs_cold"]) == (2, 20, 10)
    assert (cold["model"], cold["tokens"], cold["decoded"]) == ("dense", 1024, 7)
