"""Compares the default with other arms on the same questions, and says which criteria it misses.

Criteria of a cell:

* `95 % of the best fusion`: the default has at least 95 % of what the best fused fill has
* `best single fill`, `no recall`: of the paired difference to the best fill by a single signal,
  and to the proxy without recall, the lower 95 % bound is above -3 points. Fewer than 3
  conversations have no interval; there the difference itself is above -3 points.

The best fill is chosen in each cell, by the figures of that cell, which favours the fill. Intervals
are percentiles of a bootstrap that draws whole conversations, because the questions of one are
alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.fills import FUSED, SINGLE
from bench.stats import paired_difference, percent

SHARE_OF_FUSION, LEAST_POINTS = 0.95, -3.0
FUSION, FILL, NO_RECALL = "95 % of the best fusion", "best single fill", "no recall"
VERDICT_COLUMNS = (
    *("cell", "questions", "criterion", "against", "default", "other", "points", "low", "verdict"),
)
# `conversation`, `question`, `arm` and `whole`: one result of one arm.
Row = Mapping[str, Any]


def verdicts(cell: str, rows: Sequence[Row], arm: str = "default") -> list[dict[str, Any]]:
    """Return one row for each criterion that the arms of a cell allow, with `pass` or `FAIL`."""
    share = {
        name: percent(r["whole"] for r in rows if r["arm"] == name)
        for name in dict.fromkeys(r["arm"] for r in rows)
    }
    if arm not in share:
        return []
    common = {"cell": cell, "questions": sum(r["arm"] == arm for r in rows), "default": share[arm]}

    def verdict(criterion: str, other: str, holds: bool) -> dict[str, Any]:
        against = {"criterion": criterion, "against": other, "other": share[other]}
        return {**common, **against, "verdict": "pass" if holds else "FAIL"}

    found = []
    fusion = _best(share, FUSED)
    if fusion:
        found.append(verdict(FUSION, fusion, share[arm] >= SHARE_OF_FUSION * share[fusion]))
    for criterion, other in ((FILL, _best(share, SINGLE)), (NO_RECALL, _best(share, (NO_RECALL,)))):
        if other:
            interval = paired_difference(rows, arm, other)
            low = interval["points"] if interval["low"] is None else interval["low"]
            holds = low is not None and low > LEAST_POINTS
            found.append({**verdict(criterion, other, holds), **interval})
    return found


def failed(found: Iterable[Row]) -> list[str]:
    """Return the criteria that are missed, in words."""
    return [f"{r['cell']}: {r['criterion']}" for r in found if r["verdict"] == "FAIL"]


def _best(share: Mapping[str, float], arms: Sequence[str]) -> str:
    """Return which of the arms has the largest share; "" when none was measured."""
    return max((arm for arm in arms if arm in share), key=lambda arm: share[arm], default="")
