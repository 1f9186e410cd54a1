"""Line charts of the benches."""

from __future__ import annotations

from bench import lines


def test_a_chart_has_a_point_for_every_value() -> None:
    svg = lines.chart("title", "x", "y", {"one": [(1, 10), (100, 1000)]}, log=True)
    assert svg.count("<circle") == 2
    assert lines.chart("title", "x", "y", {}) == ""
