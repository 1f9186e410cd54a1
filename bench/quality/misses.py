"""The questions lost to eviction: where their fact stood, and what was in the cache instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.quality.arms import CEILING
from bench.quality.tables import table

Record = Mapping[str, Any]
_SHOWN = 160
_ROWS = 60


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
    found = list(missed(records, policy))
    hidden = [item for item in found if not item[1]["visible"] and item[1]["known"]]
    parts = [
        f"## Questions that {policy} lost",
        f"{len(found)} in all; of {len(hidden)} the fact was not in the cache, of the others it was"
        " and the model answered something else.",
    ]
    if found:
        columns = ("session", "arm", "question", "expected", "answer", "fact at", "there", "seen")
        parts.append(table(columns, [_cells(*item) for item in found[:_ROWS]]))
    if len(found) > _ROWS:
        parts.append(f"{len(found) - _ROWS} more are in the journal.")
    return "\n\n".join(parts) + "\n"


def _cells(record: Record, probe: Mapping[str, Any]) -> list[str]:
    seen = " / ".join(probe["saw"]).replace("|", "\\|").replace("\n", " ")
    return [
        record["session"],
        record["arm"],
        probe["question"],
        probe["expected"],
        probe["answer"].replace("|", "\\|").replace("\n", " "),
        ", ".join(f"{a}-{b}" for a, b in probe["gold"]) or "-",
        "yes" if probe["visible"] else "no",
        seen[:_SHOWN],
    ]
