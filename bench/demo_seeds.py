"""How often does each arm of the demo recall, over many seeds?

Also checks that every turn stays within the budget and that its token counts add up. All seeds
count, also those on which the model fails without eviction, which `make demo` would replace; so
compare the share of `evoke` with that of `no_eviction` on the same seeds."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.ceiling import wilson
from evoke_proxy.demo.client import ArmRun
from evoke_proxy.demo.processes import stack
from evoke_proxy.demo.runner import ARMS, BUDGET, RunObserver, failures, logical_tokens, run_arm
from evoke_proxy.demo.session import draw
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

_EXAMPLES = """examples:
  python -m bench.demo_seeds --seeds 20
  python -m bench.demo_seeds --server build/bin/llama-server --seeds 5 --first 100
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a row a seed and the summary, write the JSON; 0 when every seed passed."""
    args = _parser().parse_args(argv)
    server = args.server or ensure_server()
    rows = []
    for seed in range(args.first, args.first + args.seeds):
        rows.append(_row(server, seed))
        print(_line(rows[-1]), flush=True)
    arms = {arm: _summary(arm, rows) for arm in ARMS}
    passed = sum(not row["failures"] for row in rows)
    summary = {"passed": f"{passed} of {len(rows)}", "budget": BUDGET, **arms}
    record.tell("demo_seeds", rows, summary, args.out)
    return 0 if passed == len(rows) else 1


def _row(server: Path, seed: int) -> dict[str, Any]:
    script, runs = draw(seed), {}
    for arm in ARMS:
        with tempfile.TemporaryDirectory() as logs:
            with stack(server, bundled_model(), Path(logs), arm) as port:
                runs[arm] = run_arm(script, arm, port, RunObserver())
    found = failures(runs, BUDGET)
    arms = {arm: _arm(run) for arm, run in runs.items()}
    row = {"seed": seed, "value": script.fact.value, "logical_tokens": logical_tokens(runs)}
    return {**row, "failures": found, "arms": arms}


def _arm(run: ArmRun) -> dict[str, Any]:
    return {
        "recalled": run.recalled,
        "answer": run.answer,
        "peak_resident": run.peak_resident,
        "evictions": run.evictions,
        "recoveries": run.recoveries,
        "decoded": sum(turn.decoded for turn in run.turns),
        "wall_s": run.wall_s,
        "ttft_ms_median": statistics.median(turn.ttft_ms for turn in run.turns),
        "from_engine": all(turn.from_engine for turn in run.turns),
    }


def _summary(arm: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    arms = [row["arms"][arm] for row in rows]
    right = sum(one["recalled"] for one in arms)
    return {
        "recalled": f"{right} of {len(arms)}",
        "interval_95": [round(edge, 3) for edge in wilson(right, len(arms))],
        "peak_resident_max": max(one["peak_resident"] for one in arms),
        "decoded_median": statistics.median(one["decoded"] for one in arms),
    }


def _line(row: dict[str, Any]) -> str:
    arms = "  ".join(
        f"{arm} {'yes' if one['recalled'] else 'no':>3} peak {one['peak_resident']:>4}"
        for arm, one in row["arms"].items()
    )
    return f"{row['seed']:>6}  {arms}  {'; '.join(row['failures']) or 'passed'}"


def _parser() -> argparse.ArgumentParser:
    parser = record.command("demo_seeds", __doc__, _EXAMPLES)
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: our build)")
    parser.add_argument("--seeds", type=int, default=20, help="how many sessions (20)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
