"""The session bench: its arms, what truncation drops, and the figures and bars that it computes."""

from __future__ import annotations

from typing import Any

import pytest

from bench.random_models import SHAPES
from bench.session import Talk, arms, attention_share, missed, summarise


def run(part: str, arm: str, repeat: int, wall: float, speed: float) -> dict[str, Any]:
    head = {"part": part, "length": 4096, "arm": arm, "repeat": repeat}
    measured = {"wall_s": wall, "tokens_per_s": speed, "compression": 4.2, "least_recovered": 7}
    return head | measured


def test_the_reported_ratios_are_those_of_pairs() -> None:
    rows = [
        *(run("long", "evoke", i, wall, 1.0) for i, wall in enumerate((11.0, 10.0, 40.0))),
        *(run("long", "no_eviction", i, wall, 1.0) for i, wall in enumerate((10.0, 10.0, 10.0))),
        *(run("long", "direct", i, 5.0, 1.0) for i in range(3)),
        run("long", "truncate", 0, 22.0, 1.0),
        *(run("many", "evoke", i, 1.0, speed) for i, speed in enumerate((90.0, 50.0, 99.0))),
        *(run("many", "direct", i, 1.0, 100.0) for i in range(3)),
    ]
    summary = summarise(rows)
    long = summary["long_4096"]
    assert long["evoke_over_no_eviction"] == pytest.approx({"median": 1.1, "min": 1.0, "max": 4.0})
    assert long["evoke_over_direct"]["median"] == pytest.approx(2.2)
    assert long["evoke_over_truncate"]["median"] == pytest.approx(0.5)
    assert "evoke_over_truncate_half" not in long
    assert summary["many_tokens_per_s_over_direct"]["median"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("long", "many", "more", "bars"),
    [
        (1.05, 0.95, {}, 0),
        (1.06, 0.95, {}, 1),
        (1.05, 0.94, {}, 1),
        (1.05, 0.95, {"compression": 3.9}, 2),
        (1.05, 0.95, {"least_recovered": 0}, 2),
    ],
)
def test_a_run_must_reach_all_bars(
    long: float, many: float, more: dict[str, float], bars: int
) -> None:
    rows = [
        run("long", "evoke", 0, long, 1.0) | more,
        run("long", "no_eviction", 0, 1.0, 1.0) | {"compression": 1.0},
        run("many", "evoke", 0, 1.0, many) | more,
        run("many", "direct", 0, 1.0, 1.0) | {"least_recovered": 0},
    ]
    assert len(missed(rows, summarise(rows))) == bars


def test_only_the_arms_through_the_proxy_send_evoke_fields() -> None:
    by_name = arms(512)
    assert by_name["evoke"].fields == {"evoke_policy": "evoke", "evoke_budget": 512}
    assert by_name["no_eviction"].fields == {"evoke_policy": "no_eviction"}
    assert [name for name, arm in by_name.items() if arm.fields is None] == [
        *("direct", "truncate", "truncate_half"),
    ]
    assert {name: arm.keeps for name, arm in by_name.items() if arm.keeps} == {
        "truncate": 1.0,
        "truncate_half": 0.5,
    }


def test_truncation_drops_the_oldest_messages_after_the_first() -> None:
    talk = Talk(1)
    talk.sizes = [10, 20, 30, 40, 50]
    assert talk.oldest_beyond(150) == 0
    assert talk.oldest_beyond(149) == 1
    assert talk.oldest_beyond(100) == 2
    assert talk.oldest_beyond(1) == 3  # the system prompt and the question stay


def test_the_share_of_attention_is_that_of_a_7b_model() -> None:
    ours, real = SHAPES["attention-7b"], SHAPES["qwen2.5-7b"]
    for tokens in (4096, 16384, 65536):
        assert attention_share(ours, tokens) == pytest.approx(
            attention_share(real, tokens), abs=0.03
        )
