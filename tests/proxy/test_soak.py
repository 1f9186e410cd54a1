"""A minute of the soak bench: no request fails, and the token accounting of every turn balances.

conftest.py starts it when tests are collected, so that it runs beside the other tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import soak


@pytest.mark.timeout(600)
def test_mixed_agents_run_for_a_minute_without_faults(soak_result: dict[str, Any]) -> None:
    rows = soak_result["rows"]
    assert soak_result["code"] == 0, soak_result["summary"]
    assert [row["arm"] for row in rows] == ["patched", "stock"]
    for row in rows:
        # The machine is busy with other tests, so only a few turns of each kind are required.
        assert row["turns"] > 10 and row["hung_up"] and row["refused"], row
        assert row["own_5xx"] == row["unbalanced"] == row["over_budget"] == 0
        # Only a long run can detect slow growth of memory.
        assert row["rss_end"] < row["rss_start"] + 40


def test_the_slope_is_the_median_over_pairs_of_samples() -> None:
    samples = [
        {"at": float(second), "rss": 60.0 + 0.5 * second / 60 + second % 2} for second in range(120)
    ]
    assert soak.growth(samples) == pytest.approx(0.5, abs=0.2)
    assert soak.growth([{"at": 0.0, "rss": 1.0}]) == 0.0


def test_a_run_misses_its_bars_by_faults_and_a_long_one_by_memory_growth() -> None:
    row = {"arm": "patched", "turns": 3, "own_5xx": 0, "unbalanced": 0, "over_budget": 0}
    row |= {"other_4xx": 0, "ended_early": 0, "errors": 0, "faults": []}
    growing = {**row, "slope": 9.0}
    assert soak.missed(growing, long=False) == []
    assert soak.missed(growing, long=True) == ["patched: 9.0 MiB a minute"]
    assert soak.missed({**growing, "unbalanced": 2, "turns": 0}, long=False) == [
        "patched: unbalanced 2",
        "patched: no turn",
    ]
    logged = {**growing, "ended_early": 1, "errors": 4}
    assert soak.missed(logged, long=False) == ["patched: ended_early 1", "patched: errors 4"]
    broken = {**growing, "errors": 4, "faults": [[60.0, "flip", "3 files"]]}
    assert soak.missed(broken, long=False) == [], "damaged files are logged as errors"
