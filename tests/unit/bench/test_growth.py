"""The growth bench: measured turns, exponents and its end."""

from __future__ import annotations

from typing import Any

import pytest

from bench import growth


@pytest.mark.parametrize("arm", growth.ARMS)
def test_the_growth_bench_plans_and_measures_a_turn(arm: str) -> None:
    row = growth.measured(arm, 200, growth.BENCH.parse(["--turns", "2"]))
    assert row["sessions"] == (1 if arm == "one" else 2)
    assert row["budget"] == 200 * growth.BLOCK // 4 // row["sessions"]
    assert row["tokens"] == pytest.approx(200 * growth.BLOCK / row["sessions"], rel=0.1)
    assert row["recovered_tokens"] > 0, "blocks return, so that there are copies"
    assert 0 < row["own_ms"] and 0 < row["cpu_ms"] and row["rss_mib"] > 0


def _row(blocks: int, ms: float) -> dict[str, Any]:
    return {"arm": "one", "blocks": blocks, "own_ms": ms / 2, "cpu_ms": ms}


def test_growth_exponents_compare_each_size_with_the_next() -> None:
    measured = [_row(100, 1), _row(1000, 2), _row(10_000, 20)]
    summary = growth.summarise(measured)
    assert summary["one_own_exponents"] == summary["one_cpu_exponents"] == [0.3, 1.0]
    assert summary["one_1000_cpu_ms"] == 2
    assert growth.missed(measured) == ["one: 20.0 ms with 10000 blocks"]
    assert not growth.missed(measured[:2])
