"""The slopes of a long soak run, from its samples."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bench.soak import by_minute, picture, samples_of, slopes
from bench.stats import slope


def samples(minutes: int, mib_an_hour: float) -> list[dict[str, Any]]:
    """Six samples a minute of a process that grows."""
    found = []
    for number in range(6 * minutes):
        at = 10.0 * number
        turn = {"own": f"{5 + number % 3}", "first_byte": "40"}
        found.append(
            {"at": at, "rss": 80 + mib_an_hour * at / 3600 + math.sin(number), "descriptors": 15,
             "threads": 8, "load": 2.0, "turns": [turn, {"own": "1"}], "requests": 2,
             "cpu_ms": 30 * number, "faults": number // 6}
        )  # fmt: skip
    return found


def test_the_interval_of_a_slope_contains_the_growth() -> None:
    for growth in (0.0, 12.0):
        found = slopes(samples(120, growth), 600)
        assert found["rss"]["low"] <= growth <= found["rss"]["high"]
        assert found["rss"]["high"] - found["rss"]["low"] < 2
        assert found["descriptors"]["slope"] == 0
    assert found["rss"]["low"] > 5, "that of the last growth"


def test_times_are_of_turns_that_were_answered() -> None:
    minutes = by_minute(samples(3, 0))
    assert [value for _, value in minutes["own_ms"]] == [6, 6, 6]
    assert [value for _, value in minutes["cpu_ms_a_request"]] == [15, 15]


def test_neighbouring_minutes_that_are_alike_widen_the_interval() -> None:
    quick = [(float(at), math.sin(2.5 * at)) for at in range(120)]
    slow = [(float(at), math.sin(at / 6)) for at in range(120)]
    width = [found["high"] - found["low"] for found in (slope(quick, 10), slope(slow, 10))]
    assert width[1] > 2 * width[0]


def test_an_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    lines = [json.dumps(sample) for sample in samples(1, 0)]
    path.write_text("\n".join(lines) + '\n{"at": 6', "utf-8")
    assert len(samples_of(path)) == len(lines)


def test_the_picture_has_every_figure() -> None:
    svg = picture(samples(30, 3))
    for name in ("memory", "descriptors", "own time of a turn", "processor time", "29 faults"):
        assert name in svg
