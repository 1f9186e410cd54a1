"""Cuts long strings out of large JSON texts, so that parsing takes small steps.

A parser holds the interpreter's lock until it has read its complete text. Without its long strings
a text is small. Each long string is then decoded in pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.request.json_parsing import escaped_positions, json_text, refuse_body

# Parsing a text of more bytes takes milliseconds.
LARGE_BYTES = 1024 * 1024
# Strings of more bytes are cut out.
_LONG_BYTES = 1024
# A string of more bytes is truncated to its two ends, each of half this length, because building
# the string takes too long in one step. No model has a context of that length.
HUGE_BYTES = 8 * 1024 * 1024
# Bytes that are searched or decoded in one step.
_PIECE_BYTES = 256 * 1024
_QUOTE, _BACKSLASH = b'"'[0], b"\\"[0]
# Bytes of an escape such as \u0041, and of one such as \n.
_ESCAPE_BYTES, _SHORT_ESCAPE_BYTES = 6, 2
# Bytes before a position in which the last complete character or escape is searched.
_LOOK_BACK = 64
# Replaces a string that was cut out. The number differs in every process. A text that contains a
# marker itself is parsed uncut.
_MARKER = f"evoke-cut-{hash('evoke-cut') & (2**64 - 1):016x}-"
_NUMBER = re.compile("[0-9a-f]{8}")
_MARKERS = re.compile(_MARKER.encode() + rb"([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class CutText:
    """A JSON text whose long strings are cut out.

    Attributes:
        text: the complete text.
        rest: the text with a marker instead of each long string.
        strings: ranges of the strings' contents in `text`.
    """

    text: bytes
    rest: bytes
    strings: Sequence[tuple[int, int]] = ()

    def fill(self, parsed: Any) -> Any:
        """Put the long strings into the value that was parsed from `rest`, and return it.

        A string of more than HUGE_BYTES becomes a TruncatedString. Raises RequestError when a
        string has invalid content, MarkerInText when the markers are ambiguous.
        """
        return _filled(parsed, self.text, self.strings) if self.strings else parsed

    def restore(self, edited: bytes) -> bytes:
        """Put the original bytes of the long strings into an edited `rest`."""
        parts: list[bytes] = []
        at = 0
        for marker in _MARKERS.finditer(edited):
            start, end = self.strings[int(marker[1], 16)]
            parts.append(edited[at : marker.start()])
            for piece in range(start, end, _PIECE_BYTES):
                parts.append(self.text[piece : min(end, piece + _PIECE_BYTES)])
            at = marker.end()
        parts.append(edited[at:])
        # `bytes.join` releases the interpreter's lock while it copies only if all parts are bytes;
        # a single memoryview among them prevents that.
        restored = b"".join(parts)
        while parts:  # to free all at once holds the lock, too
            parts.pop()
        return restored


def cut_long_strings(text: bytes) -> CutText:
    """Cut the long strings out of a text; a text that is not large is not cut."""
    if len(text) <= LARGE_BYTES:
        return CutText(text, text)
    strings = _long_strings(text)
    if not strings:
        return CutText(text, text)
    parts: list[bytes] = []
    at = 0
    for number, (start, end) in enumerate(strings):
        parts += [text[at:start], f"{_MARKER}{number:08x}".encode()]
        at = end
    rest = b"".join([*parts, text[at:]])
    if rest.count(_MARKER.encode()) != len(strings):
        return CutText(text, text)
    return CutText(text, rest, strings)


class MarkerInText(Exception):
    """The text contains a marker itself, so it must be parsed uncut."""


class TruncatedString(str):
    """The two ends of a huge string; a check must not treat it as the complete string."""


def _long_strings(text: bytes) -> list[tuple[int, int]]:
    """Start and end of the content of each long string."""
    strings_at: list[tuple[int, int]] = []
    last, inside, escaped = -1, False, False
    data = np.frombuffer(text, np.uint8)
    for start in range(0, len(data), _PIECE_BYTES):
        at, escaped = _quotes(data[start : start + _PIECE_BYTES], escaped)
        if not len(at):
            continue
        at = np.concatenate(([last], at + start))
        long = np.diff(at) > _LONG_BYTES
        # Whether the text between two quotes is a string.
        strings = (np.arange(len(long)) % 2 == 0) == inside
        strings_at += [(int(at[i]) + 1, int(at[i + 1])) for i in np.flatnonzero(long & strings)]
        last = int(at[-1])
        inside ^= bool((len(at) - 1) % 2)
    return strings_at


def _quotes(piece: npt.NDArray[np.uint8], escaped: bool) -> tuple[npt.NDArray[Any], bool]:
    """Positions of unescaped quotes, and whether the byte after the piece is escaped.

    `escaped`: the first byte follows an unpaired backslash.
    """
    quotes = np.flatnonzero(piece == _QUOTE)
    positions, escapes_next = escaped_positions(piece, escaped)
    if len(positions):
        quotes = np.setdiff1d(quotes, positions, assume_unique=True)
    return quotes, escapes_next


def _filled(parsed: Any, text: bytes, strings: Sequence[tuple[int, int]]) -> Any:
    """Replace the markers in a parsed text by their strings."""
    unused = set(range(len(strings)))

    def value(mark: str) -> str:
        number = mark[len(_MARKER) :]
        index = int(number, 16) if _NUMBER.fullmatch(number) else -1
        if index not in unused:
            raise MarkerInText
        unused.remove(index)
        return _string(text, *strings[index])

    top = [parsed]
    remaining: list[Any] = [top]
    while remaining:
        container = remaining.pop()
        if isinstance(container, dict):
            if any(key.startswith(_MARKER) for key in container):
                items = list(container.items())
                container.clear()
                for key, item in items:
                    container[value(key) if key.startswith(_MARKER) else key] = item
            pairs: Iterator[tuple[Any, Any]] = iter(container.items())
        else:
            pairs = iter(enumerate(container))
        for key, item in pairs:
            if isinstance(item, str):
                if item.startswith(_MARKER):
                    container[key] = value(item)
            elif isinstance(item, dict | list):
                remaining.append(item)
    return top[0]


def _string(text: bytes, start: int, end: int) -> str:
    """Decode a string in pieces; a huge one is truncated to its two ends."""
    huge = end - start > HUGE_BYTES
    pieces: list[str] = []
    at = start
    while at < end:
        stop = end if end - at <= _PIECE_BYTES else _boundary(text, at, at + _PIECE_BYTES)
        piece = _piece(text[at:stop])
        if not huge or at - start < HUGE_BYTES // 2 or end - stop < HUGE_BYTES // 2:
            pieces.append(piece)
        at = stop
    return TruncatedString("".join(pieces)) if huge else "".join(pieces)


def _piece(content: bytes) -> str:
    try:
        decoded: str = json.loads(f'"{json_text(content)}"')
    except ValueError as error:
        refuse_body(str(error))
    return decoded


def _boundary(text: bytes, start: int, at: int) -> int:
    """The last position up to `at` that divides no character or escape of a string's content."""
    begin = max(start, at - _LOOK_BACK)
    before = text[start:begin]
    # An odd number of backslashes escapes the byte after them.
    position = begin + (len(before) - len(before.rstrip(b"\\"))) % 2
    boundary = position
    while position < at:
        byte = text[position]
        if byte == _BACKSLASH:
            position += _escape_bytes(text, position)
        else:
            position += 1
        while position < len(text) and text[position] & 0xC0 == 0x80:
            position += 1
        if position <= at:
            boundary = position
    return boundary if boundary > start else at


def _escape_bytes(text: bytes, at: int) -> int:
    """Length of the escape sequence at a position; a surrogate pair counts as one."""
    if text[at + 1 : at + 2] != b"u":
        return _SHORT_ESCAPE_BYTES
    high = text[at + 2 : at + 4].lower() in (b"d8", b"d9", b"da", b"db")
    behind = text[at + 6 : at + 10].lower()
    pair = high and behind in (b"\\udc", b"\\udd", b"\\ude", b"\\udf")
    return 2 * _ESCAPE_BYTES if pair else _ESCAPE_BYTES
