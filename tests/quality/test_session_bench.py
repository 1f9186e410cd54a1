"""The session bench: its arms, and the figures that it computes."""

from __future__ import annotations

from typing import Any

import pytest

from bench.session import arms, reached, summarise


def run(part: str, arm: str, repeat: int, wall: float, speed: float) -> dict[str, Any]:
    return {"part": part, "arm": arm, "repeat": repeat, "wall_s": wall, "tokens_per_s": speed}


def test_the_reported_ratio_is_the_median_of_the_ratios_of_pairs() -> None:
    rows = [
        *(run("long", "evoke", i, wall, 1.0) for i, wall in enumerate((11.0, 10.0, 40.0))),
        *(run("long", "no_eviction", i, wall, 1.0) for i, wall in enumerate((10.0, 10.0, 10.0))),
        *(run("long", "direct", i, 5.0, 1.0) for i in range(3)),
        *(run("many", "evoke", i, 1.0, speed) for i, speed in enumerate((90.0, 50.0, 99.0))),
        *(run("many", "direct", i, 1.0, 100.0) for i in range(3)),
    ]
    summary = summarise(rows)
    assert summary["long_wall_evoke_over_no_eviction"] == pytest.approx(1.1)
    assert summary["long_wall_evoke_over_direct"] == pytest.approx(2.2)
    assert summary["many_tokens_per_s_proxied_over_direct"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("long", "many", "good"), [(1.05, 0.95, True), (1.06, 0.95, False), (1.05, 0.94, False)]
)
def test_a_run_must_reach_both_bars(long: float, many: float, good: bool) -> None:
    summary = {
        "long_wall_evoke_over_no_eviction": long,
        "many_tokens_per_s_proxied_over_direct": many,
    }
    assert reached(summary) is good


def test_only_the_arms_through_the_proxy_send_evoke_fields() -> None:
    by_name = arms(512)
    assert by_name["direct"].fields == {}
    assert by_name["evoke"].fields == {"evoke_policy": "evoke", "evoke_budget": 512}
    assert "evoke_budget" not in by_name["no_eviction"].fields
