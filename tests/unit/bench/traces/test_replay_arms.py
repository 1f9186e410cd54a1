"""The arms of the trace bench, its bars and its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.traces.__main__ import (
    BENCH,
    BOUND,
    OURS,
    SAME_RAM,
    SPECS,
    Spec,
    bars,
    cause_of,
    replayed,
    with_ratios,
)
from bench.traces.replay import Counts, Served
from bench.traces.texts import Agent, Request, Scale


def _conversations() -> list[Agent]:
    agents = []
    for number in range(3):
        ids = np.arange(40)
        prompts = [ids[: 20 + 2 * at] for at in range(8)]
        prompts.append(np.concatenate([ids[:10], ids[20:30] + 100]))  # a compaction
        requests = [Request(2.0, 64, each.astype(np.int64)) for each in prompts]
        agents.append(Agent(f"c{number}", 256, 64, requests))
    return agents


def test_arms_are_ordered_by_what_they_can_keep() -> None:
    wanted = (BOUND, "2 slots", "ram cache, no limit", OURS)
    specs = [spec for spec in SPECS if spec.name in wanted]
    rows = {spec.name: replayed(spec, _conversations(), Scale(64)) for spec in specs}
    decoded = {name: row["decoded"] for name, row in rows.items()}
    assert decoded[BOUND] == rows[BOUND]["fresh"]
    assert decoded[BOUND] <= decoded["ram cache, no limit"] < decoded["2 slots"] / 2
    assert decoded[OURS] <= 1.1 * decoded[BOUND]
    assert all(row["requests"] == 27 for row in rows.values())
    assert sum(rows["2 slots"]["causes"].values()) == rows["2 slots"]["misses"] > 0
    assert rows[OURS]["peak"] <= rows[OURS]["budget"]


def test_features_change_what_is_decoded() -> None:
    spec = Spec("nothing adopted", features=("blocks", "plan", "render", "reuse", "stream"))
    row = replayed(spec, _conversations(), Scale(64))
    assert row["decoded"] > 2 * replayed(Spec(OURS), _conversations(), Scale(64))["decoded"]


def _row(arm: str, decoded: int, **more: Any) -> dict[str, Any]:
    return {"arm": arm, "decoded": decoded, "prompt": 1000, "omitted": 100, **more}


def test_each_bar_compares_with_its_limit() -> None:
    rows = [_row(BOUND, 100), _row(SAME_RAM, 200)]
    ours = _row(OURS, 130, miss_share=0.02, peak=50, budget=50)
    found = bars([*rows, ours])
    assert {name: bar["reached"] for name, bar in found.items()} == {
        "decoded of the RAM cache": False,
        "decoded of the bound": True,
        "share of misses": False,
        "peak of the budget": True,
    }
    full = _row("evoke, half, within_turn full", 130, peak=500, budget=50)
    assert bars([*rows, ours, full])["peak of the budget"]["reached"]
    over = _row("evoke, no disk", 130, peak=51, budget=50)
    assert not bars([*rows, ours, over])["peak of the budget"]["reached"]
    assert {row["arm"] for row in (full, over)} <= {spec.name for spec in SPECS}
    assert with_ratios(rows)[1]["of_bound"] == 2.0


@pytest.mark.parametrize(
    ("position", "is_new", "cause"),
    [
        (None, False, "beginning of another conversation"),
        (900, True, "edited first message: new session"),
        (500, False, "history changed"),
        (995, False, "rows lost or in another slot"),
    ],
)
def test_causes_of_misses(position: int | None, is_new: bool, cause: str) -> None:
    served = Served("a#1", 1200, 10, position, 1001, Counts(1200), is_new)
    assert cause_of(served, Scale(8)) == cause


def test_an_arm_that_does_not_exist_is_refused() -> None:
    assert BENCH.parse(["--arms", OURS]).arms == [OURS]
    with pytest.raises(SystemExit):
        BENCH.parse(["--arms", OURS, "evoke, discard"])


def test_the_command_writes_rows_and_bars(tmp_path: Path) -> None:
    out = tmp_path / "traces.json"
    argv = ["--conversations", "1", "--arms", BOUND, "--block", "2", "--jobs", "1"]
    status = BENCH.main([*argv, "--out", str(out)])
    report = json.loads(out.read_text("utf-8"))
    assert {row["arm"] for row in report["rows"]} == {BOUND, SAME_RAM, OURS}
    reached = [bar["reached"] for bar in report["summary"]["bars"].values()]
    assert status == (0 if all(reached) else 1)
    assert report["summary"]["conversations"] == 1
