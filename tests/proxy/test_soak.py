"""A minute of mixed agents: nothing fails, and the accounting of every turn sums up.

It is begun when tests are collected (conftest.py), so that it costs next to no time of its own.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import soak


@pytest.mark.timeout(600)
def test_a_minute_of_mixed_agents(soaked: dict[str, Any]) -> None:
    rows = soaked["rows"]
    assert soaked["code"] == 0, soaked["summary"]
    assert [row["arm"] for row in rows] == ["patched", "stock"]
    for row in rows:
        # Beside other tests a machine may be slow; a few of everything there must have been.
        assert row["turns"] > 10 and row["hung_up"] and row["refused"], row
        assert row["own_5xx"] == row["unbalanced"] == row["over_budget"] == 0
        # Memory is judged by a long run; here only that nothing grows without any bound.
        assert row["rss_end"] < row["rss_start"] + 40


def test_the_slope_is_the_median_over_pairs() -> None:
    steady = [(float(second), 60.0 + 0.5 * second / 60 + second % 2) for second in range(120)]
    assert soak.slope(steady) == pytest.approx(0.5, abs=0.2)
    assert soak.slope([(0.0, 1.0)]) == 0.0


def test_the_checks_of_a_run() -> None:
    row = {"arm": "patched", "turns": 3, "own_5xx": 0, "unbalanced": 0, "over_budget": 0}
    fine = {**row, "other_4xx": 0, "slope": 9.0}
    assert soak.missed(fine, long=False) == []
    assert soak.missed(fine, long=True) == ["patched: 9.0 MiB a minute"]
    assert soak.missed({**fine, "unbalanced": 2, "turns": 0}, long=False) == [
        "patched: unbalanced 2",
        "patched: no turn",
    ]
