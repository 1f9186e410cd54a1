"""The watched agent: which message read the file that is edited."""

from __future__ import annotations

import json
from typing import Any

from bench import watched


def _tool_call(id: str, name: str, path: str) -> list[dict[str, Any]]:
    """The messages of a tool call and its result."""
    arguments = json.dumps({"filePath": path, "oldString": "a"})
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": "done"},
    ]


def test_the_latest_message_that_read_the_edited_file_is_found() -> None:
    messages = [{"role": "user", "content": "begin"}, *_tool_call("1", "read", "a.py")]
    assert watched.reading_before(messages) is None
    messages += _tool_call("2", "read", "b.py")
    assert watched.reading_before(messages) is None
    messages += _tool_call("3", "edit", "a.py")
    assert watched.reading_before(messages) == 2
    messages += _tool_call("4", "read", "a.py")
    assert watched.reading_before(messages) == 2
    messages += _tool_call("5", "edit", "a.py")
    assert watched.reading_before(messages) == 8
    assert watched.reading_before([*messages, {"role": "user", "content": "and?"}]) is None
