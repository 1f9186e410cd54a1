"""Writes the results as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.quality.summary import Row

PUBLISHED = Path(__file__).with_name("published.md")
_COLUMNS = (
    *("arm", "facts", "sessions", "recall", "95 %", "ceiling", "share of ceiling", "95 %"),
    *("lost / gained", "p", "gold resident", "decoded again", "peak / budget"),
)


def report(found: Mapping[str, Any], about: Sequence[str]) -> str:
    """Return the whole report; `about` are lines on the run."""
    cells = dict.fromkeys(row["cell"] for row in found["rows"])
    parts = ["# Recall on a budget", *about, "## Bars", _checks(found["checks"])]
    for policy in ("evoke", "oracle"):
        parts += [f"## {policy}: share of the ceiling by cell", _matrix(found["rows"], policy)]
    if found["ablations"]:
        parts += ["## One thing changed", _CHANGED, _ablations(found["ablations"])]
    parts += ["## All figures", _HOW]
    for cell in cells:
        rows = [row for row in found["rows"] if row["cell"] == cell]
        parts += [f"### {cell}", table(_COLUMNS, [_cells(row) for row in rows])]
    if found["depths"]:
        parts += ["## Needle by depth", _depths(found["depths"])]
    if found["violations"]:
        lines = [f"* {line}" for line in found["violations"][:50]]
        parts += ["## Faults", "\n".join(lines)]
    return "\n\n".join([*parts, PUBLISHED.read_text("utf-8")])


_HOW = """`multi-fact` is facts5, facts12, facts20 and codes together. Recall: the answer ends with
exactly the value (unknown: it says that it was never told). Intervals allow for sessions
(`bench/stats.py`): Wilson with the design effect, and a bootstrap of sessions for a share
of the ceiling where questions were gained. lost / gained: questions right without eviction and
wrong here, and the other way round; p is McNemar's exact test of the two. gold resident: questions
whose fact was whole in the cache when they were answered. decoded again: questions whose fact had
to be decoded again, which would prove nothing. peak / budget: the worst turn."""


_CHANGED = """Each line is an arm and, behind it, the same arm without what its name says last, on
the same questions: evoke+embedder+block32@8x stands beside evoke+embedder@8x. lost / gained:
questions right without the change only, and with it only; p is McNemar's exact test of the two;
more: the difference in points, with and less without, with its paired 95 % interval."""


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _cells(row: Row) -> list[str]:
    peak = row["peak_share"]
    return [
        row["arm"],
        str(row["n"]),
        str(row["sessions"]),
        _percent(row["recall"]),
        interval(row["recall_95"]),
        _percent(row["ceiling"]),
        _percent(row["share"]),
        interval(row["share_95"]),
        f"{row['lost']} / {row['gained']}",
        f"{row['p']:.2g}",
        _percent(row["visible"]),
        str(row["decoded_again"]),
        "-" if peak is None else f"{peak:.3f}",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def interval(edges: Sequence[float] | None) -> str:
    """The edges of a share in percent."""
    return "-" if edges is None else f"{100 * edges[0]:.1f} to {100 * edges[1]:.1f}"


def _checks(rows: Sequence[Row]) -> str:
    lines = [(r["bar"], r["wanted"], r["measured"], "yes" if r["ok"] else "NO") for r in rows]
    return table(("what", "wanted", "measured", "reached"), lines)


def _matrix(rows: Sequence[Row], policy: str) -> str:
    """A line a cell, a column a compression: share of the ceiling, gold resident, facts."""
    plain = [r for r in rows if r["ratio"] and r["arm"] == f"{policy}@{r['ratio']:g}x"]
    ratios = sorted({row["ratio"] for row in plain})
    lines = []
    for cell in dict.fromkeys(row["cell"] for row in plain):
        here = {row["ratio"]: row for row in plain if row["cell"] == cell}
        cells = (
            f"{_percent(r['share'])} (there: {_percent(r['visible'])}, n = {r['n']})" if r else "-"
            for r in (here.get(ratio) for ratio in ratios)
        )
        lines.append((cell, _percent(next(iter(here.values()))["ceiling"]), *cells))
    return table(("cell", "ceiling", *(f"{ratio:g}x" for ratio in ratios)), lines)


def _ablations(rows: Sequence[Row]) -> str:
    columns = (
        *("cell", "arm", "facts", "sessions", "recall", "95 %", "gold resident"),
        *("without the last change", "95 %", "gold resident", "lost / gained", "p", "more"),
    )
    lines = [
        (
            *(row["cell"], row["arm"], row["n"], row["sessions"], *_recalled(row)),
            *(*_recalled(row["plain"]), f"{row['lost']} / {row['gained']}", f"{row['p']:.2g}"),
            f"{100 * row['more']:+.1f} ({interval(row['more_95'])})",
        )
        for row in rows
    ]
    return table(columns, lines)


def _recalled(row: Row) -> tuple[str, str, str]:
    return _percent(row["recall"]), interval(row["recall_95"]), _percent(row["visible"])


def _depths(rows: Sequence[Row]) -> str:
    depths = sorted({row["depth"] for row in rows})
    by_arm: dict[str, dict[float, str]] = {}
    for row in rows:
        said = f"{_percent(row['recall'])} ({row['n']})"
        by_arm.setdefault(row["arm"], {})[row["depth"]] = said
    columns = ("arm", *(f"{depth:.0%}" for depth in depths))
    lines = [(arm, *(found.get(depth, "-") for depth in depths)) for arm, found in by_arm.items()]
    return table(columns, lines)
