"""Puts the books of a turn into the `usage` of its reply; every other byte stays as it was.

Only for a client that asked: books and usage stand in one JSON document, in every dialect the last
event of a stream that has usage, or the whole answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from evoke_proxy.core.reply.observer import MAX_PARSED_BYTES, KeyIndex
from evoke_proxy.core.request.json_edit import edit_nested
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.errors import RequestError

# Of chat and messages, and of whole responses; then of the event `response.completed`.
_USAGES = (("usage",), ("response", "usage"))
# A longer line carries no usage.
_MAX_LINE_BYTES = 32 * 1024 * 1024


def with_accounting(document: bytes, more: Mapping[str, Any]) -> bytes:
    """A JSON document with `evoke`, the books and `more`, in its `usage`; as it was when it lacks
    books or usage."""
    if b'"usage"' not in document or b'"evoke"' not in document:
        return document
    if len(document) > MAX_PARSED_BYTES:
        return with_accounting_in_tail(document, more)
    try:
        value = json.loads(document)
    except (ValueError, RecursionError):
        return document
    books = TokenAccounting.parse(value.get("timings")) if isinstance(value, dict) else None
    path = next((path for path in _USAGES if isinstance(_at(value, path), dict)), None)
    if books is None or path is None:
        return document
    try:
        return edit_nested(document, path, {"evoke": _written(books, more)})
    except RequestError:
        return document


def with_accounting_in_tail(tail: bytes, more: Mapping[str, Any]) -> bytes:
    """As `with_accounting`, of a large document of which this is the end: it is not parsed."""
    keys = KeyIndex(tail)
    timings, usage = keys.last_object("timings"), keys.last_object("usage")
    books = (
        TokenAccounting.parse({"evoke": timings[1].get("evoke")}) if timings is not None else None
    )
    if books is None or usage is None:
        return tail
    at = usage[0] + 1
    comma = b"," if usage[1] else b""
    return b'%b"evoke":%b%b%b' % (tail[:at], _written(books, more), comma, tail[at:])


class UsageEditor:
    """Edits an event stream cut anywhere into pieces; each waits only for the end of a line.

    `more` is added to the books.
    """

    def __init__(self, more: Mapping[str, Any]) -> None:
        self._more = more
        self._line = bytearray()
        self._too_long = False

    def feed(self, data: bytes) -> bytes:
        """What can go to the client now."""
        *ended, rest = data.split(b"\n")
        out = bytearray()
        for piece in ended:
            self._line += piece + b"\n"
            out += self._take()
            self._too_long = False
        self._line += rest
        if self._too_long or len(self._line) > _MAX_LINE_BYTES:
            self._too_long = True
            out += self._take()
        return bytes(out)

    def close(self) -> bytes:
        """What was left waiting for the end of a line."""
        return self._take()

    def _take(self) -> bytes:
        line = bytes(self._line)
        self._line.clear()
        if self._too_long or not line.startswith(b"data:"):
            return line
        return line[:5] + with_accounting(line[5:], self._more)


def _written(books: TokenAccounting, more: Mapping[str, Any]) -> bytes:
    return json.dumps(_shown(books) | dict(more), separators=(",", ":")).encode()


def _shown(books: TokenAccounting) -> dict[str, int | None]:
    return {
        "decoded": books.decoded,
        "recovered": books.recovered,
        "resident_before": books.resident_before,
        "omitted": books.omitted,
        "resident_peak": books.n_resident_peak,
        "budget": books.budget or None,
    }


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
