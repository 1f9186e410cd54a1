"""Observes the bytes of a reply: its timings, usage, finish reason and error.

Works on event streams and JSON documents of every dialect, cut anywhere into chunks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from evoke_proxy.core.reply.event_stream import EventReader

# Documents up to this size are parsed completely. One of many small values, such as the
# probabilities of tokens, takes up to 11 ms.
MAX_PARSED_BYTES = 256 * 1024
# The bytes at both ends of a larger document that are searched for keys.
HEAD_BYTES, TAIL_BYTES = 64 * 1024, 1024 * 1024
# Number of occurrences of a key that are tried, from the last one backwards.
_MAX_TRIES = 4
_KEYS = re.compile(
    rb'"(timings|usage|error|stop_reason|stop_type|status|finish_reason)"\s{0,8}:\s{0,8}'
)
_WORD = re.compile(rb'"(\w{1,64})"')


class KeyIndex:
    """Finds the last values of the keys that describe the end of an answer, in one pass.

    The keys are timings, usage, error, stop_reason, stop_type, status and finish_reason.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._values: dict[str, list[int]] = {}
        for key in _KEYS.finditer(data):
            self._values.setdefault(key[1].decode(), []).append(key.end())

    def last_object(self, key: str) -> tuple[int, dict[str, Any]] | None:
        """The last object that is a value of `key`, with its offset; None without one."""
        for at in self._values.get(key, [])[: -_MAX_TRIES - 1 : -1]:
            value = _object(self._data[at:]) if self._data.startswith(b"{", at) else None
            if value is not None:
                return at, value
        return None

    def last_word(self, key: str) -> str | None:
        """The last string of word characters that is a value of `key`; None without one."""
        for at in reversed(self._values.get(key, [])):
            word = _WORD.match(self._data, at)
            if word is not None:
                return word[1].decode()
        return None


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value, _ = json.JSONDecoder().raw_decode(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# Events of a stream are small; only the first event of a verbose server is larger.
_MAX_EVENT_BYTES = 4 * 1024 * 1024
# Selects the events that are parsed; most are text deltas without any of these keys. Quotes inside
# a JSON string are escaped, so this matches only keys, or values that equal such a word.
_RELEVANT = re.compile(
    rb'"(?:timings|usage|error|status|stop_reason|stop_type)"|"message_stop"'
    rb'|"finish_reason"\s*:\s*"|"stop"\s*:\s*true'
)


class ReplyObserver:
    """Reads the end of a reply from a copy of its bytes: an event stream, or one JSON document.

    The attributes can be read at any time.

    Attributes:
        timings: The last `timings` object; None while there is none.
        usage: The `usage` objects, merged; None while there is none.
        finish: The last finish reason; None while there is none.
        error: The last `error` object; None while there is none.
        done: Whether the reply has stated that it is complete.
    """

    def __init__(self) -> None:
        self.timings: dict[str, Any] | None = None
        self.usage: dict[str, Any] | None = None
        self.finish: str | None = None
        self.error: dict[str, Any] | None = None
        self.done = False
        # Whether the reply is one document; None before its first byte that is no white space.
        self._is_document: bool | None = None
        self._events = EventReader(_MAX_EVENT_BYTES)
        self._body = bytearray()
        self._head = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes, without content encoding; memory stays bounded."""
        if not data:
            return
        if self._is_document is None:
            start = data.lstrip(b" \t\r\n\xef\xbb\xbf")
            if not start:
                return
            self._is_document = start[:1] in (b"{", b"[")
        if self._is_document:
            self._feed_body(data)
        else:
            self._take_events(self._events.feed(data))

    def close(self) -> None:
        """End the reply; reads the document, or a last event without a blank line after it."""
        if self._is_document:
            if self._head:
                self._take_ends(self._head, bytes(self._body))
            else:
                self._take(bytes(self._body))
            self._body.clear()
        else:
            self._take_events(self._events.close())

    def _feed_body(self, data: bytes) -> None:
        """Keep a document; only the two ends of a large one."""
        self._body += data
        if len(self._body) > MAX_PARSED_BYTES + TAIL_BYTES:
            self._head = self._head or bytes(self._body[:HEAD_BYTES])
            del self._body[:-TAIL_BYTES]

    def _take_ends(self, head: bytes, tail: bytes) -> None:
        """Read the two ends of a large document."""
        tail_keys = KeyIndex(tail)
        objects = {key: tail_keys.last_object(key) for key in ("timings", "usage", "error")}
        part: dict[str, Any] = {key: item[1] for key, item in objects.items() if item is not None}
        for keys in (KeyIndex(head), tail_keys):
            for key in ("stop_reason", "stop_type", "status"):
                part |= {key: word} if (word := keys.last_word(key)) else {}
            if word := keys.last_word("finish_reason"):
                part["choices"] = [{"finish_reason": word}]
        if "status" in part:
            part["object"] = "response"
        self._read(part)

    def _take_events(self, events: Sequence[bytes]) -> None:
        for event in events:
            if event == b"[DONE]":
                self.done = True
            elif _RELEVANT.search(event):
                self._take(event)

    def _take(self, text: bytes) -> None:
        """Read a document or event; only the two ends of a large one. Invalid JSON is ignored."""
        if len(text) > MAX_PARSED_BYTES:
            self._take_ends(text[:HEAD_BYTES], text[-TAIL_BYTES:])
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                self._read(part)

    def _read(self, part: Mapping[str, Any]) -> None:
        self._read_objects(part)
        for key in ("response", "message"):
            nested = part.get(key)
            if isinstance(nested, dict):
                self._read_objects(nested)
        self._read_end(part)

    def _read_objects(self, part: Mapping[str, Any]) -> None:
        if isinstance(part.get("timings"), dict):
            self.timings = part["timings"]
        if isinstance(part.get("usage"), dict):
            # In the messages dialect the first event has the input tokens, the last the output.
            self.usage = (self.usage or {}) | part["usage"]
        if isinstance(part.get("error"), dict):
            self.error = part["error"]

    def _read_end(self, part: Mapping[str, Any]) -> None:
        finish = _finish(part)
        if finish is not None:
            self.finish = finish
        last = part.get("type") in ("message_stop", "response.completed")
        self.done = (
            self.done or last or part.get("stop") is True or bool(self._is_document and finish)
        )


def _finish(part: Mapping[str, Any]) -> str | None:
    """Return the finish reason in a document or event of any dialect; None without one."""
    choices = part.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    response = part.get("response")
    delta = part.get("delta")
    for container, key in (
        (first, "finish_reason"),
        (delta, "stop_reason"),
        (part, "stop_reason"),
        (part, "stop_type"),
        (response, "status"),
        (part if part.get("object") == "response" else None, "status"),
    ):
        reason = container.get(key) if isinstance(container, Mapping) else None
        if isinstance(reason, str) and reason not in ("none", "in_progress"):
            return reason
    return None
