"""The benches of decode speed, of generation length and of restarts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import decode, limit, restart
from bench.quality.journal import Journal


def speeds(**changed: list[float]) -> dict[str, list[decode.Speed]]:
    usual = [100.0, 90.0, 110.0, 100.0]
    return {arm: [(speed, 1.0) for speed in changed.get(arm, usual)] for arm in decode.ARMS}


@pytest.mark.parametrize(
    ("patched", "expected"),
    [([100.0, 90.0, 110.0, 100.0], True), ([95.0, 85.5, 104.5, 95.0], False)],
)
def test_a_ratio_is_within_noise_when_stock_differs_as_much(
    patched: list[float], expected: bool
) -> None:
    noisy = speeds(stock_again=[99.0, 90.0, 111.1, 100.0], patched=patched)
    rows = [decode.row(arm, noisy) for arm in decode.ARMS]
    total = decode.summary(rows)
    assert total["within_noise"] is expected
    assert total["patched_over_stock"] == pytest.approx(1.0 if expected else 0.95)
    assert total["noise_low"] == pytest.approx(0.99 + 0.15 * 0.01)


def test_a_percentile_is_interpolated_between_two_values() -> None:
    assert decode.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert decode.percentile([1.0, 2.0], 0.25) == 1.25
    assert decode.percentile([7.0], 0.95) == 7.0


@pytest.mark.parametrize("largest", [0, 1, 5, 15, 16])
def test_the_search_finds_the_largest_number_of_conversations_that_work(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def together(_: object, count: int, each: int) -> float:
        return float(count * each) if count <= largest else 0.0

    monkeypatch.setattr(limit, "together", together)
    assert limit.most(None, 10) == (largest, 10.0 * largest)  # type: ignore[arg-type]


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


def test_cpu_time_grows_with_work_and_not_with_waiting() -> None:
    own = Path("/proc/self")

    def spent(run: Callable[[], object]) -> float:
        start = decode.cpu_s(own)
        run()
        return decode.cpu_s(own) - start

    # Another thread of this process may use the CPU during some of the waits.
    assert any(spent(lambda: time.sleep(0.1)) < 0.05 for _ in range(9))
    assert spent(lambda: sum(range(20_000_000))) > 0.05


def test_a_port_without_a_server_is_an_error() -> None:
    with pytest.raises(LookupError, match="--port 1"):
        decode.process(1)
