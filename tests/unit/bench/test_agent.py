"""The agent bench: its script and its report."""

from __future__ import annotations

from bench import agent


def test_the_agent_script_reads_each_file_before_it_edits_it() -> None:
    steps = agent.script(1, 30)
    assert steps == agent.script(1, 30)
    read_paths = [step.path for step in steps if step.kind == "read"]
    assert len(read_paths) > len(set(read_paths))
    for at, step in enumerate(steps):
        if step.kind == "edit":
            assert [s for s in steps[:at] if s.kind == "read" and s.path == step.path]


def test_a_run_without_the_arm_that_recovers_has_a_report() -> None:
    row = {"arm": "no_eviction", "budget": None, "turns": 3, "prompt": 90, "decoded_share": 0.1}
    row |= {"peak": 90, "omitted": 0, "checks": 0, "over": 0, "unbalanced": 0, "mismatches": 0}
    found = agent.report(agent.BENCH.parse([]), [row])
    assert not found.missed and found.summary["no_eviction_peak"] == 90
