"""What does it cost to let the model itself find the blocks that a question is about?

Sends sessions of the quality bench through one proxy three times, with `evoke_recall` `text`,
`model` and `fused`: questions with other words than the statements, and questions with the same
words. Reports how often the model was probed, how many tokens and milliseconds that took, and the
wall time of the session divided by that with `text`. Apart from what is recovered, the turns are
the same.

*Against* text alone. *Fails* on a turn with a fault."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.driver import SERVER, Bench, Report, Row, option
from bench.metrics import samples
from bench.quality.arms import OURS, Arm, recalling
from bench.quality.drive import answered, run
from bench.quality.sessions import TUNING, Script, scripts
from bench.quality.stack import Stack, read, stack
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

CELLS = ("paraphrase", "facts12")
_TOKENS = 4000
_REASONS = ("made", "too_dear", "nothing_out", "long_tail")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each session and arm; the first arm of a session rotates."""
    arms = [Arm(OURS, args.ratio), recalling("model", args.ratio), recalling("fused", args.ratio)]
    drawn = [
        script
        for task in CELLS
        for script in scripts(TUNING.start + args.seed, task, _TOKENS, args.sessions)
    ]
    logs = Path("out/bench/model_recall_cost-logs")
    with stack(args.server or ensure_server(), bundled_model(), {}, logs) as running:
        for number, script in enumerate(drawn):
            turn = number % len(arms)
            yield from (_row(running, script, arm) for arm in (*arms[turn:], *arms[:turn]))


def _row(running: Stack, script: Script, arm: Arm) -> dict[str, Any]:
    before = _counted(running)
    found = run(running, script, read(running.upstream, script), arm)
    after = _counted(running)
    new = {name: after[name] - before[name] for name in after}
    return {
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


def report(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report what a probe costs by task and arm."""
    arms, faults = summed(rows), sum(row["faults"] for row in rows)
    missed = [f"{faults} faults of turns"] if faults else []
    return Report({"arms": arms, "faults": faults}, missed, table=arms)


BENCH = Bench(
    "model_recall_cost", __doc__, "--sessions 2 --ratio 16", measure, report,
    ("task", "arm", "right", "n", "turns", *_REASONS, "tokens_each", "ms_each", "wall_s",
     "wall_over_text"),
    (SERVER, option("--sessions", 4, "of each task"),
     option("--seed", 40, "which sessions for tuning"),
     option("--ratio", 8.0, "tokens over budget")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
