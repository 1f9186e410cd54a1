"""Requests of one client do not block the event loop: a short form of `make bench-stall`.

It measures the processor time of the loop's longest callback, on which other processes of the
machine have no effect.
"""

from __future__ import annotations

import json

import pytest

from bench import stall

ARMS = (
    *("prompt of 1 MiB", "prompt beyond the context", "32K tokens, 400 messages"),
    *("500,000 strings", "60,000 dates"),
    *("answer of 64 MiB", "20 admin pages"),
)
# Twice the bar of the bench, for a slow processor.
LIMIT_MS = 2 * stall.MOST_MS


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, float]]:
    args = stall.BENCH.parse(
        ["--seconds", "1", "--scale", "0.25", "--sessions", "40", "--arms", "idle", *ARMS]
        + ["deletion of 1000 records"]
    )
    return {row["arm"]: row for row in stall.measure(args)}


@pytest.mark.parametrize("arm", [*ARMS, "deletion of 1000 records"])
def test_no_callback_of_the_event_loop_exceeds_its_limit(
    arm: str, rows: dict[str, dict[str, float]]
) -> None:
    added_ms = rows[arm]["callback_cpu_ms"] - rows["idle"]["callback_cpu_ms"]
    assert added_ms < LIMIT_MS, json.dumps(rows[arm])
