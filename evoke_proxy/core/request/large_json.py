"""Parses large JSON texts in small steps, between which other threads can run.

A parser holds the interpreter's lock until it has read all of its text. Here the content of long
strings is cut out first: the rest is small, and each long string is read piece by piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.request.json_parsing import json_text, refuse_body

# A text of more bytes takes a parser milliseconds.
LARGE_BYTES = 1024 * 1024
# Strings of more bytes are cut out.
_LONG_BYTES = 1024
# Of a string of more bytes only the two ends, of half as much each, are given: making one string of
# it takes too long in one step, and no model has a context of that length.
HUGE_BYTES = 8 * 1024 * 1024
# What is searched, and what of a string is read, in one step.
_PIECE_BYTES = 256 * 1024
_QUOTE, _BACKSLASH = b'"'[0], b"\\"[0]
# Bytes of an escape like \u0041, and of one like \n.
_ESCAPE_BYTES, _SHORT_ESCAPE_BYTES = 6, 2
_LOOK_BACK = 64
# Stands for a string that was cut out. The number differs in every process; a text that has such a
# mark of its own all the same is read whole.
_MARK = f"evoke-cut-{hash('evoke-cut') & (2**64 - 1):016x}-"
_NUMBER = re.compile("[0-9a-f]{8}")
_MARKS = re.compile(_MARK.encode() + rb"([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class CutText:
    """A JSON text whose long strings are cut out.

    `rest` is the text with a mark in the place of each of them, `places` is where their contents
    are in `text`.
    """

    text: bytes
    rest: bytes
    places: Sequence[tuple[int, int]] = ()

    def fill(self, parsed: Any) -> Any:
        """What the whole text says, given what `rest` says; `parsed` is changed.

        A string of more than HUGE_BYTES is TruncatedString to its two ends.

        RequestError when what was cut out is no content of a string, MarkFound when `rest` cannot
        tell where that belongs.
        """
        return _filled(parsed, self.text, self.places) if self.places else parsed

    def restore(self, edited: bytes) -> bytes:
        """An edited `rest` with the spelling of the strings that were cut out of it."""
        parts: list[bytes] = []
        at = 0
        for found in _MARKS.finditer(edited):
            start, end = self.places[int(found[1], 16)]
            parts.append(edited[at : found.start()])
            for piece in range(start, end, _PIECE_BYTES):
                parts.append(self.text[piece : min(end, piece + _PIECE_BYTES)])
            at = found.end()
        parts.append(edited[at:])
        # `bytes.join` releases the interpreter's lock while it copies, if all of the parts are
        # bytes. With a single memoryview among them it holds the lock for all of the copy.
        return b"".join(parts)


def cut_long_strings(text: bytes) -> CutText:
    """A text without its long strings; one that is not large is left whole."""
    if len(text) <= LARGE_BYTES:
        return CutText(text, text)
    places = _long_strings(text)
    if not places:
        return CutText(text, text)
    parts: list[bytes] = []
    at = 0
    for number, (start, end) in enumerate(places):
        parts += [text[at:start], f"{_MARK}{number:08x}".encode()]
        at = end
    rest = b"".join([*parts, text[at:]])
    if rest.count(_MARK.encode()) != len(places):
        return CutText(text, text)
    return CutText(text, rest, places)


class MarkFound(Exception):
    """The text itself has a mark that stands for cut strings, so it must be read whole."""


class TruncatedString(str):
    """A string of which only the two ends were read; checks must not take it for all of it."""


def _long_strings(text: bytes) -> list[tuple[int, int]]:
    """Where the content of each long string begins and ends."""
    found: list[tuple[int, int]] = []
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
        found += [(int(at[i]) + 1, int(at[i + 1])) for i in np.flatnonzero(long & strings)]
        last = int(at[-1])
        inside ^= bool((len(at) - 1) % 2)
    return found


def _quotes(piece: npt.NDArray[np.uint8], escaped: bool) -> tuple[npt.NDArray[Any], bool]:
    """Where quotes are that no backslash escapes; whether the byte behind the piece is escaped.

    `escaped`: the first byte follows an unpaired backslash.
    """
    quotes = np.flatnonzero(piece == _QUOTE)
    slashes = np.flatnonzero(piece == _BACKSLASH)
    if escaped:
        quotes, slashes = quotes[quotes != 0], slashes[slashes != 0]
    if not len(slashes):
        return quotes, False
    apart = np.diff(slashes) != 1
    starts = slashes[np.concatenate(([True], apart))]
    ends = slashes[np.concatenate((apart, [True]))]
    unpaired = ends[(ends - starts) % 2 == 0] + 1
    behind = bool(len(unpaired)) and int(unpaired[-1]) == len(piece)
    return np.setdiff1d(quotes, unpaired, assume_unique=True), behind


def _filled(found: Any, text: bytes, places: Sequence[tuple[int, int]]) -> Any:
    """A parsed text with its long strings where their marks are."""
    left = set(range(len(places)))

    def value(mark: str) -> str:
        number = mark[len(_MARK) :]
        index = int(number, 16) if _NUMBER.fullmatch(number) else -1
        if index not in left:
            raise MarkFound
        left.remove(index)
        return _string(text, *places[index])

    top = [found]
    waiting: list[Any] = [top]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, dict):
            if any(key.startswith(_MARK) for key in holder):
                items = list(holder.items())
                holder.clear()
                for key, item in items:
                    holder[value(key) if key.startswith(_MARK) else key] = item
            pairs: Iterator[tuple[Any, Any]] = iter(holder.items())
        else:
            pairs = iter(enumerate(holder))
        for key, item in pairs:
            if isinstance(item, str):
                if item.startswith(_MARK):
                    holder[key] = value(item)
            elif isinstance(item, dict | list):
                waiting.append(item)
    return top[0]


def _string(text: bytes, start: int, end: int) -> str:
    """The string with this content, read in pieces; of a huge one its two ends."""
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
        found: str = json.loads(f'"{json_text(content)}"')
    except ValueError as error:
        refuse_body(str(error))
    return found


def _boundary(text: bytes, start: int, at: int) -> int:
    """The last place up to `at` where no character of a string's content is divided."""
    begin = max(start, at - _LOOK_BACK)
    before = text[start:begin]
    # An odd number of backslashes escapes the byte behind them.
    position = begin + (len(before) - len(before.rstrip(b"\\"))) % 2
    found = position
    while position < at:
        byte = text[position]
        if byte == _BACKSLASH:
            position += _escape_bytes(text, position)
        else:
            position += 1
        while position < len(text) and text[position] & 0xC0 == 0x80:
            position += 1
        if position <= at:
            found = position
    return found if found > start else at


def _escape_bytes(text: bytes, at: int) -> int:
    """How long the escape sequence is that begins there; a surrogate pair is one."""
    if text[at + 1 : at + 2] != b"u":
        return _SHORT_ESCAPE_BYTES
    high = text[at + 2 : at + 4].lower() in (b"d8", b"d9", b"da", b"db")
    behind = text[at + 6 : at + 10].lower()
    pair = high and behind in (b"\\udc", b"\\udd", b"\\ude", b"\\udf")
    return 2 * _ESCAPE_BYTES if pair else _ESCAPE_BYTES
