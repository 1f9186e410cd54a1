"""Draws the results: recall by compression, and by kind of session."""

from __future__ import annotations

from collections.abc import Sequence

from bench import charts
from bench.quality.summary import Row

_SHADES = ("#8fc7a4", "#3f9562", "#1b6e3c")


def curves(rows: Sequence[Row], cell: str) -> str:
    """Share of the ceiling by compression, a line a policy with its intervals; "" without data."""
    lines: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        if row["cell"] == cell and _is_plain(row) and row["share"] is not None:
            edges = row["share_95"] or (row["share"], row["share"])
            shares = (min(100.0, 100 * share) for share in (row["share"], *edges))
            lines.setdefault(row["policy"], []).append((row["ratio"], *shares))
    title = f"Recall as a share of never evicting ({cell})"
    ordered = {policy: sorted(line) for policy, line in lines.items()}
    return charts.chart(title, "session tokens / budget", "percent", ordered)


def bars(rows: Sequence[Row], policy: str = "evoke") -> str:
    """Share of the ceiling of one policy by cell and compression; "" without data."""
    whole: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["policy"] == policy and _is_plain(row) and row["share"]:
            share = min(100.0, 100 * row["share"])
            whole.setdefault(f"{row['ratio']:g}x", {})[row["cell"]] = share
    title = f"{policy}: recall as a share of never evicting, by kind of session, %"
    ratios = sorted(whole, key=lambda name: float(name[:-1]))
    return charts.bars(title, whole, {}, dict(zip(ratios, _SHADES, strict=False)))


def _is_plain(row: Row) -> bool:
    """Whether the arm is a policy and a compression alone."""
    return bool(row["arm"] == f"{row['policy']}@{row['ratio'] or 0:g}x")
