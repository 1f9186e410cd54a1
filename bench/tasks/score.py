"""Scores cases: is every needed message whole in the cache when the answer begins?"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.evidence import bm25, fill, paired_difference, share_resident
from bench.tasks.cases import Case

# `default`, `breadcrumb` and `none` are the proxy's; the others fill the same budget without it.
ENGINE_ARMS = ("default", "breadcrumb", "none")
FILLS = ("bm25", "newest", "random", "oracle")
ARMS = ("default", "breadcrumb", "bm25", "newest", "random", "none", "oracle")
LENGTHS, SHARES = (4000, 32000, 128000), (4, 8, 16)
LEAST_BUDGET, _BLOCK = 256, 64
# Wanted of the default at 1/8, in percent of the cases; the first three at 4,000 tokens only.
BARS: Mapping[str, float] = {
    "multi-value": 95,
    "multi-query 4": 95,
    "multi-query 12": 85,
    "variable tracking": 60,
    "two hops, same words": 85,
    "two hops, other words": 60,
    "pronoun follow-ups": 90,
    "one-fact inference": 60,
    "standing instructions": 98,
}
_BAR_SHARE, _SHORT = 8, ("multi-value", "multi-query 4", "multi-query 12")
_BAR_LENGTHS = (4000, 32000)
Row = Mapping[str, Any]
Spans = Mapping[int, tuple[int, int]]


def budget_of(tokens: int, share: int) -> int:
    """Return the budget of a conversation of this many tokens."""
    return max(LEAST_BUDGET, tokens // share)


def whole_share(case: Case, spans: Spans, resident: Sequence[tuple[int, int]]) -> float:
    """Return which share of the needed messages has rows at every position."""
    shares = [share_resident(spans[index], resident) for index in case.needed]
    return sum(share >= 1.0 for share in shares) / len(shares)


def fills(case: Case, spans: Spans, budget: int) -> dict[str, float]:
    """Return the share of the needed messages that each fill of the budget has.

    The system prompt and the turn take their part of the budget first. `bm25`, `newest` and
    `oracle` add whole messages: the best by plain BM25 for the last message, the newest, the needed
    ones. `random` adds blocks of 64 tokens.
    """
    last = len(case.messages)
    candidates = range(1, last)
    sizes = {index: spans[index][1] - spans[index][0] for index in candidates}
    turn = sum(end - start for index, (start, end) in spans.items() if index >= last)
    room = budget - turn - spans[0][1]
    newest = list(reversed(candidates))
    texts = [case.messages[index]["content"] for index in candidates]
    orders = {
        "bm25": [at + 1 for at in bm25(texts, case.asked[-1]["content"])],
        "newest": newest,
        "oracle": list(dict.fromkeys([*case.needed, *newest])),
    }
    found = {}
    for arm, order in orders.items():
        taken = fill(order, sizes, room)
        found[arm] = sum(index in taken for index in case.needed) / len(case.needed)
    ends = spans[last - 1][1]
    blocks = [(start, min(ends, start + _BLOCK)) for start in range(0, ends, _BLOCK)]
    drawn = random.Random(f"{case.id} {budget}").sample(
        blocks, max(0, min(len(blocks), room // _BLOCK))
    )
    return {**found, "random": whole_share(case, spans, drawn)}


def cells(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row by kind, length, share and arm: percentages of cases and of messages."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = row["kind"], row["length"], row["share"], row["arm"]
        groups.setdefault(key, []).append(row)
    return [
        {
            "kind": kind,
            "length": length,
            "share": share,
            "arm": arm,
            "tokens": round(sum(row["tokens"] for row in mine) / len(mine)),
            "cases": len(mine),
            "whole": _percent(row["whole"] for row in mine),
            "messages": _percent(row["messages"] for row in mine),
        }
        for (kind, length, share, arm), mine in groups.items()
    ]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return percentages by length, share, arm and kind, differences, bars and missed bars."""
    by: dict[str, Any] = {}
    for cell in cells(rows):
        arms = by.setdefault(str(cell["length"]), {}).setdefault(f"1/{cell['share']}", {})
        arms.setdefault(cell["arm"], {})[cell["kind"]] = cell["whole"]
    for shares in by.values():
        for arms in shares.values():
            for kinds in arms.values():
                kinds["mean of kinds"] = round(sum(kinds.values()) / len(kinds), 1)
    bars = list(_bars(by))
    return {
        "whole": by,
        "default_minus_bm25": _differences(rows, "bm25"),
        "default_minus_random": _differences(rows, "random"),
        "bars": bars,
        "missed": [f"{b['kind']} at {b['length']}" for b in bars if b["found"] < b["wanted"]],
    }


def _bars(by: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for kind, wanted in BARS.items():
        for length in _BAR_LENGTHS[: 1 if kind in _SHORT else None]:
            arms = by.get(str(length), {}).get(f"1/{_BAR_SHARE}", {})
            found = arms.get("default", {}).get(kind)
            if found is not None:
                yield {"kind": kind, "length": length, "wanted": wanted, "found": found}


def _differences(rows: Sequence[Row], other: str) -> dict[str, Any]:
    """Paired differences by length and share; intervals draw whole templates."""
    found: dict[str, Any] = {}
    for length in dict.fromkeys(row["length"] for row in rows):
        for share in dict.fromkeys(row["share"] for row in rows):
            mine = [
                {**row, "conversation": f"{row['kind']} {row['scene']}", "question": row["case"]}
                for row in rows
                if (row["length"], row["share"]) == (length, share)
            ]
            if {"default", other} <= {row["arm"] for row in mine}:
                found[f"{length} 1/{share}"] = paired_difference(mine, "default", other)
    return found


def _percent(values: Iterable[float]) -> float:
    listed = list(values)
    return round(100 * sum(listed) / len(listed), 1)
