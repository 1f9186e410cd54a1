"""The agent bench: its script."""

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
