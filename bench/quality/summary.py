"""Records of sessions as figures: one row a cell and arm, and whether the bars are reached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.quality.arms import CEILING
from bench.quality.plan import HEADLINE
from bench.quality.stats import clustered, mcnemar, ratio_interval

Record = Mapping[str, Any]
Row = dict[str, Any]
Which = Callable[[Record, Mapping[str, Any]], bool]
ALL = "headline"
BARS = {3.6: 0.98, 8.0: 0.97, 16.0: 0.95}
_DISCARD_SLACK = 0.05


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Return `rows` (a cell and an arm each), `depths`, `checks` and `violations`."""
    cells = {record["cell"]: None for record in records}
    rows = [
        *rows_of(records, ALL, _in_headline),
        *(row for cell in cells for row in rows_of(records, cell, _in(cell))),
    ]
    depths = sorted({p["depth"] for r in records for p in r["probes"]} - {None})
    by_depth = [
        {"depth": depth, **row}
        for depth in depths
        for row in rows_of(records, "needle", _at(depth))
    ]
    found = {"rows": rows, "depths": by_depth, "violations": violations(records)}
    return {**found, "checks": checks(found)}


def rows_of(records: Iterable[Record], name: str, wanted: Which) -> list[Row]:
    """One row an arm, over the probes that are wanted; arms in order of their first record."""
    by_arm: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_arm[record["arm"]].append(record)
    ceilings = {(r["cell"], r["session"]): r["probes"] for r in by_arm[CEILING]}
    rows = [_row(name, arm, found, ceilings, wanted) for arm, found in by_arm.items()]
    return [row for row in rows if row["n"]]


def _in_headline(record: Record, probe: Mapping[str, Any]) -> bool:
    return record["cell"] in HEADLINE and bool(probe["known"])


def _in(cell: str) -> Which:
    return lambda record, _: bool(record["cell"] == cell)


def _at(depth: float) -> Which:
    return lambda _, probe: bool(probe["depth"] == depth)


def _row(
    name: str,
    arm: str,
    records: Sequence[Record],
    ceilings: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    wanted: Which,
) -> Row:
    pairs = [
        [
            (probe, above)
            for probe, above in zip(
                record["probes"], ceilings[record["cell"], record["session"]], strict=True
            )
            if wanted(record, probe)
        ]
        for record in records
        if (record["cell"], record["session"]) in ceilings
    ]
    pairs = [pair for pair in pairs if pair]
    if not pairs:
        return {"n": 0}
    asked = [len(pair) for pair in pairs]
    right = [sum(bool(probe["right"]) for probe, _ in pair) for pair in pairs]
    above = [sum(bool(probe["right"]) for _, probe in pair) for pair in pairs]
    flat = [item for pair in pairs for item in pair]
    lost = sum(bool(top["right"]) and not probe["right"] for probe, top in flat)
    gained = sum(bool(probe["right"]) and not top["right"] for probe, top in flat)
    first, n = records[0], sum(asked)
    low, high = clustered(right, asked)
    return {
        "cell": name,
        "arm": arm,
        "policy": first["policy"],
        "ratio": first["ratio"],
        "n": n,
        "sessions": len(pairs),
        "right": sum(right),
        "recall": sum(right) / n,
        "recall_95": [round(low, 4), round(high, 4)],
        "ceiling": sum(above) / n,
        "share": sum(right) / sum(above) if sum(above) else None,
        "share_95": _rounded(ratio_interval(right, above)),
        "lost": lost,
        "gained": gained,
        "p": mcnemar(lost, gained),
        "visible": sum(bool(probe["visible"]) for probe, _ in flat) / n,
        "decoded_again": sum(bool(probe["decoded_again"]) for probe, _ in flat),
        "again_tokens": sum(record["again"] for record in records),
        "peak_share": max(
            (turn[-1] / r["budget"] for r in records if r["budget"] for turn in r["turns"]),
            default=None,
        ),
    }


def _rounded(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else [round(edge, 4) for edge in interval]


def violations(records: Iterable[Record]) -> list[str]:
    """Every turn whose books do not sum or whose peak is over the budget, in words."""
    return [f"{r['session']} {r['arm']}: {fault}" for r in records for fault in r["faults"]]


def checks(found: Mapping[str, Any]) -> list[Row]:
    """The bars: what is wanted, what was measured, whether that is enough."""
    rows = {row["arm"]: row for row in found["rows"] if row["cell"] == ALL}
    made: list[Row] = []
    for ratio, least in BARS.items():
        ours, best = rows.get(f"evoke@{ratio:g}x"), rows.get(f"oracle@{ratio:g}x")
        gone = rows.get(f"discard@{ratio:g}x")
        if ours is not None and ours["share"] is not None:
            made.append(_check(f"evoke at {ratio:g}x", f">= {least:.0%}", ours, least))
        if best is not None and best["share"] is not None:
            made.append(_check(f"oracle at {ratio:g}x", "the ceiling", best, 1.0))
        if gone is not None:
            most = gone["visible"] + _DISCARD_SLACK
            said = f"<= resident {gone['visible']:.1%} + 5 points"
            measured = f"{gone['recall']:.1%}"
            ok = gone["recall"] <= most
            made.append(
                {"bar": f"discard at {ratio:g}x", "wanted": said, "measured": measured, "ok": ok}
            )
    faults = len(found["violations"])
    said = "books sum and peak <= budget, every turn"
    return [*made, {"bar": said, "wanted": "0 faults", "measured": str(faults), "ok": not faults}]


def _check(name: str, wanted: str, row: Row, least: float) -> Row:
    measured = f"{row['share']:.1%} of the ceiling ({row['n']} facts)"
    return {"bar": name, "wanted": wanted, "measured": measured, "ok": row["share"] >= least}
