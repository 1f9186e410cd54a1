"""The summaries and bars of the demo's sessions, by part."""

from __future__ import annotations

from typing import Any

from bench.demo_recall import ARMS, PARTS, counted, missed, of_arms, of_ceiling, of_facts, of_types


def run(recalled: bool, **more: Any) -> dict[str, Any]:
    return {"recalled": recalled, "answer": f"{recalled}", "peak_resident": 480, **more}


def test_the_ceiling_fails_below_its_least_share_and_on_a_leak() -> None:
    row = run(True, repeated_early=False, value_without_fact=False, tokens=2000)
    assert of_ceiling([row] * 4)["share"] == 1 and not missed(
        "ceiling", of_ceiling([row] * 4), 0.96
    )
    poor = of_ceiling([row, {**row, "recalled": False}])
    assert (
        poor["share"] == 0.5 and missed("ceiling", poor, 0.96) and not missed("ceiling", poor, 0.5)
    )
    leak = of_ceiling([row, {**row, "value_without_fact": True}])
    assert missed("ceiling", leak, 0.5)


def test_facts_and_types_are_counted_apart() -> None:
    kinds = [run(kind != "para", kind=kind) for kind in ("my", "para", "file")]
    assert {kind: found["recalled"] for kind, found in of_facts(kinds).items()} == {
        "my": 1, "para": 0, "file": 1,
    }  # fmt: skip
    rows = [
        run(kind != "q4_0", type=kind, arm=arm, recoveries=2)
        for kind in ("f16", "q8_0", "q4_0") for arm in ("no_eviction", "evoke")
    ]  # fmt: skip
    lines = of_types(rows)["types"]
    assert [(line["type"], line["same_answer"]) for line in lines if line["arm"] == "evoke"] == [
        ("f16", 1), ("q8_0", 1), ("q4_0", 0),
    ]  # fmt: skip


def test_a_seed_that_does_not_pass_fails_the_arms() -> None:
    row = {"failures": [], "arms": {arm: run(True, decoded=5) for arm in ARMS}}
    assert not missed("arms", of_arms([row]), 0.96)
    assert missed("arms", of_arms([row, {**row, "failures": ["over budget"]}]), 0.96)
    assert not missed("facts", {}, 0.96) and not missed("types", {}, 0.96)


def test_every_part_has_an_interval() -> None:
    assert set(PARTS) == {"ceiling", "facts", "types", "arms"}
    assert counted([run(True)] * 10)["interval_95"][0] > 0.7
