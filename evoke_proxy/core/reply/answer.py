"""Reads the assistant's message from the bytes of a chat reply."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from evoke_proxy.core.reply.event_stream import EventReader
from evoke_proxy.core.request.json_parsing import count_byte

# Longer answers are not read, because decoding the next turn ahead would take too long.
_MAX_BYTES = 4 * 1024 * 1024
# A document with more objects and lists is not read: those of the probabilities of some hundred
# tokens, whose parsing no other thread could interrupt.
_MAX_BRACKETS = 8192


class AnswerReader:
    """Collects a reply of any dialect except raw completions, streamed or not.

    Feed it all bytes, then read `message`.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._is_too_long = False

    def feed(self, data: bytes) -> None:
        """Add the next bytes; memory stays bounded."""
        if not self._is_too_long:
            self._data += data
            self._is_too_long = len(self._data) > _MAX_BYTES
        if self._is_too_long:
            self._data.clear()

    def message(self, with_reasoning: bool) -> dict[str, Any] | None:
        """The message as clients send it back; None for tool calls or an unreadable reply.

        `with_reasoning` includes the reasoning of the answer.
        """
        content, reasoning, has_calls = "", "", False
        for part in self._parts():
            content += _text(part, "content")
            reasoning += _text(part, "reasoning_content")
            has_calls = has_calls or bool(part.get("tool_calls") or part.get("function_call"))
        if has_calls or not (content or reasoning):
            return None
        thought = {"reasoning_content": reasoning} if with_reasoning and reasoning else {}
        return {"role": "assistant", "content": content} | thought

    def _parts(self) -> list[Mapping[str, Any]]:
        """The message, or the deltas of a stream."""
        data = bytes(self._data)
        documents = [data]
        if not data.lstrip().startswith(b"{"):
            events = EventReader(_MAX_BYTES)
            documents = [*events.feed(data), *events.close()]
        return [part for part in map(_part, documents) if part is not None]


def _part(text: bytes) -> Mapping[str, Any] | None:
    """Return the part of an answer in one JSON document or event; None when it has none."""
    if count_byte(text, b"{") + count_byte(text, b"[") > _MAX_BRACKETS:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    if "choices" not in value:
        return _part_of_blocks(value)
    choices = value["choices"]
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict) or first.get("index", 0) != 0:
        return None
    part = first.get("message", first.get("delta"))
    return part if isinstance(part, dict) else None


def _part_of_blocks(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Convert an answer of /v1/messages, or an event of its stream, to a part of a chat answer."""
    response = value.get("response", value)
    output = response.get("output") if isinstance(response, dict) else None
    if isinstance(output, list):  # complete, or the last event of /v1/responses
        return _part_of_items([item for item in output if isinstance(item, dict)])
    content = value.get("content")
    in_event = [value.get("content_block"), value.get("delta")]
    candidates = content if isinstance(content, list) else in_event
    blocks = [block for block in candidates if isinstance(block, dict)]
    text = "".join(_text(block, "text") for block in blocks)
    reasoning = "".join(_text(block, "thinking") for block in blocks)
    has_calls = any(block.get("type") == "tool_use" for block in blocks)
    return {"content": text, "reasoning_content": reasoning, "tool_calls": has_calls}


def _part_of_items(items: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Convert an answer of /v1/responses to a part of a chat answer."""
    texts = {"message": "", "reasoning": ""}
    for item in items:
        content = item.get("content")
        parts = [part for part in content if isinstance(part, dict)] if content else []
        if item.get("type") in texts:
            texts[item["type"]] += "".join(_text(part, "text") for part in parts)
    has_calls = any(item.get("type") == "function_call" for item in items)
    return {
        "content": texts["message"],
        "reasoning_content": texts["reasoning"],
        "tool_calls": has_calls,
    }


def _text(part: Mapping[str, Any], key: str) -> str:
    value = part.get(key)
    return value if isinstance(value, str) else ""
