"""Watches the bytes of a reply go by and keeps what they say about the turn; changes nothing.

Works on event streams and on whole JSON bodies, of any dialect, cut anywhere into chunks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# A document up to this size is parsed as a whole, in a few milliseconds.
MAX_PARSED_BYTES = 1024 * 1024
# What is read of a larger one.
HEAD_BYTES, TAIL_BYTES = 64 * 1024, 1024 * 1024
# Of a key that stands in a text more than once, the last occurrences that are looked at.
_TRIES = 4
_KEYS = re.compile(
    rb'"(timings|usage|error|stop_reason|stop_type|status|finish_reason)"\s{0,8}:\s{0,8}'
)
_WORD = re.compile(rb'"(\w{1,64})"')


class KeyIndex:
    """Finds the last values of the keys that tell how an answer ended, in one pass over its text.

    The keys are timings, usage, error, stop_reason, stop_type, status and finish_reason.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._values: dict[str, list[int]] = {}
        for found in _KEYS.finditer(data):
            self._values.setdefault(found[1].decode(), []).append(found.end())

    def last_object(self, key: str) -> tuple[int, dict[str, Any]] | None:
        """The last object that is a value of `key`, and where its brace opens; None without one."""
        for at in self._values.get(key, [])[: -_TRIES - 1 : -1]:
            value = _object(self._data[at:]) if self._data.startswith(b"{", at) else None
            if value is not None:
                return at, value
        return None

    def last_word(self, key: str) -> str | None:
        """The last string of word characters that is a value of `key`; None without one."""
        for at in reversed(self._values.get(key, [])):
            found = _WORD.match(self._data, at)
            if found is not None:
                return found[1].decode()
        return None


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value, _ = json.JSONDecoder().raw_decode(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# A stream's chunk is small; only the first of a verbose server is not.
_MAX_EVENT_BYTES = 4 * 1024 * 1024
# Most events are text deltas, not worth parsing. Quotes inside a JSON string are escaped, so this
# can only match keys, or values that are such a word.
_TELLING = re.compile(
    rb'"(?:timings|usage|error|status|stop_reason|stop_type)"|"message_stop"'
    rb'|"finish_reason"\s*:\s*"|"stop"\s*:\s*true'
)


class ReplyObserver:
    """Feed it a reply's bytes; read the attributes at any time.

    `timings` and `usage` are the last such objects seen, `finish` the last reason for stopping,
    `error` the last error object, `done` whether the reply said that it is complete.
    """

    def __init__(self) -> None:
        self.timings: dict[str, Any] | None = None
        self.usage: dict[str, Any] | None = None
        self.finish: str | None = None
        self.error: dict[str, Any] | None = None
        self.done = False
        self._is_body: bool | None = None
        self._line = bytearray()
        self._event = bytearray()
        self._body = bytearray()
        self._skip_line = False
        self._after_return = False
        self._head = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes, decoded of any content-encoding; memory stays bounded."""
        if not data:
            return
        if self._is_body is None:
            start = data.lstrip(b" \t\r\n\xef\xbb\xbf")
            if not start:
                return
            self._is_body = start[:1] in (b"{", b"[")
        if self._is_body:
            self._feed_body(data)
        else:
            self._feed_stream(data)

    def close(self) -> None:
        """No more bytes come: a body is read now, and an event without its blank line too."""
        if self._is_body:
            if self._head:
                self._take_ends(self._head, bytes(self._body))
            else:
                self._take(bytes(self._body))
            self._body.clear()
            return
        if self._line:
            self._end_line()
        self._end_event()

    def _feed_body(self, data: bytes) -> None:
        """Keep a body, of a large one its two ends."""
        self._body += data
        if len(self._body) > MAX_PARSED_BYTES + TAIL_BYTES:
            self._head = self._head or bytes(self._body[:HEAD_BYTES])
            del self._body[:-TAIL_BYTES]

    def _take_ends(self, head: bytes, tail: bytes) -> None:
        """Note what the two ends of a large document say."""
        at_the_end = KeyIndex(tail)
        found = {key: at_the_end.last_object(key) for key in ("timings", "usage", "error")}
        part: dict[str, Any] = {key: it[1] for key, it in found.items() if it is not None}
        for keys in (KeyIndex(head), at_the_end):
            for key in ("stop_reason", "stop_type", "status"):
                part |= {key: word} if (word := keys.last_word(key)) else {}
            if word := keys.last_word("finish_reason"):
                part["choices"] = [{"finish_reason": word}]
        if "status" in part:
            part["object"] = "response"
        self._note(part)

    def _feed_stream(self, data: bytes) -> None:
        second_half = self._after_return and data.startswith(b"\n")  # of a \r\n cut in two
        self._after_return = data.endswith(b"\r")
        lines = data[1:] if second_half else data
        *ended, rest = lines.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for piece in ended:
            self._extend_line(piece)
            self._end_line()
        self._extend_line(rest)

    def _extend_line(self, piece: bytes) -> None:
        self._line += piece
        if len(self._line) > _MAX_EVENT_BYTES:
            self._skip_line = True
        if self._skip_line:
            self._line.clear()

    def _end_line(self) -> None:
        line, skipped = bytes(self._line), self._skip_line
        self._line.clear()
        self._skip_line = False
        if skipped:
            return
        if not line:
            self._end_event()
        elif line.startswith(b"data:"):
            self._event += line[5:] + b"\n"
            if len(self._event) > _MAX_EVENT_BYTES:
                self._event.clear()

    def _end_event(self) -> None:
        event = bytes(self._event).strip()
        self._event.clear()
        if event == b"[DONE]":
            self.done = True
        elif _TELLING.search(event):
            self._take(event)

    def _take(self, text: bytes) -> None:
        if len(text) > MAX_PARSED_BYTES:
            self._take_ends(text[:HEAD_BYTES], text[-TAIL_BYTES:])
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                self._note(part)

    def _note(self, part: Mapping[str, Any]) -> None:
        self._note_objects(part)
        for key in ("response", "message"):
            nested = part.get(key)
            if isinstance(nested, dict):
                self._note_objects(nested)
        self._note_end(part)

    def _note_objects(self, part: Mapping[str, Any]) -> None:
        if isinstance(part.get("timings"), dict):
            self.timings = part["timings"]
        if isinstance(part.get("usage"), dict):
            # messages: the first event has the input side, the last one the output side
            self.usage = (self.usage or {}) | part["usage"]
        if isinstance(part.get("error"), dict):
            self.error = part["error"]

    def _note_end(self, part: Mapping[str, Any]) -> None:
        finish = _finish(part)
        if finish is not None:
            self.finish = finish
        last = part.get("type") in ("message_stop", "response.completed")
        self.done = self.done or last or part.get("stop") is True or bool(self._is_body and finish)


def _finish(part: Mapping[str, Any]) -> str | None:
    choices = part.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    response = part.get("response")
    delta = part.get("delta")
    for holder, key in (
        (first, "finish_reason"),
        (delta, "stop_reason"),
        (part, "stop_reason"),
        (part, "stop_type"),
        (response, "status"),
        (part if part.get("object") == "response" else None, "status"),
    ):
        reason = holder.get(key) if isinstance(holder, Mapping) else None
        if isinstance(reason, str) and reason not in ("none", "in_progress"):
            return reason
    return None
