"""Statistics of benches: spreads, percentiles and shares."""

from __future__ import annotations

from bench.stats import percentile, share_of, spread


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([5.0, 1.0, 3.0], 90) == 5.0 and percentile([5.0, 1.0, 3.0], 10) == 1.0


def test_a_spread_has_the_median_and_both_ends() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_a_share_has_an_interval_where_all_answers_are_right() -> None:
    found = share_of(10, 10)
    assert (found["n"], found["right"], found["share"]) == (10, 10, 1.0)
    assert 0.7 < found["interval_95"][0] < found["interval_95"][1] == 1.0
