"""How much does a hybrid model recall on a budget?

Rows of attention are evicted; the state of convolutions stays. The model is made by the recipe in
bench/model: the attention of the bundled model with short convolutions in between, architecture
`lfm2`. Sessions, arms and rules are those of `bench.quality`, but shorter. The state of recurrent
layers is never evicted; rows right before a context checkpoint stay. An interrupted run continues
where it stopped."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.llama import running
from bench.quality.arms import CEILING
from bench.quality.journal import Journal, Record, chosen, fingerprint
from bench.quality.plan import Cell, batches
from bench.quality.sessions import REPORTING, TUNING
from bench.quality.summary import summarise
from bench.quality.work import Work
from evoke_proxy.server_build import ensure_server

RATIOS = (3.6, 8.0)
CELLS = (
    Cell("needle", "needle", 2000, 8, core=2, controls=RATIOS),
    Cell("facts5", "facts5", 1500, 8, core=2, controls=RATIOS),
    Cell("facts12", "facts12", 2500, 3, core=1, controls=RATIOS),
)
_COLUMNS = (
    "cell",
    "arm",
    "right",
    "n",
    "recall",
    "visible",
    "ceiling",
    "peak_share",
    "decoded_again",
)
_LEAST = 0.95


def measure(args: argparse.Namespace) -> tuple[str, Sequence[Record]]:
    """Return the server's name for the model's memory, and a record for each session and arm."""
    seed = (TUNING if args.tuning else REPORTING).start
    cells = [cell for cell in CELLS if args.cells is None or cell.name in args.cells]
    todo = batches(cells, seed, RATIOS)
    server = args.server or ensure_server()
    with running(server, args.model, "-c", "512", "--evoke-ram", "16") as llama:
        memory = str(llama.call("GET", "/props")["evoke"]["memory"])
    journal = Journal(args.journal, fingerprint(args.model, server))
    Work(server, args.model, journal, args.journal.parent / "hybrid-logs").run(todo, 1)
    keys = [unit.key for batch in todo for unit in batch.units]
    return memory, chosen(journal.records(), keys)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/hybrid.json`; 0 when nothing is missed."""
    args = _parser().parse_args(argv)
    memory, records = measure(args)
    found = summarise(records)
    summary = {
        "model": args.model.name,
        "memory": memory,
        "peak": max(turn[-1] for one in records if one["budget"] for turn in one["turns"]),
        "recovered": sum(turn[2] for one in records for turn in one["turns"]),
        **{key: found[key] for key in ("rows", "violations")},
    }
    print(record.table(found["rows"], _COLUMNS))
    rows = [{**one, "probes": [_short(probe) for probe in one["probes"]]} for one in records]
    out = record.write("hybrid", rows, summary, args.out)
    print(f"written: {out}")
    return 0 if reached(summary) else 1


def _short(probe: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("question", "expected", "depth", "right", "visible", "decoded_again")
    return {key: probe[key] for key in kept} | ({} if probe["right"] else {"said": probe["answer"]})


def _parser() -> argparse.ArgumentParser:
    parser = record.parser("hybrid", __doc__, "out/model/hybrid-f16.gguf")
    parser.add_argument("model", type=Path, help="a .gguf file of a hybrid (bench/model/README.md)")
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: our build)")
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS])
    parser.add_argument("--tuning", action="store_true", help="sessions that may be tuned on")
    parser.add_argument("--journal", type=Path, default=Path("out/bench/hybrid.jsonl"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
