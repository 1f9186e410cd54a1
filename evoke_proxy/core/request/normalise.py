"""What changes at the front of a prompt from request to request without meaning anything, made the
same: opt-in, because what the model is told is then not what the client sent.

Three transformations, of the bytes of a chat request; whatever they do not name stays as it was.

* `billing`: in the system prompt, each `x-anthropic-billing-header:` at the beginning of a line,
  the `name=value;` pairs behind it, and a line break that ends them, are taken out.
* `dates`: lines of the system prompt that tell a date or a time (`is_dated`) keep the digits and
  the names of days and months that they had when the same system prompt was first seen (`Clock`).
* `tools`: the elements of the list `tools` are put in the order of their names, each as spelled.

The system prompt is: of a chat, its first messages of the role system or developer; of responses,
`instructions` and such first items of `input`; of messages, `system`.

`billing` and `dates` apply to the first MOST_TEXTS texts of a system prompt, and of each to the
first and the last EDGE_LINES lines, as far as they are in the first and last EDGE_CHARS characters.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from evoke_proxy.core.request.json_edit import reordered, replaced
from evoke_proxy.core.tenants.fair_share import first_of_largest

BILLING, DATES, TOOLS = WHAT = ("billing", "dates", "tools")
_BILLING = re.compile(r"^x-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\s]*;?)*[ \t]*\n?", re.M)
_NAMED = re.compile(
    r"\b(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day|mon|tue|wed|thu|fri|sat|sun"
    r"|january|february|march|april|may|june|july|august|september|october|november|december"
    r"|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|am|pm)\b|\d+",
    re.IGNORECASE,
)
_DATED = re.compile(r"\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2}:\d{2}\b")
_WORD_OF_TIME = re.compile(r"\b(?:date|time|today|now)\b", re.IGNORECASE)
_DIGIT = re.compile(r"\d")
_SYSTEM = ("system", "developer")
_KEPT = 256
# Bounds of what is made the same: searching it takes the event loop a few milliseconds at most.
MOST_TEXTS, EDGE_CHARS, EDGE_LINES = 4, 8192, 200
# Long texts are written in pieces of so many characters.
_PIECE_CHARS = 64 * 1024
Path = tuple[str | int, ...]


def is_dated(line: str) -> bool:
    """Whether a line tells a date or a time: a number behind one of the words date, time, today and
    now, or anything like 2026-11-21 or 9:30."""
    if _DATED.search(line):
        return True
    # Two searches: one pattern for both would try every such word with the rest of the line.
    said = _WORD_OF_TIME.search(line)
    return said is not None and _DIGIT.search(line, said.end()) is not None


def without_billing(text: str) -> str:
    """A system prompt without its billing header."""
    head, middle, tail = edges(text)
    return _BILLING.sub("", head) + middle + _BILLING.sub("", tail)


def edges(text: str) -> tuple[str, str, str]:
    """A text in three: the lines at its beginning, those between, and the lines at its end."""
    if len(text) <= EDGE_CHARS and text.count("\n") <= EDGE_LINES:
        return text, "", ""
    head = text[:EDGE_CHARS]
    if len(text) > EDGE_CHARS:  # it ends within a line
        head = head[: head.rfind("\n") + 1] or head
    lines = head.split("\n", EDGE_LINES)
    if len(lines) > EDGE_LINES:
        head = head[: len(head) - len(lines[-1])]
    behind = len(text) - len(head)
    tail = text[-min(EDGE_CHARS, behind) :] if behind else ""
    if len(tail) < behind:  # it begins within a line
        tail = tail[tail.find("\n") + 1 :]
    last = tail.rsplit("\n", EDGE_LINES)
    if len(last) > EDGE_LINES:
        tail = tail[len(last[0]) + 1 :]
    return head, text[len(head) : len(text) - len(tail)], tail


class Clock:
    """System prompts as they were first seen, by tenant; so many that the latest used are known.

    Of the tenant that has most the longest unused is forgotten first.
    """

    def __init__(self) -> None:
        self._first: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()

    def stopped(self, text: str, tenant: str, now: float, hours: float) -> str:
        """A system prompt with the dates and times that it had when it was first seen, but for
        those in lines that are not `is_dated`; as it is when that is so many hours ago."""
        head, middle, tail = edges(text)
        same = _undated(head) + middle + _undated(tail)
        if same == text:
            return text
        first, since = self._first.pop((tenant, same), (text, now))
        if now - since >= hours * 3600:
            first, since = text, now
        self._first[tenant, same] = first, since
        while len(self._first) > _KEPT:
            surplus = first_of_largest(self._first, lambda key: key[0])
            if surplus is None:
                break
            del self._first[surplus]
        return first


def _undated(text: str) -> str:
    """A text without what dates and times consist of, in lines that are dated."""
    lines = text.split("\n")
    return "\n".join(_NAMED.sub("\0", line) if is_dated(line) else line for line in lines)


def system_texts(body: Mapping[str, Any], dialect: str) -> Iterator[tuple[Path, str]]:
    """Every text of a request's system prompt, with the path to it."""
    if dialect == "messages":
        yield from _texts(body.get("system"), ("system",))
        return
    if dialect == "responses":
        yield from _texts(body.get("instructions"), ("instructions",))
    key = "input" if dialect == "responses" else "messages"
    given = body.get(key)
    for at, item in enumerate(given if isinstance(given, list) else ()):
        if not isinstance(item, Mapping) or item.get("role") not in _SYSTEM:
            return
        yield from _texts(item.get("content"), (key, at, "content"))


def with_texts(body: bytes, texts: Mapping[Path, str]) -> bytes:
    """A body with other texts at these paths."""
    return replaced(body, {path: _spelled(text) for path, text in texts.items()})


def _spelled(text: str) -> str:
    pieces = (text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS))
    return '"' + "".join(json.dumps(piece)[1:-1] for piece in pieces) + '"'


def with_sorted_tools(body: bytes, tools: object) -> bytes:
    """A body whose `tools`, which it is known to have, are in the order of their names."""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return body
    order = sorted(range(len(tools)), key=lambda at: (_tool_name(tools[at]), at))
    return body if order == list(range(len(tools))) else reordered(body, "tools", order)


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    named = function if isinstance(function, Mapping) else tool
    return str(named.get("name") or tool.get("type") or "")


def _texts(value: object, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    for at, part in enumerate(value if isinstance(value, list) else ()):
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield (*path, at, "text"), part["text"]
