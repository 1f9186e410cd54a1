"""How much does a hybrid model recall on a budget?

Rows of attention are evicted; the state of convolutions stays. The model is made by the recipe in
bench/model: the attention of the bundled model with short convolutions in between, architecture
`lfm2`. Sessions, arms and rules are those of `bench.quality`, but shorter. The state of recurrent
layers is never evicted; rows right before a context checkpoint stay. An interrupted run continues
where it stopped.

*Against* no eviction and `discard`. *Fails* below 95 %, or when a turn breaks its budget."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.driver import Bench, Option, Report, Row
from bench.llama import running
from bench.quality.arms import CEILING
from bench.quality.plan import Cell, batches
from bench.quality.summary import summarise
from bench.quality.work import OPTIONS, first_seed, recorded
from evoke_proxy.server_build import ensure_server

RATIOS = (3.6, 8.0)
CELLS = (
    Cell("needle", "needle", 2000, 8, core=2, controls=RATIOS),
    Cell("facts5", "facts5", 1500, 8, core=2, controls=RATIOS),
    Cell("facts12", "facts12", 2500, 3, core=1, controls=RATIOS),
)
_LEAST = 0.95


def measure(args: argparse.Namespace) -> Sequence[Row]:
    """Return a record for each session and arm."""
    cells = [cell for cell in CELLS if args.cells is None or cell.name in args.cells.split(",")]
    return recorded(args, "hybrid", batches(cells, first_seed(args), RATIOS))


def reached(summary: Mapping[str, Any]) -> bool:
    """Return whether the bars are reached.

    The model recalls its sessions without eviction and equally well on a budget, and every turn
    keeps its budget with token counts that add up.
    """
    rows = summary["rows"]
    knows = all(row["recall"] >= _LEAST for row in rows if row["arm"] == CEILING)
    keeps = all(row["share"] >= _LEAST for row in rows if row["policy"] == "evoke")
    lost = all(row["recall"] <= row["visible"] + 0.05 for row in rows if row["policy"] == "discard")
    return bool(knows and keeps and lost and not summary["violations"])


def report(args: argparse.Namespace, records: Sequence[Row]) -> Report:
    """Report recall by cell and arm, and the server's name for the model's memory."""
    with running(
        args.server or ensure_server(), args.model, "-c", "512", "--evoke-ram", "16"
    ) as one:
        memory = str(one.call("GET", "/props")["evoke"]["memory"])
    found = summarise(records)
    summary = {
        "model": args.model.name,
        "memory": memory,
        "peak": max(turn[-1] for one in records if one["budget"] for turn in one["turns"]),
        "recovered": sum(turn[2] for one in records for turn in one["turns"]),
        **{key: found[key] for key in ("rows", "violations")},
    }
    rows = [{**one, "probes": [_short(probe) for probe in one["probes"]]} for one in records]
    missed = [] if reached(summary) else [f"recall of {_LEAST:.0%}, budgets and token counts"]
    return Report(summary, missed, table=found["rows"], rows=rows)


def _short(probe: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("question", "expected", "depth", "right", "visible", "decoded_again")
    return {key: probe[key] for key in kept} | ({} if probe["right"] else {"said": probe["answer"]})


_FILE = Option("model", {"type": Path, "help": "a .gguf file of a hybrid (bench/model/README.md)"})
BENCH = Bench(
    "hybrid", __doc__, "out/model/hybrid-f16.gguf", measure, report,
    ("cell", "arm", "right", "n", "recall", "visible", "ceiling", "peak_share", "decoded_again"),
    (_FILE, *(each for each in OPTIONS if each.name != "--model")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
