"""Scores cases: is every needed message whole in the cache when the answer begins?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench import criteria
from bench.criteria import paired_difference, percent
from bench.engines import SETTINGS, share_resident
from bench.fills import FILLS, Rankings, fill, random_blocks
from bench.tasks.cases import Case

# What the proxy does without a budget.
CEILING = "no eviction"
ENGINE_ARMS = (*(setting.arm for setting in SETTINGS), CEILING)
ARMS = (*ENGINE_ARMS, *FILLS)
LENGTHS, SHARES = (4000, 32000, 128000), (4, 8, 16)
LEAST_BUDGET = 256
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
# The arms that the picture has, with their colours.
COLOURS: Mapping[str, str] = {
    "default": "#1b6e3c",
    "bm25": "#0b6aa8",
    "newest": "#b35900",
    "oracle": "#7a7a7a",
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


def fills(case: Case, spans: Spans, budget: int, rankings: Rankings) -> dict[str, float]:
    """Return the share of the needed messages that each fill of the budget has.

    The system prompt and the turn take their part of the budget first. `rankings` are those of all
    other messages before the turn.
    """
    last = len(case.messages)
    sizes = {at: spans[at + 1][1] - spans[at + 1][0] for at in range(last - 1)}
    turn = sum(end - start for index, (start, end) in spans.items() if index >= last)
    room = budget - turn - spans[0][1]
    needed = [index - 1 for index in case.needed]
    orders = rankings.orders(case.asked[-1]["content"])
    orders["oracle"] = list(dict.fromkeys([*needed, *orders["newest"]]))
    found = {}
    for arm, order in orders.items():
        taken = fill(order, sizes, room)
        found[arm] = sum(at in taken for at in needed) / len(needed)
    drawn = random_blocks(spans[last - 1][1], room, f"{case.id} {budget}")
    return {**found, "random": whole_share(case, spans, drawn)}


def texts_of(case: Case) -> list[str]:
    """Return the texts of all messages before the turn but the system prompt."""
    return [message["content"] for message in case.messages[1:]]


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
            "whole": percent(row["whole"] for row in mine),
            "messages": percent(row["messages"] for row in mine),
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
    bars, verdicts = list(_bars(by)), list(_verdicts(rows))
    missed = [f"{b['kind']} at {b['length']}" for b in bars if b["found"] < b["wanted"]]
    return {
        "whole": by,
        "default_minus": {arm: _differences(rows, arm) for arm in ARMS if arm != "default"},
        "bars": bars,
        "verdicts": verdicts,
        "missed": [*missed, *criteria.failed(verdicts)],
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
    return {
        cell: paired_difference(mine, "default", other)
        for cell, mine in _grouped(rows).items()
        if {"default", other} <= {row["arm"] for row in mine}
    }


def _verdicts(rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
    """Yield the criteria of all kinds together, and of each kind, by length and share."""
    for cell, mine in _grouped(rows).items():
        for kind in dict.fromkeys(row["kind"] for row in mine):
            of_kind = [row for row in mine if row["kind"] == kind]
            yield from criteria.verdicts(f"{cell} {kind}", of_kind)
        yield from criteria.verdicts(f"{cell} all kinds", mine)


def _grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by length and share; the cases of one template are one conversation."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        named = {"conversation": f"{row['kind']} {row['scene']}", "question": row["case"]}
        groups.setdefault(f"{row['length']} 1/{row['share']}", []).append({**row, **named})
    return groups
