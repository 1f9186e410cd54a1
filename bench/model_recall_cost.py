"""What does it cost to let the model itself find the blocks that a question is about?

Sends sessions of the quality bench through one proxy three times, with `evoke_recall` `text`,
`model` and `fused`: questions with other words than the statements, and questions with the same
words. Reports how often the model was probed, how many tokens and milliseconds that took, and the
wall time of the session divided by that with `text`. Apart from what is recovered, the turns are
the same."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.metrics import samples
from bench.quality.arms import OURS, Arm, recalling
from bench.quality.drive import answered, run
from bench.quality.sessions import TUNING, Script, scripts
from bench.quality.stack import Stack, read, stack
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

CELLS = ("paraphrase", "facts12")
_TOKENS = 4000
_COLUMNS = (
    "task",
    "arm",
    "right",
    "n",
    "turns",
    "made",
    "too_dear",
    "nothing_out",
    "long_tail",
    "tokens_each",
    "ms_each",
    "wall_s",
    "wall_over_text",
)
_REASONS = ("made", "too_dear", "nothing_out", "long_tail")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each session and arm; the first arm of a session rotates."""
    arms = [Arm(OURS, args.ratio), recalling("model", args.ratio), recalling("fused", args.ratio)]
    drawn = [
        script
        for task in CELLS
        for script in scripts(TUNING.start + args.seed, task, _TOKENS, args.sessions)
    ]
    rows = []
    logs = Path("out/bench/model_recall_cost-logs")
    with stack(args.server or ensure_server(), bundled_model(), {}, logs) as running:
        for number, script in enumerate(drawn):
            turn = number % len(arms)
            rows += [_row(running, script, arm) for arm in (*arms[turn:], *arms[:turn])]
    return rows


def _row(running: Stack, script: Script, arm: Arm) -> dict[str, Any]:
    before = _counted(running)
    found = run(running, script, read(running.upstream, script), arm)
    after = _counted(running)
    new = {name: after[name] - before[name] for name in after}
    row = {
        "task": script.task,
        "session": script.name,
        "arm": arm.name,
        "right": answered(found["probes"]),
        "n": len(found["probes"]),
        "turns": len(found["turns"]),
        "faults": len(found["faults"]),
        "wall_s": found["wall_s"],
        **{name: int(new[name]) for name in _REASONS},
        "tokens": int(new["tokens"]),
        "seconds": new["seconds"],
    }
    print(
        f"{script.name} {arm.name}: {row['right']} of {row['n']}, asked {row['made']}", flush=True
    )
    return row


def _counted(running: Stack) -> dict[str, float]:
    """Return the proxy's counters of probes."""
    metrics = samples(running.front)
    found = {name: metrics.get(f'evoke_probes_total{{result="{name}"}}', 0.0) for name in _REASONS}
    sums = {"tokens": "evoke_probe_tokens_total", "seconds": "evoke_probe_seconds_sum"}
    return found | {name: metrics[sample] for name, sample in sums.items()}


def summed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return by task and arm: sums, the cost of one probe, wall time divided by that of `text`."""
    keys = list(dict.fromkeys((row["task"], row["arm"]) for row in rows))
    found: list[dict[str, Any]] = []
    for task, arm in keys:
        mine = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
        total = {name: sum(row[name] for row in mine) for name in mine[0] if name not in _NAMES}
        made = max(1, total["made"])
        total["tokens_each"] = total["tokens"] / made
        total["ms_each"] = 1000 * total["seconds"] / made
        found.append({"task": task, "arm": arm, **total})
    alone = {row["task"]: row["wall_s"] for row in found if "+" not in row["arm"]}
    return [row | {"wall_over_text": row["wall_s"] / alone[row["task"]]} for row in found]


_NAMES = ("task", "session", "arm")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/model_recall_cost.json`; 0 when no turn has a fault."""
    args = _parser().parse_args(argv)
    rows = measure(args)
    summary = {"arms": summed(rows), "faults": sum(row["faults"] for row in rows)}
    print(record.table(summary["arms"], _COLUMNS))
    print(f"written: {record.write('model_recall_cost', rows, summary, args.out)}")
    return 1 if summary["faults"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = record.parser("model_recall_cost", __doc__, "--sessions 2 --ratio 16")
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: our build)")
    parser.add_argument("--sessions", type=int, default=4, help="of each task (4)")
    parser.add_argument("--seed", type=int, default=40, help="which sessions for tuning (40)")
    parser.add_argument("--ratio", type=float, default=8.0, help="tokens over budget (8)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
