"""The agent bench: its script."""

from __future__ import annotations

import json
from typing import Any

from bench import agent


def test_the_agent_script_reads_each_file_before_it_edits_it() -> None:
    steps = agent.script(1, 30)
    assert steps == agent.script(1, 30)
    read_paths = [step.path for step in steps if step.kind == "read"]
    assert len(read_paths) > len(set(read_paths))
    for at, step in enumerate(steps):
        if step.kind == "edit":
            assert [s for s in steps[:at] if s.kind == "read" and s.path == step.path]


def test_what_the_model_needs_are_tools_rules_and_the_edited_file() -> None:
    def called(id: str, name: str, path: str) -> list[dict[str, Any]]:
        call = {"name": name, "arguments": json.dumps({"path": path})}
        calls = [{"id": id, "type": "function", "function": call}]
        return [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": id, "content": "done"},
        ]

    messages = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Begin. From now on, never rename a function."},
        *called("1", "read", "AGENTS.md"),
        *called("2", "read", "src/a.py"),
        *called("3", "edit", "src/a.py"),
    ]
    assert agent.needed(messages[:2]) == [("tools", 0), ("rules", 1)]
    assert agent.needed(messages) == [
        ("tools", 0),
        ("rules", 1),
        ("rules", 3),
        ("edited file", 5),
    ]
    more = [*messages, {"role": "user", "content": "And now?"}]
    assert agent.needed(more) == [("tools", 0), ("rules", 1), ("rules", 3)]
