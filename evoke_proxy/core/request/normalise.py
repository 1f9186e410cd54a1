"""Normalises the start of prompts, so that meaningless changes do not invalidate the KV cache.

Normalising is opt-in, because the model then reads text that the client did not send. Three
transformations change bytes of a chat request; all other bytes stay unchanged.

* `billing`: removes from the system prompt each `x-anthropic-billing-header:` at the start of a
  line, with its `name=value;` pairs and the line break after them.
* `dates`: in lines of the system prompt with a date or time (`is_dated`), keeps digits and names of
  days and months as they were when the same system prompt was first seen (`DateFreezer`).
* `tools`: sorts the list `tools` by name.

The system prompt is, in a chat, the leading messages of the role system or developer; in responses,
`instructions` and such leading items of `input`; in messages, `system`.

`billing` and `dates` apply to the first MAX_TEXTS texts of a system prompt, and there to the first
and last EDGE_LINES lines within the first and last EDGE_CHARS characters.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from evoke_proxy.core.request.json_edit import reorder_elements, replaced
from evoke_proxy.core.tenants.fair_share import first_of_largest

BILLING, DATES, TOOLS = NORMALISATIONS = ("billing", "dates", "tools")
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
_MAX_PROMPTS = 256
# Limits of what is searched, so that it blocks the event loop for a few milliseconds at most.
MAX_TEXTS, EDGE_CHARS, EDGE_LINES = 4, 8192, 200
# Characters of a piece when a long text is encoded.
_PIECE_CHARS = 64 * 1024
Path = tuple[str | int, ...]


def is_dated(line: str) -> bool:
    """Whether a line has a date or a time.

    That is a number after one of the words date, time, today and now, or 2026-11-21, or 9:30.
    """
    if _DATED.search(line):
        return True
    # Two searches stay linear: one pattern would try every such word with the rest of the line.
    word = _WORD_OF_TIME.search(line)
    return word is not None and _DIGIT.search(line, word.end()) is not None


def without_billing(text: str) -> str:
    """Remove the billing header from a system prompt."""
    head, middle, tail = edges(text)
    return _BILLING.sub("", head) + middle + _BILLING.sub("", tail)


def edges(text: str) -> tuple[str, str, str]:
    """Split a text into its first lines, the lines between, and its last lines."""
    if len(text) <= EDGE_CHARS and text.count("\n") <= EDGE_LINES:
        return text, "", ""
    head = text[:EDGE_CHARS]
    if len(text) > EDGE_CHARS:  # ends within a line
        head = head[: head.rfind("\n") + 1] or head
    lines = head.split("\n", EDGE_LINES)
    if len(lines) > EDGE_LINES:
        head = head[: len(head) - len(lines[-1])]
    n_rest = len(text) - len(head)
    tail = text[-min(EDGE_CHARS, n_rest) :] if n_rest else ""
    if len(tail) < n_rest:  # begins within a line
        tail = tail[tail.find("\n") + 1 :]
    last = tail.rsplit("\n", EDGE_LINES)
    if len(last) > EDGE_LINES:
        tail = tail[len(last[0]) + 1 :]
    return head, text[len(head) : len(text) - len(tail)], tail


class DateFreezer:
    """Keeps the dates of a system prompt as they were in its first request.

    It stores both ends of a limited number of prompts. When it is full, the tenant with most
    prompts loses its least recently used one. Several threads may call it.
    """

    def __init__(self) -> None:
        # By tenant and hash of the prompt without dates: its ends as first seen, and when.
        self._first: OrderedDict[tuple[str, bytes], tuple[str, str, float]] = OrderedDict()

    def freeze(self, text: str, tenant: str, now: float, hours: float) -> str:
        """Return the system prompt with its dated lines as first seen.

        `now` is the current time in seconds of a monotonic clock. After `hours` the current dates
        replace the stored ones.
        """
        head, middle, tail = edges(text)
        undated = _undated(head), _undated(tail)
        if undated == (head, tail):
            return text
        key = tenant, _hash(undated[0], middle, undated[1])
        # Other threads may change the prompts between any two of these steps.
        first_head, first_tail, since = self._first.pop(key, (head, tail, now))
        if now - since >= hours * 3600:
            first_head, first_tail, since = head, tail, now
        self._first[key] = first_head, first_tail, since
        while len(self._first) > _MAX_PROMPTS:
            surplus = first_of_largest(self._first, lambda stored: stored[0])
            if surplus is None:
                break
            self._first.pop(surplus, None)
        return first_head + middle + first_tail


def _hash(*texts: str) -> bytes:
    """The hash of several texts."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _undated(text: str) -> str:
    """Remove digits and names of days and months from the dated lines of a text."""
    lines = text.split("\n")
    return "\n".join(_NAMED.sub("\0", line) if is_dated(line) else line for line in lines)


def system_texts(body: Mapping[str, Any], dialect: str) -> Iterator[tuple[Path, str]]:
    """The texts of a request's system prompt, with their paths."""
    if dialect == "messages":
        yield from _texts(body.get("system"), ("system",))
        return
    if dialect == "responses":
        yield from _texts(body.get("instructions"), ("instructions",))
    key = "input" if dialect == "responses" else "messages"
    items = body.get(key)
    for at, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, Mapping) or item.get("role") not in _SYSTEM:
            return
        yield from _texts(item.get("content"), (key, at, "content"))


def with_texts(body: bytes, texts: Mapping[Path, str]) -> bytes:
    """Replace the texts at these paths of a body."""
    return replaced(body, {path: _encoded(text) for path, text in texts.items()})


def _encoded(text: str) -> str:
    pieces = (text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS))
    return '"' + "".join(json.dumps(piece)[1:-1] for piece in pieces) + '"'


def with_sorted_tools(body: bytes, tools: object) -> bytes:
    """Sort the list `tools` of a body by name; `tools` is the parsed list."""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return body
    order = sorted(range(len(tools)), key=lambda at: (_tool_name(tools[at]), at))
    return body if order == list(range(len(tools))) else reorder_elements(body, "tools", order)


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
