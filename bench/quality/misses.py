"""The questions lost to eviction: where their fact was, and what was resident instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.quality.arms import CEILING
from bench.quality.plan import HEADLINES
from bench.quality.tables import table
from evoke_proxy.core.model.blocks import Span, clipped, count

Record = Mapping[str, Any]
_MAX_CHARACTERS = 160
_ROWS = 60
_CAUSES = ("not chosen", "cut in two", "there, answered otherwise", "should not be known")


def missed(records: Sequence[Record], policy: str) -> Iterator[tuple[Record, Mapping[str, Any]]]:
    """Every question this policy lost that the ceiling answered."""
    tops = {(r["cell"], r["session"]): r["probes"] for r in records if r["arm"] == CEILING}
    for record in records:
        above = tops.get((record["cell"], record["session"]))
        if record["policy"] != policy or above is None:
            continue
        for probe, top in zip(record["probes"], above, strict=True):
            if top["right"] and not probe["right"]:
                yield record, probe


def report(records: Sequence[Record], policy: str = "evoke") -> str:
    """A Markdown section: counts by cause, then every miss."""
    bars = {cell for cells in HEADLINES.values() for cell in cells}
    found = sorted(missed(records, policy), key=lambda item: item[0]["cell"] not in bars)
    hidden = [item for item in found if not item[1]["visible"] and item[1]["known"]]
    parts = [
        f"## Questions that {policy} lost",
        f"{len(found)} in all; of {len(hidden)} the fact was not in the cache, of the others it was"
        " and the model answered something else.",
    ]
    if found:
        parts.append(_by_cause(found))
        columns = (
            *("session", "arm", "question", "expected", "answer", "fact at", "of it there"),
            "seen",
        )
        parts.append(table(columns, [_cells(*item) for item in found[:_ROWS]]))
    if len(found) > _ROWS:
        parts.append(f"{len(found) - _ROWS} more are in the journal.")
    return "\n\n".join(parts) + "\n"


def _by_cause(found: Sequence[tuple[Record, Mapping[str, Any]]]) -> str:
    """A line a cell and arm, a column a cause."""
    causes = Counter((record["cell"], record["arm"], cause(probe)) for record, probe in found)
    groups = dict.fromkeys((cell, arm) for cell, arm, _ in causes)
    lines = [(*group, *(causes[(*group, why)] for why in _CAUSES)) for group in groups]
    return table(("cell", "arm", *_CAUSES), lines)


def cause(probe: Mapping[str, Any]) -> str:
    """Why an answer was wrong: no block with the fact was chosen, one of two, or it was there."""
    if not probe["known"]:
        return _CAUSES[3]
    if probe["visible"]:
        return _CAUSES[2]
    return _CAUSES[1] if max(there for there, _ in _there(probe)) else _CAUSES[0]


def _there(probe: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """For each place of the fact how many of its tokens were seen, and of how many."""
    seen = [Span(*edges) for edges in probe["seen"]]
    for place in probe["gold"]:
        span = Span(*place)
        yield count(clipped(seen, span)), len(span)


def _cells(record: Record, probe: Mapping[str, Any]) -> list[str]:
    seen = " / ".join(probe["saw"]).replace("|", "\\|").replace("\n", " ")
    return [
        record["session"],
        record["arm"],
        probe["question"],
        probe["expected"],
        probe["answer"].replace("|", "\\|").replace("\n", " "),
        ", ".join(f"{a}-{b}" for a, b in probe["gold"]) or "-",
        ", ".join(f"{there} of {length}" for there, length in _there(probe)) or "-",
        seen[:_MAX_CHARACTERS],
    ]
