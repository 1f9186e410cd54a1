"""What a KV cache of fewer bits costs in recall: the sessions of `ceiling`, once for each type.

Nothing is evicted: evict and load are exact for every type (patches/SUPPORT.md), so what a type
loses it loses without us. Keys and values have the same type, flash attention is on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.ceiling import measure, summarise
from evoke_proxy.server_build import ensure_server

TYPES = ("f16", "q8_0", "q4_0")
_COLUMNS = ("type", "sessions", "recalled", "ceiling", "interval_95", "same_answer", "without_fact")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_types",
        description=__doc__,
        epilog="example:\n  python -m bench.kv_types --seeds 20",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many sessions (100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    seeds = range(args.first, args.first + args.seeds)
    server = ensure_server(patched=False)
    sessions = {kind: measure(server, seeds, 1, _options(kind)) for kind in TYPES}
    rows = [{"type": kind} | row for kind, held in sessions.items() for row in held]
    table = [_summary(kind, held, sessions[TYPES[0]]) for kind, held in sessions.items()]
    print(record.table(table, _COLUMNS))
    print(f"written: {record.write('kv_types', rows, {'types': table}, args.out)}")
    return 0


def _options(kind: str) -> tuple[str, ...]:
    return ("-ctk", kind, "-ctv", kind, "-fa", "on")


def _summary(
    kind: str, held: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    same = sum(a["answer"] == b["answer"] for a, b in zip(held, first, strict=True))
    return {"type": kind, "same_answer": same} | summarise(held)


if __name__ == "__main__":
    sys.exit(main())
