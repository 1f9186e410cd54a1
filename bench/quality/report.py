"""Makes rows, bars and tables of the records of sessions, and sorts the lost questions by cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.quality.plan import CEILING, HEADLINES, PROTOCOL
from bench.record import table
from bench.stats import clustered, mcnemar, share_interval
from evoke_proxy.core.model.blocks import Span, clipped, count

Record = Mapping[str, Any]
Row = dict[str, Any]
_BARS = PROTOCOL["bars"]
BARS: Mapping[float, float] = dict(zip(PROTOCOL["compressions"], _BARS["least"], strict=True))
# Who says to reach them, beside our policy by text in HEADLINES: text alone cannot find what shares
# no word with the question.
CLAIMS: Mapping[str, Sequence[str]] = PROTOCOL["claims"]


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Return `rows` (a cell and an arm each), `depths`, `checks` and `violations`."""
    cells = {record["cell"]: (record["cell"],) for record in records}
    rows = [
        row
        for name, within in {**HEADLINES, **cells}.items()
        for row in rows_of([r for r in records if r["cell"] in within], name)
    ]
    depths = sorted({p["depth"] for r in records for p in r["probes"]} - {None})
    by_depth = [
        {"depth": depth, **row} for depth in depths for row in rows_of(records, "needle", depth)
    ]
    faults = [f"{r['session']} {r['arm']}: {fault}" for r in records for fault in r["faults"]]
    found = {"rows": rows, "depths": by_depth, "violations": faults}
    return {**found, "checks": checks(found)}


def rows_of(records: Iterable[Record], name: str, depth: float | None = None) -> list[Row]:
    """One row an arm, over all probes or those of a depth; arms in order of their first record."""
    by_arm: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_arm[record["arm"]].append(record)
    ceilings = {(r["cell"], r["session"]): r["probes"] for r in by_arm[CEILING]}
    rows = [_row(name, arm, found, ceilings, depth) for arm, found in by_arm.items()]
    return [row for row in rows if row["n"]]


def _row(
    name: str,
    arm: str,
    records: Sequence[Record],
    ceilings: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    depth: float | None,
) -> Row:
    pairs, mine = list[list[tuple[Record, Record]]](), list[Record]()
    for record in records:
        tops = ceilings.get((record["cell"], record["session"]))
        both = zip(record["probes"], tops, strict=True) if tops else ()
        if chosen := [(probe, top) for probe, top in both if depth in (None, probe["depth"])]:
            pairs.append(chosen)
            mine.append(record)
    if not pairs:
        return {"n": 0}
    asked = [len(pair) for pair in pairs]
    right = [sum(bool(probe["right"]) for probe, _ in pair) for pair in pairs]
    above = [sum(bool(probe["right"]) for _, probe in pair) for pair in pairs]
    kept = [sum(bool(p["right"] and top["right"]) for p, top in pair) for pair in pairs]
    gained = [x - both for x, both in zip(right, kept, strict=True)]
    flat = [item for pair in pairs for item in pair]
    lost = sum(above) - sum(kept)
    first, n = mine[0], sum(asked)
    return {
        "cell": name,
        "arm": arm,
        "policy": first["policy"],
        "ratio": first["ratio"],
        "n": n,
        "sessions": len(pairs),
        "right": sum(right),
        "recall": sum(right) / n,
        "recall_95": _rounded(clustered(right, asked)),
        "ceiling": sum(above) / n,
        "share": sum(right) / sum(above) if sum(above) else None,
        "share_95": _rounded(share_interval(kept, gained, above)),
        "lost": lost,
        "gained": sum(gained),
        "p": mcnemar(lost, sum(gained)),
        "visible": sum(bool(probe["visible"]) for probe, _ in flat) / n,
        "decoded_again": sum(bool(probe["decoded_again"]) for probe, _ in flat),
        "again_tokens": sum(record["again"] for record in mine),
        "answers_again": sum(record["answers_again"] for record in mine),
        "wall_s": sum(record["wall_s"] for record in mine),
        "peak_share": max(
            (turn[-1] / r["budget"] for r in mine if r["budget"] for turn in r["turns"]),
            default=None,
        ),
    }


def _rounded(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else [round(edge, 4) for edge in interval]


def checks(found: Mapping[str, Any]) -> list[Row]:
    """Return the bars: what is required, what was measured, whether it suffices."""
    rows = {(row["cell"], row["arm"]): row for row in found["rows"]}
    bars = [(f"@{ratio:g}x", least) for ratio, least in BARS.items()]
    made: list[Row] = []
    for cell in HEADLINES:
        for at, least in bars:
            ours, best, discarded = (
                rows.get((cell, f"{policy}{at}")) for policy in ("evoke", "oracle", "discard")
            )
            made += _reached(ours, least)
            if best is not None and best["share"] is not None:
                ok = best["share"] >= _BARS["oracle_least"] and best["p"] > _BARS["oracle_p"]
                made.append(_check(best, "the ceiling: >= 99%, p > 0.05", ok))
            if discarded is not None:
                said = f"recall <= gold resident {discarded['visible']:.1%} + 5 points"
                ok = discarded["recall"] <= discarded["visible"] + _BARS["discard_slack"]
                measured = f"{discarded['recall']:.1%}"
                made.append({**_check(discarded, said, ok), "measured": measured})
    for cell, arms in CLAIMS.items():
        for arm in arms:
            made += [check for at, least in bars
                     for check in _reached(rows.get((cell, f"{arm}{at}")), least)]  # fmt: skip
    # A cell, or several that are one, needs questions enough to say what the model knows.
    parts = {cell for cells in HEADLINES.values() for cell in cells} - HEADLINES.keys()
    made += [_of_ceiling(row) for (cell, arm), row in rows.items() if arm == CEILING
             if cell not in parts and row["n"] >= _BARS["ceiling_questions"]]  # fmt: skip
    faults = len(found["violations"])
    said = "token counts add up and peak <= budget, every turn"
    return [*made, {"bar": said, "wanted": "0 faults", "measured": str(faults), "ok": not faults}]


def _of_ceiling(row: Row) -> Row:
    low, high = row["recall_95"]
    return {
        "bar": f"{row['cell']}: {CEILING}",
        "wanted": f">= {_BARS['ceiling_least']:.0%}: the model can be asked this",
        "measured": f"{row['recall']:.1%} of {row['n']} facts ({low:.1%} to {high:.1%})",
        "ok": row["recall"] >= _BARS["ceiling_least"],
    }


def _reached(row: Row | None, least: float) -> list[Row]:
    """Check the share of the ceiling, where it was measured."""
    if row is None or row["share"] is None:
        return []
    return [_check(row, f">= {least:.0%} of the ceiling", row["share"] >= least)]


def _check(row: Row, wanted: str, ok: bool) -> Row:
    share = "-" if row["share"] is None else f"{row['share']:.1%}"
    measured = f"{share} of the ceiling, which is {row['ceiling']:.1%} of {row['n']} facts"
    return {"bar": f"{row['cell']}: {row['arm']}", "wanted": wanted, "measured": measured, "ok": ok}


# As `bench.quality` explains them.
_COLUMNS = (
    *("arm", "n", "sessions", "recall", "recall_95", "ceiling", "share", "share_95", "lost"),
    *("gained", "p", "visible", "decoded_again", "peak_share", "wall_s"),
)
_CAUSES = ("not chosen", "cut in two", "there, answered otherwise", "should not be known")
_MOST_MISSES = 60


def text(found: Mapping[str, Any], records: Sequence[Record], policy: str = "evoke") -> str:
    """Return the tables: bars, each cell, needles by depth, faults, and what a policy lost."""
    parts = []
    for cell in dict.fromkeys(row["cell"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["cell"] == cell]
        parts.append(f"{cell}\n{table(rows, _COLUMNS)}")
    if found["depths"]:
        parts.append(table(found["depths"], ("depth", "arm", "n", "recall")))
    parts += [f"fault: {line}" for line in found["violations"][:50]]
    lost = list(missed(records, policy))
    if lost:
        causes = Counter((one["cell"], one["arm"], cause(probe)) for one, probe in lost)
        groups = dict.fromkeys((cell, arm) for cell, arm, _ in causes)
        counts = [
            {"cell": cell, "arm": arm} | {why: causes[cell, arm, why] for why in _CAUSES}
            for cell, arm in groups
        ]
        parts.append(f"questions that {policy} lost\n{table(counts, ('cell', 'arm', *_CAUSES))}")
        columns = ("session", "arm", "question", "expected", "answer", "cause")
        each = [{**one, **probe, "cause": cause(probe)} for one, probe in lost[:_MOST_MISSES]]
        parts.append(table(each, columns))
    parts.append(table(found["checks"], ("bar", "wanted", "measured", "ok")))
    return "\n\n".join(parts)


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
