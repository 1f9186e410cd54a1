"""The summaries and bars of the demo's sessions, by part."""

from __future__ import annotations

import argparse
from typing import Any

from bench.demo_recall import ARMS, PARTS, counted, of_arms, of_ceiling, of_facts, of_types


def run(recalled: bool, **more: Any) -> dict[str, Any]:
    return {"recalled": recalled, "answer": f"{recalled}", "peak_resident": 480, **more}


def _args(least: float = 0.96) -> argparse.Namespace:
    return argparse.Namespace(least=least)


def test_the_ceiling_fails_below_its_least_share_and_on_a_leak() -> None:
    row = run(True, repeated_early=False, value_without_fact=False, tokens=2000)
    good = of_ceiling(_args(), [row] * 4)
    assert good.summary["share"] == 1 and not good.missed
    poor = [row, {**row, "recalled": False}]
    assert of_ceiling(_args(), poor).summary["share"] == 0.5
    assert of_ceiling(_args(), poor).missed and not of_ceiling(_args(0.5), poor).missed
    assert of_ceiling(_args(0.5), [row, {**row, "value_without_fact": True}]).missed


def test_facts_and_types_are_counted_apart() -> None:
    kinds = [run(kind != "para", kind=kind) for kind in ("my", "para", "file")]
    assert {k: found["right"] for k, found in of_facts(_args(), kinds).summary.items()} == {
        "my": 1, "para": 0, "file": 1,
    }  # fmt: skip
    rows = [
        run(kind != "q4_0", type=kind, arm=arm, recoveries=2)
        for kind in ("f16", "q8_0", "q4_0") for arm in ("no_eviction", "evoke")
    ]  # fmt: skip
    lines = of_types(_args(), rows).summary["types"]
    assert [(line["type"], line["same_answer"]) for line in lines if line["arm"] == "evoke"] == [
        ("f16", 1), ("q8_0", 1), ("q4_0", 0),
    ]  # fmt: skip


def test_a_seed_that_does_not_pass_fails_the_arms() -> None:
    row = {"failures": [], "arms": {arm: run(True, decoded=5) for arm in ARMS}}
    assert not of_arms(_args(), [row]).missed
    assert of_arms(_args(), [row, {**row, "failures": ["over budget"]}]).missed


def test_every_part_has_an_interval() -> None:
    assert set(PARTS) == {"ceiling", "facts", "types", "arms"}
    assert counted([run(True)] * 10)["interval_95"][0] > 0.7
