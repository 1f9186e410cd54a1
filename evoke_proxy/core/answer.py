"""The assistant's message that a chat reply brings, read from the bytes as they go by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# A longer answer is no use: nobody waits for its look-ahead.
_MAX_BYTES = 4 * 1024 * 1024


class AnswerReader:
    """Feed it a reply of /v1/chat/completions, whole or streamed; `message` when it is over."""

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
        texts = [data]
        if not data.lstrip().startswith(b"{"):
            lines = data.replace(b"\r\n", b"\n").split(b"\n")
            texts = [line[5:] for line in lines if line.startswith(b"data:")]
        found = []
        for text in texts:
            part = _part(text)
            if part is not None:
                found.append(part)
        return found


def _part(text: bytes) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    choices = value.get("choices") if isinstance(value, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict) or first.get("index", 0) != 0:
        return None
    part = first.get("message", first.get("delta"))
    return part if isinstance(part, dict) else None


def _text(part: Mapping[str, Any], key: str) -> str:
    value = part.get(key)
    return value if isinstance(value, str) else ""
