"""The machine-readable record of a demo run, written to report.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evoke_proxy.demo.judge import logical_tokens
from evoke_proxy.demo.records import ArmRun, Turn
from evoke_proxy.demo.runner import BUDGET
from evoke_proxy.demo.script import Script


def build(script: Script, runs: Mapping[str, ArmRun], failures: Sequence[str]) -> dict[str, Any]:
    """Return the report; counts are tokens, except `evictions` and `recoveries`: blocks."""
    return {
        "seed": script.seed,
        "budget": BUDGET,
        "logical_tokens": logical_tokens(runs),
        "passed": not failures,
        "failures": list(failures),
        "arms": {name: _arm(run) for name, run in runs.items()},
    }


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report, replacing an older one; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _arm(run: ArmRun) -> dict[str, Any]:
    return {
        "recalled": run.recalled,
        "answer": run.answer,
        "expected": run.expected,
        "peak_resident": run.peak_resident,
        "evictions": run.evictions,
        "recoveries": run.recoveries,
        "wall_s": run.wall_s,
        "turns": [_turn(turn) for turn in run.turns],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "prompt": turn.prompt,
        "decoded": turn.decoded,
        "recovered": turn.recovered,
        "resident_before": turn.resident_before,
        "omitted": turn.omitted,
        "resident_peak": turn.resident_peak,
        "resident_end": turn.resident_end,
        "evicted": turn.evicted,
        "ttft_ms": turn.ttft_ms,
        "from_engine": turn.from_engine,
        "resident": turn.resident,
    }
