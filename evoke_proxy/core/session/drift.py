"""Finds where a request differs from the previous one, and the likely cause of the cache miss.

Compares the bodies message by message, or a prompt with the blocks of the previous one; stores and
returns none of their text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from posixpath import commonprefix
from typing import Any

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered, common_prefix
from evoke_proxy.core.request.messages import Message

# Causes, in this order: the billing line of Claude Code changed; a line of the system prompt with a
# date, a time or the state of a working tree changed; another part of the system prompt changed;
# tools were reordered, or changed; reasoning was removed from an earlier answer; an earlier message
# was edited; the client went back and continued differently, or shortened the history; only the
# chat template rendered the history differently.
CAUSES = (
    *("billing_line", "date_line", "system_changed", "tool_order", "tools_changed"),
    *("thinking_dropped", "edited_history", "branched", "compacted", "template"),
)
# What stops a small change at the front that comes with every request.
REMEDIES = {
    "billing_line": "set normalise.billing",
    "date_line": "set normalise.dates_h, which keeps the date of the first request",
    "system_changed": "have the client put what changes behind the conversation",
    "tool_order": "set normalise.tools",
}
_BILLING = re.compile(r"billing-header:|\bcch=")
# A line that contains a day, a time, or the state of a working tree.
_DATED = re.compile(
    r"\b(?:date|time|today|now|cwd|working directory|git status|branch)\b"
    r"|\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2}:\d{2}\b"
    r"|\b(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*day\b",
    re.IGNORECASE,
)
# Characters before and behind an estimated position that are searched for a changed line.
_MARGIN_CHARS = 24
# Characters of a line, before and behind it, that are searched at most: a search holds the
# interpreter's lock until its end.
_MAX_LINE_CHARS = 2048
# Characters that are compared in one step.
_STEP_CHARS = 4096
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Drift:
    """How a request differs from the previous one.

    Attributes:
        cause: The likely cause, one of CAUSES.
        message: Index of the first message that differs; None when tools or only the template do.
        start: First character of its new text that differs.
        end: End of the characters that differ.
        n_tokens: Tokens of the previous prompt behind the difference, where it is known.
    """

    cause: str
    message: int | None = None
    start: int = 0
    end: int = 0
    n_tokens: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the drift as a JSON object, for the admin API."""
        return {
            "cause": self.cause,
            "message": self.message,
            "characters": [self.start, self.end],
        }

    @property
    def text(self) -> str:
        """The drift as words, for the log."""
        if self.message is None:
            return self.cause
        place = f"from character {self.start}"
        if self.end > self.start:
            place = f"characters {self.start} to {self.end}"
        return f"{self.cause} in message {self.message}, {place}"


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


def drift_from(before: Layout, rendered: Rendered, messages: Sequence[Message]) -> Drift | None:
    """Return how a prompt differs from that of a layout; None when it only continues it.

    `messages` are those that `rendered.turn_spans` refers to. The character positions are an
    estimate. Tools are a part of the system prompt here.
    """
    shared = common_prefix(before.tokens, rendered.tokens)
    spans = rendered.turn_spans
    if shared >= before.generation or not len(spans):
        return None
    at = min(bisect_right(spans, shared, key=_end), len(spans) - 1)
    item = spans[at]
    text = messages[item.index].printed if 0 <= item.index < len(messages) else ""
    start = _character(text, item, shared)
    near = text[max(0, start - _MAX_LINE_CHARS) : start + _MAX_LINE_CHARS]
    middle = min(start, _MAX_LINE_CHARS)
    # A line that differs may begin before the estimated position, and end behind it.
    line = _line(near, max(0, middle - _MARGIN_CHARS), min(len(near), middle + _MARGIN_CHARS))
    cause = _cause_in_prompt(before, spans, at, shared, line)
    return Drift(cause, item.index, start, start, before.generation - shared)


def _end(item: MessageSpan) -> int:
    return item.span.end


def _character(text: str, item: MessageSpan, position: int) -> int:
    """Return about where a token position of a message is in its text."""
    done = min(position, item.span.end) - item.span.start
    return max(0, done) * len(text) // max(1, len(item.span))


def _cause_in_prompt(
    before: Layout, spans: Sequence[MessageSpan], at: int, shared: int, line: str
) -> str:
    """Return the cause of a difference in the message `spans[at]`, whose line this is."""
    blocks, item = before.blocks, spans[at]
    old = blocks[min(int(blocks.ends.searchsorted(shared, "right")), len(blocks) - 1)]
    if item.role is Role.SYSTEM:
        if _BILLING.search(line):
            return "billing_line"
        return "date_line" if _DATED.search(line) else "system_changed"
    n_before, n_now = blocks[-1].message + 1, spans[-1].index + 1
    if item.role is old.role is Role.ASSISTANT and item.index == old.message and n_now >= n_before:
        # A template that drops reasoning changes an answer that the client has not changed.
        return "template"
    if at == len(spans) - 1:
        return "branched"
    return "compacted" if n_now < n_before - 1 else "edited_history"


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
    start = _n_shared(old, new)
    most = min(len(old), len(new)) - start
    same_end = _n_shared(old[::-1][:most], new[::-1][:most])
    return start, len(new) - same_end


def _n_shared(one: str, other: str) -> int:
    """Return how many first characters two texts share."""
    at, most = 0, min(len(one), len(other))
    while at < most and one[at : at + _STEP_CHARS] == other[at : at + _STEP_CHARS]:
        at += _STEP_CHARS
    differing = [one[at : at + _STEP_CHARS], other[at : at + _STEP_CHARS]]
    return min(most, at + len(commonprefix(differing)))


def _line(text: str, start: int, end: int) -> str:
    """Return the lines that contain a range of characters, without what is far from its start."""
    near = text[: start + _MAX_LINE_CHARS]
    first = near.rfind("\n", 0, start) + 1
    last = near.find("\n", max(end, start))
    return near[max(first, start - _MAX_LINE_CHARS) : last if last >= 0 else len(near)]


def _json_text(value: Any, sort_keys: bool = False, ensure_ascii: bool = True) -> str:
    """Return what json.dumps writes, encoded value by value so that other threads can run."""
    encoder = json.JSONEncoder(sort_keys=sort_keys, ensure_ascii=ensure_ascii)
    return "".join(encoder.iterencode(value))
