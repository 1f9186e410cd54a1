"""The watched agent: what its model needs to see, and the bars of its arms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import watched


def _tool_call(id: str, name: str, path: str) -> list[dict[str, Any]]:
    """The messages of a tool call and its result."""
    arguments = json.dumps({"path": path, "old": "a"})
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": "done"},
    ]


def test_the_latest_message_that_read_the_edited_file_is_found() -> None:
    messages = [{"role": "user", "content": "begin"}, *_tool_call("1", "read", "a.py")]
    assert watched.latest_call(messages) == ("read", None)
    messages += _tool_call("2", "read", "b.py")
    assert watched.latest_call(messages) == ("read", None)
    messages += _tool_call("3", "edit", "a.py")
    assert watched.latest_call(messages) == ("edit", 2)
    messages += _tool_call("4", "read", "a.py")
    assert watched.latest_call(messages) == ("read", 2)
    messages += _tool_call("5", "edit", "a.py")
    assert watched.latest_call(messages) == ("edit", 8)
    asked = [*messages, {"role": "user", "content": "and?"}]
    assert watched.latest_call(asked) == ("asked", None)


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
    assert watched.needed(messages[:2]) == [("tools", 0), ("rules", 1)]
    assert watched.needed(messages) == [
        ("tools", 0),
        ("rules", 1),
        ("rules", 3),
        ("edited file", 5),
    ]
    more = [*messages, {"role": "user", "content": "And now?"}]
    assert watched.needed(more) == [("tools", 0), ("rules", 1), ("rules", 3)]


def _row(arm: str, **changed: int) -> dict[str, Any]:
    row = {"arm": arm, "over": 0, "unbalanced": 0, "mismatches": 0, "rows_differ": 0}
    return {**row, "checks": 100, "checks_hold": 98, **changed}


def test_the_bars_are_rows_budgets_counts_and_checks() -> None:
    assert list(watched.missed([_row("evoke"), _row("discard", checks_hold=10)])) == []
    for key in ("over", "unbalanced", "mismatches", "rows_differ"):
        assert list(watched.missed([_row("discard", **{key: 2})])) == [f"discard: {key} 2"]
    assert list(watched.missed([_row("below_full", checks_hold=97)])) == [
        "below_full: 97 of 100 checks"
    ]
    assert list(watched.missed([_row("evoke", rows_back=0)])) == ["evoke: no row came back"]
    assert list(watched.missed([_row("evoke", rows_back=1)])) == []


def test_a_row_has_no_figure_of_what_was_not_measured(tmp_path: Path) -> None:
    turn = {"prompt": 90, "peak": 50, "decoded": 90, "recovered": 0, "resident_before": 0}
    turn |= {"omitted": 0, "blocks": 0, "kind": "asked"}
    watch = watched.Watch(1, None, compares=False, turns=[turn])
    row = watched.row("truncate", 40, watch, "")
    assert row["recovered_blocks"] == 0 and row["over"] == 1 and "tools_whole" not in row
    assert "truncate_checks" not in watched.summarise([row])
    seen = {"blocks": 3, "tools_whole": True, "checks": 2, "checks_hold": 1, "missing": ["rules"]}
    watch = watched.Watch(1, tmp_path, compares=False, turns=[turn | seen])
    row = watched.row("below_full", 40, watch, "")
    assert (row["recovered_blocks"], row["checks_hold"], row["over"]) == (3, 1, 0)
    assert watched.summarise([row])["below_full_tools_whole"] == "1 of 1"
