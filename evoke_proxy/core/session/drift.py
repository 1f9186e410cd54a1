"""Finds where a request differs from the previous one, and the likely cause of the cache miss.

Compares the bodies message by message; stores and returns none of their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from posixpath import commonprefix
from typing import Any

# Causes, in this order: the billing line of Claude Code changed; a line of the system prompt with a
# date, a time or the state of a working tree changed; another part of the system prompt changed;
# tools were reordered, or changed; reasoning was removed from an earlier answer; an earlier message
# was edited; the client went back and continued differently, or shortened the history; only the
# chat template rendered the history differently.
CAUSES = (
    *("billing_line", "date_line", "system_changed", "tool_order", "tools_changed"),
    *("thinking_dropped", "edited_history", "branched", "compacted", "template"),
)
_BILLING = re.compile(r"billing-header:|\bcch=")
# A line that contains a day, a time, or the state of a working tree.
_DATED = re.compile(
    r"\b(?:date|time|today|now|cwd|working directory|git status|branch)\b"
    r"|\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2}:\d{2}\b"
    r"|\b(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*day\b",
    re.IGNORECASE,
)
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Drift:
    """How a request differs from the previous one.

    Attributes:
        cause: The likely cause, one of CAUSES.
        message: Index of the first message that differs; None when tools or only the template do.
        start: First character of its new text that differs.
        end: End of the characters that differ.
    """

    cause: str
    message: int | None = None
    start: int = 0
    end: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the drift as a JSON object, for the log and the admin API."""
        return {
            "cause": self.cause,
            "message": self.message,
            "characters": [self.start, self.end],
        }


def drift(before: Mapping[str, Any], now: Mapping[str, Any]) -> Drift | None:
    """Return how a chat body differs from the previous one; None when it only continues it.

    Only bodies are compared. When the body continues the previous one and the tokens still diverge,
    the chat template has rendered the history differently.
    """
    tools = _tools_changed(before.get("tools"), now.get("tools"))
    if tools:
        return Drift(tools)
    old, new = _messages(before), _messages(now)
    at = next((i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return None if len(new) >= len(old) else Drift("branched", len(new))
    start, end = _differing(_text(old[at]), _text(new[at]))
    return Drift(_cause(old, new, at, start, end), at, start, end)


def opening(body: Mapping[str, Any]) -> bytes:
    """Return the first user message as JSON; empty if the body has fewer than two user messages."""
    messages = _messages(body)
    questions = (item for item in messages if _role(item) == "user")
    first = next(questions, None)
    is_first_turn = first is None or next(questions, None) is None
    return b"" if is_first_turn else _json_text(first, sort_keys=True).encode()


def _cause(old: Sequence[Any], new: Sequence[Any], at: int, start: int, end: int) -> str:
    """Return the cause of a first difference in message `at`, at [start, end) of its new text."""
    was, now = old[at], new[at]
    if at == 0 or _role(now) in ("system", "developer"):
        line = _line(_text(now), start, end)
        if _BILLING.search(line):
            return "billing_line"
        return "date_line" if _DATED.search(line) else _at_front(old, new, now)
    if _role(was) == _role(now) == "assistant" and _without_reasoning(was) == _without_reasoning(
        now
    ):
        return "thinking_dropped"
    if len(new) < len(old) - 1:
        return "compacted"
    return "branched" if at >= len(old) - 2 else "edited_history"


def _at_front(old: Sequence[Any], new: Sequence[Any], now: Any) -> str:
    """Return the cause of a difference in the system prompt or the first message `now`."""
    if _role(now) in ("system", "developer"):
        return "system_changed"
    return "compacted" if len(new) < len(old) - 1 else "edited_history"


def _tools_changed(old: Any, new: Any) -> str:
    if old == new:
        return ""
    same = isinstance(old, list) and isinstance(new, list) and _sorted(old) == _sorted(new)
    return "tool_order" if same else "tools_changed"


def _sorted(items: Sequence[Any]) -> list[str]:
    return sorted(_json_text(item, sort_keys=True) for item in items)


def _messages(body: Mapping[str, Any]) -> Sequence[Any]:
    messages = body.get("messages")
    return messages if isinstance(messages, list) else ()


def _role(message: Any) -> str:
    return str(message.get("role")) if isinstance(message, Mapping) else ""


def _without_reasoning(message: Any) -> dict[str, Any]:
    return {key: message[key] for key in message if key not in _REASONING_KEYS}


def _text(message: Any) -> str:
    """Return a message as one text, its content first."""
    if not isinstance(message, Mapping):
        return _json_text(message)
    content = message.get("content")
    text = content if isinstance(content, str) else _json_text(content, ensure_ascii=False)
    more = {key: message[key] for key in message if key not in ("role", "content")}
    return text + (_json_text(more, sort_keys=True) if more else "")


def _differing(old: str, new: str) -> tuple[int, int]:
    """Return the start and the end of the characters that differ in the new text."""
    start = len(commonprefix([old, new]))
    most = min(len(old), len(new)) - start
    same_end = len(commonprefix([old[::-1][:most], new[::-1][:most]]))
    return start, len(new) - same_end


def _line(text: str, start: int, end: int) -> str:
    """Return the lines that contain a range of characters."""
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", max(end, start))
    return text[first : last if last >= 0 else len(text)]


def _json_text(value: Any, sort_keys: bool = False, ensure_ascii: bool = True) -> str:
    """Return what json.dumps writes, encoded value by value so that other threads can run."""
    encoder = json.JSONEncoder(sort_keys=sort_keys, ensure_ascii=ensure_ascii)
    return "".join(encoder.iterencode(value))
