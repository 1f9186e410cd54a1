"""How much recall does a quantized KV cache cost?

Runs each session of the demo twice for every type of the cache: without eviction, and with the
demo's budget, where the fact is evicted and recovered as rows of that type. Evicting and loading is
exact for every type (patches/SUPPORT.md), so both should lose the same. Keys and values have the
same type; flash attention is on."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.ceiling import wilson
from evoke_proxy.demo.processes import stack
from evoke_proxy.demo.runner import BUDGET, RunObserver, run_arm
from evoke_proxy.demo.session import draw
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

TYPES = ("f16", "q8_0", "q4_0")
ARMS = ("no_eviction", "evoke")
_COLUMNS = (
    *("type", "arm", "sessions", "recalled", "share", "interval_95", "same_answer"),
    *("peak_resident", "recoveries"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    parser = record.parser("kv_types", __doc__, "--seeds 20")
    parser.add_argument("--seeds", type=int, default=60, help="how many sessions (60)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    args = parser.parse_args(argv)
    server, rows = ensure_server(), list[dict[str, Any]]()
    for seed in range(args.first, args.first + args.seeds):
        rows += [_row(server, kind, arm, seed) for kind in TYPES for arm in ARMS]
    summary = [_summary(rows, kind, arm) for arm in ARMS for kind in TYPES]
    print(record.table(summary, _COLUMNS))
    report = {"budget": BUDGET, "types": summary}
    print(f"written: {record.write('kv_types', rows, report, args.out)}")
    return 0


def _row(server: Path, kind: str, arm: str, seed: int) -> dict[str, Any]:
    options = ("-ctk", kind, "-ctv", kind, "-fa", "on")
    with tempfile.TemporaryDirectory() as logs:
        with stack(server, bundled_model(), Path(logs), arm, options) as port:
            run = run_arm(draw(seed), arm, port, RunObserver())
    return {
        "type": kind,
        "arm": arm,
        "seed": seed,
        "recalled": run.recalled,
        "answer": run.answer,
        "peak_resident": run.peak_resident,
        "recoveries": run.recoveries,
    }


def _summary(rows: Sequence[dict[str, Any]], kind: str, arm: str) -> dict[str, Any]:
    """One line of the table; `same_answer` counts answers equal to those of f16 on the same arm."""
    matching = [row for row in rows if row["arm"] == arm and row["type"] == kind]
    first = [row for row in rows if row["arm"] == arm and row["type"] == TYPES[0]]
    right = sum(row["recalled"] for row in matching)
    return {
        "type": kind,
        "arm": arm,
        "sessions": len(matching),
        "recalled": right,
        "share": right / len(matching),
        "interval_95": [round(edge, 3) for edge in wilson(right, len(matching))],
        "same_answer": sum(
            a["answer"] == b["answer"] for a, b in zip(matching, first, strict=True)
        ),
        "peak_resident": max(row["peak_resident"] for row in matching),
        "recoveries": sum(row["recoveries"] for row in matching),
    }


if __name__ == "__main__":
    sys.exit(main())
