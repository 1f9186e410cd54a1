"""Writes the results: Markdown tables, and the lost questions by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.quality.plan import CEILING
from bench.quality.summary import Record, Row
from evoke_proxy.core.model.blocks import Span, clipped, count

PUBLISHED = Path(__file__).with_name("published.md")
_COLUMNS = (
    *("arm", "facts", "sessions", "recall", "95 %", "ceiling", "share of ceiling", "95 %"),
    *("lost / gained", "p", "gold resident", "decoded again", "peak / budget", "s"),
)
_HOW = """`multi-fact` is facts5, facts12, facts20 and codes together. Recall: the answer ends with
exactly the value (unknown: it says that it was never told). Intervals allow for sessions
(`bench/stats.py`): Wilson with the design effect, and a bootstrap of sessions for a share
of the ceiling where questions were gained. lost / gained: questions right without eviction and
wrong here, and the other way round; p is McNemar's exact test of the two. gold resident: questions
whose fact was whole in the cache when they were answered. decoded again: questions whose fact had
to be decoded again, which would prove nothing. peak / budget: the worst turn. s: wall time."""
_CAUSES = ("not chosen", "cut in two", "there, answered otherwise", "should not be known")
_MOST_MISSES = 60


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def text(found: Mapping[str, Any], records: Sequence[Record], about: Sequence[str]) -> str:
    """Return the whole report; `about` are lines on the run."""
    checks = [
        (r["bar"], r["wanted"], r["measured"], "yes" if r["ok"] else "NO") for r in found["checks"]
    ]
    parts = ["# Recall on a budget", *about, "## Bars"]
    parts.append(table(("what", "wanted", "measured", "reached"), checks))
    parts += ["## All figures", _HOW]
    for cell in dict.fromkeys(row["cell"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["cell"] == cell]
        parts += [f"### {cell}", table(_COLUMNS, [_cells(row) for row in rows])]
    if found["depths"]:
        parts += ["## Needle by depth", _depths(found["depths"])]
    if found["violations"]:
        parts += ["## Faults", "\n".join(f"* {line}" for line in found["violations"][:50])]
    return "\n\n".join([*parts, _misses(records), PUBLISHED.read_text("utf-8")])


def _cells(row: Row) -> list[str]:
    return [
        row["arm"],
        str(row["n"]),
        str(row["sessions"]),
        _percent(row["recall"]),
        _interval(row["recall_95"]),
        _percent(row["ceiling"]),
        _percent(row["share"]),
        _interval(row["share_95"]),
        f"{row['lost']} / {row['gained']}",
        f"{row['p']:.2g}",
        _percent(row["visible"]),
        str(row["decoded_again"]),
        "-" if row["peak_share"] is None else f"{row['peak_share']:.3f}",
        f"{row['wall_s']:.0f}",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _interval(edges: Sequence[float] | None) -> str:
    return "-" if edges is None else f"{100 * edges[0]:.1f} to {100 * edges[1]:.1f}"


def _depths(rows: Sequence[Row]) -> str:
    depths = sorted({row["depth"] for row in rows})
    by_arm: dict[str, dict[float, str]] = {}
    for row in rows:
        said = f"{_percent(row['recall'])} ({row['n']})"
        by_arm.setdefault(row["arm"], {})[row["depth"]] = said
    lines = [(arm, *(found.get(depth, "-") for depth in depths)) for arm, found in by_arm.items()]
    return table(("arm", *(f"{depth:.0%}" for depth in depths)), lines)


def missed(records: Sequence[Record], policy: str) -> Iterator[tuple[Record, Mapping[str, Any]]]:
    """Yield every question that this policy lost and that the ceiling answered."""
    tops = {(r["cell"], r["session"]): r["probes"] for r in records if r["arm"] == CEILING}
    for record in records:
        above = tops.get((record["cell"], record["session"]), ())
        if record["policy"] == policy and above:
            for probe, top in zip(record["probes"], above, strict=True):
                if top["right"] and not probe["right"]:
                    yield record, probe


def cause(probe: Mapping[str, Any]) -> str:
    """Why an answer was wrong: no block with the fact was chosen, one of two, or it was there."""
    if not probe["known"]:
        return _CAUSES[3]
    if probe["visible"]:
        return _CAUSES[2]
    seen = [Span(*edges) for edges in probe["seen"]]
    return _CAUSES[1] if any(count(clipped(seen, Span(*p))) for p in probe["gold"]) else _CAUSES[0]


def _misses(records: Sequence[Record], policy: str = "evoke") -> str:
    """A section of the lost questions: counts by cause, then each."""
    found = list(missed(records, policy))
    parts = [f"## Questions that {policy} lost", f"{len(found)} in all."]
    if found:
        causes = Counter((one["cell"], one["arm"], cause(probe)) for one, probe in found)
        groups = dict.fromkeys((cell, arm) for cell, arm, _ in causes)
        lines = [(*group, *(causes[(*group, why)] for why in _CAUSES)) for group in groups]
        parts.append(table(("cell", "arm", *_CAUSES), lines))
        each = [
            (one["session"], one["arm"], probe["question"], probe["expected"],
             probe["answer"].replace("|", "\\|").replace("\n", " "), cause(probe))
            for one, probe in found[:_MOST_MISSES]
        ]  # fmt: skip
        parts.append(table(("session", "arm", "question", "expected", "answer", "cause"), each))
    if len(found) > _MOST_MISSES:
        parts.append(f"{len(found) - _MOST_MISSES} more are in the journal.")
    return "\n\n".join(parts) + "\n"
