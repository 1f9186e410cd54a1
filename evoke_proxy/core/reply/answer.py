"""The assistant's message that a chat reply brings, read from the bytes as they go by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from evoke_proxy.core.reply.event_stream import EventReader

# A longer answer is no use: nobody waits for its look-ahead.
_MAX_BYTES = 4 * 1024 * 1024


class AnswerReader:
    """Feed it a reply of any dialect but raw completions, whole or streamed; `message` at the
    end."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._dropped = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes; memory stays bounded."""
        if not self._dropped:
            self._data += data
            self._dropped = len(self._data) > _MAX_BYTES
        if self._dropped:
            self._data.clear()

    def message(self, with_reasoning: bool) -> dict[str, Any] | None:
        """What a client will send back of it; None for a call of tools, or nothing readable."""
        content, reasoning, called = "", "", False
        for part in self._parts():
            content += _text(part, "content")
            reasoning += _text(part, "reasoning_content")
            called = called or bool(part.get("tool_calls") or part.get("function_call"))
        if called or not (content or reasoning):
            return None
        thought = {"reasoning_content": reasoning} if with_reasoning and reasoning else {}
        return {"role": "assistant", "content": content} | thought

    def _parts(self) -> list[Mapping[str, Any]]:
        """The message, or its deltas."""
        data = bytes(self._data)
        documents = [data]
        if not data.lstrip().startswith(b"{"):
            events = EventReader(_MAX_BYTES)
            documents = [*events.feed(data), *events.close()]
        return [part for part in map(_part, documents) if part is not None]


def _part(text: bytes) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    if "choices" not in value:
        return _of_blocks(value)
    choices = value["choices"]
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict) or first.get("index", 0) != 0:
        return None
    part = first.get("message", first.get("delta"))
    return part if isinstance(part, dict) else None


def _of_blocks(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """An answer of /v1/messages, or an event of its stream, as a part of a chat's answer."""
    response = value.get("response", value)
    output = response.get("output") if isinstance(response, dict) else None
    if isinstance(output, list):  # whole, or the last event of /v1/responses
        return _of_items([item for item in output if isinstance(item, dict)])
    content = value.get("content")
    of_event = [value.get("content_block"), value.get("delta")]
    given = content if isinstance(content, list) else of_event
    blocks = [block for block in given if isinstance(block, dict)]
    said = "".join(_text(block, "text") for block in blocks)
    thought = "".join(_text(block, "thinking") for block in blocks)
    called = any(block.get("type") == "tool_use" for block in blocks)
    return {"content": said, "reasoning_content": thought, "tool_calls": called}


def _of_items(items: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """An answer of /v1/responses as a part of a chat's answer."""
    said = {"message": "", "reasoning": ""}
    for item in items:
        content = item.get("content")
        parts = [part for part in content if isinstance(part, dict)] if content else []
        if item.get("type") in said:
            said[item["type"]] += "".join(_text(part, "text") for part in parts)
    called = any(item.get("type") == "function_call" for item in items)
    return {
        "content": said["message"],
        "reasoning_content": said["reasoning"],
        "tool_calls": called,
    }


def _text(part: Mapping[str, Any], key: str) -> str:
    value = part.get(key)
    return value if isinstance(value, str) else ""
