"""The first-byte bench: the time that the proxy adds to the first byte."""

from __future__ import annotations

from bench import first_bytes
from bench.overhead import summarise


def pair(direct: float, through: float) -> dict[str, float]:
    return {"direct": direct, "through": through, "tokens": 1000}


def test_the_added_time_to_the_first_byte_is_the_median_over_pairs() -> None:
    row = first_bytes.row("bundled", 1024, [pair(10, 15), pair(50, 56), pair(30, 33)])
    assert row["first_byte_added_ms"] == 5 and row["direct_ms"] == 30 and row["through_ms"] == 33
    assert row["first_byte_added_ms_p10"] == 3 and row["first_byte_added_ms_p90"] == 6
    assert row["first_byte_added_ms_fastest"] == 5
    worse = first_bytes.row("qwen3.5", 1024, [pair(10, 19)])
    assert summarise([], [], [row, worse]) == {"first_byte_added_ms_1k_p50": 9}
