"""The growth bench: measured turns, exponents and its end."""

from __future__ import annotations

import asyncio

import pytest

from bench import growth


@pytest.mark.parametrize("arm", growth.ARMS)
def test_the_growth_bench_plans_and_measures_a_turn(arm: str) -> None:
    row = asyncio.run(growth.measure(arm, 200, 2))
    assert row["sessions"] == (1 if arm == "one" else 2)
    assert row["saved"] >= 140
    assert 0 < row["reading_ms"] < row["own_ms"] and row["bytes_ms"] > 0
    assert row["index_mib"] > 0


def test_growth_exponents_compare_each_size_with_the_next() -> None:
    times = ((2, 1), (3, 2), (4, 20))
    measured = [
        {"arm": "one", "blocks": 10**i, "own_ms": ms, "planning_ms": ms / 2} for i, ms in times
    ]
    summary = growth.summarise(measured)
    assert summary["one_own_exponents"] == summary["one_planning_exponents"] == [0.3, 1.0]
    assert summary["one_1000_ms"] == 2
    assert not growth.reached(measured)
    assert growth.reached(measured[:2])
