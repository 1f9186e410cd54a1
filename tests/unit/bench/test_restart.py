"""The restart bench: its plan, its journal and its rows."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import restart
from bench.record import Journal


def test_the_restart_bench_continues_from_its_journal(tmp_path: Path) -> None:
    options = argparse.Namespace(models=["dense"], sizes=[1024], arms=["cold", "ours"], repeats=3)
    units = restart.plan(options)
    keys = [unit.key for unit in units]
    assert keys[:3] == ["dense 1024 cold 0", "dense 1024 ours 0", "dense 1024 cold 1000"]
    for repeats, longest in ((1, 1), (3, 1), (5, 2)):
        long = {"models": ["dense-long"], "sizes": None, "arms": ["ours"], "repeats": repeats}
        assert len(restart.plan(argparse.Namespace(**long))) == longest
    journal = Journal(tmp_path / "journal", "config")
    for unit, ttft in zip(units[:5], (100.0, 10.0, 300.0, 30.0, 200.0), strict=True):
        journal.append(unit.key, {"ttft_ms": ttft, "decoded": 7, "load": 1.0})
    cold, ours = restart.rows(units, Journal(tmp_path / "journal", "config").records())
    assert (cold["runs"], cold["ttft_ms"], cold["ttft_min"], cold["ttft_max"]) == (3, 200, 100, 300)
    assert (ours["runs"], ours["ttft_ms"], ours["vs_cold"]) == (2, 20, 10)
    args = argparse.Namespace(minutes=0.0, server=Path("no-such"), **vars(options))
    assert not restart.measure(units, journal, args) and restart.measure(units[:5], journal, args)
    assert not restart.rows(units, Journal(tmp_path / "journal", "another").records())
