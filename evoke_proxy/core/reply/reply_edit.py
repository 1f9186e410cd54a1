"""Adds the token accounting to the `usage` of replies, and advice to an error message.

No other byte changes.

One JSON document contains both timings and usage: the complete answer, or the last event of a
stream that has a usage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from evoke_proxy.core.reply.event_stream import DATA_FIELD, Line, LineReader
from evoke_proxy.core.reply.observer import KeyIndex
from evoke_proxy.core.request.json_edit import edit_nested
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.errors import RequestError

# The paths of the usage: in most documents, and in the event `response.completed`.
_USAGE_PATHS = (("usage",), ("response", "usage"))
# Longer documents are not parsed, because one of many small values, such as the probabilities of
# tokens, would keep the event loop busy for more than a few milliseconds.
_MAX_PARSED_BYTES = 64 * 1024
# Longer lines are not edited.
_MAX_LINE_BYTES = 32 * 1024 * 1024
# Agents recognise these words and shorten their history, so the message keeps them.
_UPSTREAM_TEXT = "exceeds the available context size"
_LONGER_CONTEXT = (
    ". A chat may be longer than the KV cache: start llama-server with --ctx-logical N, where N is"
    " at most what the model was trained for"
)
_SHORTER_CHAT = (
    ". The model was trained for no longer context: shorten the chat, or begin a new one; only with"
    " RoPE scaling (--rope-scaling of llama-server) can the context be longer"
)


def with_accounting(document: bytes, extra: Mapping[str, Any]) -> bytes:
    """Add the token accounting and `extra` to a JSON document as `usage.evoke`.

    A document without accounting or usage is returned unchanged.
    """
    if b'"usage"' not in document or b'"evoke"' not in document:
        return document
    if len(document) > _MAX_PARSED_BYTES:
        return with_accounting_in_tail(document, extra)
    try:
        value = json.loads(document)
    except (ValueError, RecursionError):
        return document
    accounting = TokenAccounting.parse(value.get("timings")) if isinstance(value, dict) else None
    path = next((path for path in _USAGE_PATHS if isinstance(_at(value, path), dict)), None)
    if accounting is None or path is None:
        return document
    try:
        return edit_nested(document, path, {"evoke": _encoded(accounting, extra)})
    except RequestError:
        return document


def with_accounting_in_tail(tail: bytes, extra: Mapping[str, Any]) -> bytes:
    """Like `with_accounting`, for the end of a large document, which is not parsed."""
    keys = KeyIndex(tail)
    timings, usage = keys.last_object("timings"), keys.last_object("usage")
    fields = {"evoke": timings[1].get("evoke")} if timings is not None else None
    accounting = TokenAccounting.parse(fields)
    if accounting is None or usage is None:
        return tail
    at = usage[0] + 1
    comma = b"," if usage[1] else b""
    return b'%b"evoke":%b%b%b' % (tail[:at], _encoded(accounting, extra), comma, tail[at:])


class UsageEditor:
    """Adds the token accounting to the usage of an event stream, line by line."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self._extra = extra
        self._lines = LineReader(_MAX_LINE_BYTES)

    def feed(self, data: bytes) -> bytes:
        """Add bytes, and return the bytes to send now."""
        return b"".join(map(self._edited, self._lines.feed(data)))

    def close(self) -> bytes:
        """End the stream, and return the last line if it has no line end."""
        return b"".join(map(self._edited, self._lines.close()))

    def _edited(self, line: Line) -> bytes:
        if not line.is_complete or not line.data.startswith(DATA_FIELD):
            return line.data
        return DATA_FIELD + with_accounting(line.data[len(DATA_FIELD) :], self._extra)


def with_context_advice(body: bytes, has_trained_length: bool = False) -> bytes:
    """Add advice to the message of an error reply about a prompt that exceeds the context.

    `has_trained_length` says that the context is all that the model was trained for. The body of
    any other error, or one that is not JSON, is returned unchanged.
    """
    if _UPSTREAM_TEXT.encode() not in body:
        return body
    try:
        value = json.loads(body)
        error = value.get("error") if isinstance(value, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if not isinstance(message, str) or _UPSTREAM_TEXT not in message:
            return body
        advice = _SHORTER_CHAT if has_trained_length else _LONGER_CONTEXT
        edited = json.dumps(message + advice).encode()
        return edit_nested(body, ("error",), {"message": edited})
    except (ValueError, RecursionError, RequestError):
        return body


def _encoded(accounting: TokenAccounting, extra: Mapping[str, Any]) -> bytes:
    return json.dumps(_fields(accounting) | dict(extra), separators=(",", ":")).encode()


def _fields(accounting: TokenAccounting) -> dict[str, int | None]:
    return {
        "decoded": accounting.decoded,
        "recovered": accounting.recovered,
        "resident_before": accounting.resident_before,
        "omitted": accounting.omitted,
        "resident_peak": accounting.n_resident_peak,
        "budget": accounting.budget or None,
    }


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
