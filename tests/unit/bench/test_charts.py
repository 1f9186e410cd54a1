"""Charts of the benches."""

from __future__ import annotations

from bench.charts import bars, chart


def test_a_chart_has_a_point_for_every_value() -> None:
    svg = chart("title", "x", "y", {"one": [(1, 10), (100, 1000)]})
    assert svg.count("<circle") == 2
    assert chart("title", "x", "y", {}) == ""


def test_the_bars_have_one_for_each_kind_and_arm() -> None:
    whole = {"default": {"a": 40.0, "b": 100.0}, "bm25": {"a": 10.0, "b": 0.0}}
    colours = {"default": "#1b6e3c", "bm25": "#0b6aa8", "oracle": "#7a7a7a"}
    svg = bars("title", whole, {"a": 60}, colours)
    assert svg.count('height="8"') == 4
    assert svg.count('stroke="#b3261e"') == 1
    assert bars("title", {}, {}, colours) == ""
