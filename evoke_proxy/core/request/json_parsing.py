"""Parses and writes JSON; large texts in steps between which other threads can run.

A parser holds the interpreter's lock until it has read its complete text. A large text is therefore
divided at commas into pieces. Each piece is completed to a valid JSON text, parsed, and added to
the result of the earlier pieces. The caller passes the parser and the serialiser of pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from evoke_proxy.errors import RequestError

# Longer integers are read as floats, because the interpreter refuses them.
_MAX_INTEGER_CHARS = 20
# Texts of more bytes are divided into pieces of about this length.
PIECE_BYTES = 64 * 1024
# Deeper texts are refused; orjson has the same limit.
_MAX_DEPTH = 1024
_BLANKS = b" \t\r\n"
_QUOTE, _BACKSLASH, _COMMA = b'"'[0], b"\\"[0], b","[0]
_OPENING, _OBJECT = b"[{", b"{"[0]
_CLOSER = {b"["[0]: b"]"[0], b"{"[0]: b"}"[0]}
_STRUCTURAL = np.zeros(256, np.bool_)
_STRUCTURAL[list(b'"[]{},')] = True
# Key of the member that a piece continues; random per process, so that no client can use it.
_CONTINUED_KEY = f"evoke-open-{hash('evoke-open') & (2**64 - 1):016x}"
_BOM = b"\xef\xbb\xbf"


def count_byte(body: bytes, byte: bytes) -> int:
    """Return how often a single byte occurs; four times as fast as `bytes.count` in JSON text."""
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == byte[0]))


def json_text(body: bytes) -> str:
    """Decode a body; RequestError when it is not UTF-8."""
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        refuse_body("it is not UTF-8")


def parsed_json(body: bytes | str) -> Any:
    """Parse JSON text; RequestError when it is invalid or nested too deep.

    Integers beyond 64 bits become floats, as in orjson.
    """
    try:
        return json.loads(body, parse_int=_integer_or_float, parse_constant=reject_constant)
    except RecursionError:
        refuse_body("it is nested too deep")
    except ValueError as error:
        refuse_body(str(error))


def _integer_or_float(text: str) -> int | float:
    return int(text) if len(text) <= _MAX_INTEGER_CHARS else float(text)


def refuse_body(why: str) -> NoReturn:
    """Raise RequestError for a body that is not a JSON object; `why` is the cause."""
    raise RequestError(f"the request body is not a JSON object: {why}", "invalid_json")


def reject_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and Infinity, which Python's parser accepts."""
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True)
class _Cut:
    """A comma that divides the text, and the starts of the objects and lists around it."""

    at: int
    openers: tuple[int, ...]


def parse_in_pieces(text: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Parse JSON text in pieces; RequestError when it is invalid.

    `parse`, such as orjson.loads, parses a piece and raises ValueError. Unlike `parse` alone, this
    accepts a byte order mark and unpaired surrogates.
    """
    text = _without_blank_pieces(text.removeprefix(_BOM))
    if len(text) <= PIECE_BYTES:
        return _parse(text, parse)
    whole: Any = None
    spine: list[Any] = []
    before = _Cut(-1, ())
    for cut in (*_cuts(text), _Cut(len(text), ())):
        parsed = _parse(_completed(text, before, cut), parse)
        if before.at < 0:
            whole = parsed
        else:
            _extend(spine, parsed)
        spine = _open_containers(text, whole, spine, before.openers, cut.openers)
        before = cut
    return whole


def write_in_pieces(value: Any, write: Callable[[Any], bytes]) -> bytes:
    """Encode a value in small steps with `write`, such as orjson.dumps."""
    return b"".join(_written(value, write))


def _written(value: Any, write: Callable[[Any], bytes]) -> Iterator[bytes]:
    """Yield the JSON text of a value in parts: brackets, keys and single values."""
    if isinstance(value, dict) and value:
        comma = b"{"
        for key, item in value.items():
            yield comma + write(key) + b":"
            yield from _written(item, write)
            comma = b","
        yield b"}"
    elif isinstance(value, list) and value:
        comma = b"["
        for item in value:
            yield comma
            yield from _written(item, write)
            comma = b","
        yield b"]"
    else:
        yield write(value)


def _parse(text: bytes, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(text)
    except ValueError:
        return parsed_json(json_text(text))


def _without_blank_pieces(text: bytes) -> bytes:
    """Replace each piece that is only white space between values by one space."""
    pieces = [text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES)]
    if all(piece[:1] not in _BLANKS or piece.strip(_BLANKS) for piece in pieces):
        return text
    inside = escaped = False
    for index, piece in enumerate(pieces):
        if not inside and not piece.strip(_BLANKS):
            pieces[index] = b"" if index and pieces[index - 1] in (b"", b" ") else b" "
        _, inside, escaped = _outside(np.frombuffer(piece, np.uint8), inside, escaped)
    return b"".join(pieces)


def _cuts(text: bytes) -> Iterator[_Cut]:
    """The last comma outside strings of each piece."""
    data = np.frombuffer(text, np.uint8)
    inside = escaped = False
    openers: list[int] = []
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        at, inside, escaped = _outside(piece, inside, escaped)
        kinds = piece[at]
        commas = np.flatnonzero(kinds == _COMMA)
        last = int(commas[-1]) if len(commas) else -1
        brackets = kinds != _COMMA
        if last >= 0:
            _follow(text, openers, (at[:last][brackets[:last]] + start).tolist())
            cut = _Cut(start + int(at[last]), tuple(openers))
            _check(text, cut)
            if cut.at + 1 < len(text):
                yield cut
        _follow(text, openers, (at[last + 1 :][brackets[last + 1 :]] + start).tolist())


def escaped_positions(
    piece: npt.NDArray[np.uint8], escaped: bool
) -> tuple[npt.NDArray[np.int64], bool]:
    """Positions of the bytes that an unpaired backslash precedes.

    `escaped` says whether the first byte of the piece is one of them. Also returns whether the byte
    after the piece is one.
    """
    slashes = np.flatnonzero(piece == _BACKSLASH)
    if escaped:
        slashes = slashes[slashes != 0]
    if not len(slashes):
        return np.zeros(int(escaped), np.int64), False
    separate = np.diff(slashes) != 1
    starts = slashes[np.concatenate(([True], separate))]
    ends = slashes[np.concatenate((separate, [True]))]
    positions = ends[(ends - starts) % 2 == 0] + 1
    escapes_next = bool(len(positions)) and int(positions[-1]) == len(piece)
    if escapes_next:
        positions = positions[:-1]
    return (np.append(positions, 0) if escaped else positions), escapes_next


def _outside(
    piece: npt.NDArray[np.uint8], inside: bool, escaped: bool
) -> tuple[npt.NDArray[Any], bool, bool]:
    """Positions of brackets and commas outside strings.

    Also returns whether the byte after the piece is inside a string, and whether it is escaped.
    """
    structural = _STRUCTURAL[piece]
    positions, escaped = escaped_positions(piece, escaped)
    structural[positions] = False
    at = np.flatnonzero(structural)
    quotes = piece[at] == _QUOTE
    within = np.logical_xor.accumulate(quotes) ^ inside
    inside = bool(within[-1]) if len(within) else inside
    return at[~within & ~quotes], inside, escaped


def _follow(text: bytes, openers: list[int], brackets: list[int]) -> None:
    """Update `openers`, the starts of open objects and lists, with the next brackets."""
    for at in brackets:
        if text[at] in _OPENING:
            openers.append(at)
            if len(openers) > _MAX_DEPTH:
                refuse_body("it is nested too deep")
        elif not openers or _CLOSER[text[openers.pop()]] != text[at]:
            refuse_body(f"the bracket at {at} closes nothing")


def _check(text: bytes, cut: _Cut) -> None:
    """Refuse a comma that lacks a value on a side, because parsing the pieces accepts it."""
    end = _visible_end(text, cut.at)
    before = text[end - 1 : end]
    after = text[cut.at + 1 : cut.at + 1 + 2 * PIECE_BYTES].lstrip(_BLANKS)[:1]
    if not cut.openers or before in b"[{," or after in b"]},":
        refuse_body(f"a value is missing beside the comma at {cut.at}")


def _visible_end(text: bytes, at: int) -> int:
    """End of the last byte before `at` that is not white space."""
    start = max(0, at - 2 * PIECE_BYTES)
    return start + len(text[start:at].rstrip(_BLANKS))


def _completed(text: bytes, before: _Cut, cut: _Cut) -> bytes:
    """Complete the text between two cuts to valid JSON with brackets around it."""
    opening = []
    for depth, at in enumerate(before.openers):
        opening.append(text[at : at + 1])
        if text[at] == _OBJECT and depth + 1 < len(before.openers):
            opening.append(f'"{_CONTINUED_KEY}":'.encode())
    closing = bytes(_CLOSER[text[at]] for at in reversed(cut.openers))
    return b"".join([*opening, text[before.at + 1 : cut.at], closing])


def _extend(spine: list[Any], parsed: Any) -> None:
    """Add the content of a piece to the objects and lists that are open where it begins."""
    for depth, container in enumerate(spine):
        child = None
        if isinstance(container, list):
            if depth + 1 < len(spine):
                child = parsed[0]
                del parsed[0]
            container.extend(parsed)
        else:
            child = parsed.pop(_CONTINUED_KEY, None)
            container.update(parsed)
        parsed = child


def _open_containers(
    text: bytes,
    whole: Any,
    spine: list[Any],
    before: tuple[int, ...],
    openers: tuple[int, ...],
) -> list[Any]:
    """The objects and lists that begin at `openers`, given those that begin at `before`."""
    containers: list[Any] = []
    for depth, at in enumerate(openers):
        if depth == 0:
            containers.append(whole)
        elif before[depth : depth + 1] == (at,):
            containers.append(spine[depth])
        elif isinstance(containers[-1], list):
            containers.append(containers[-1][-1])
        else:
            containers.append(containers[-1][_key_before(text, at)])
    return containers


def _key_before(text: bytes, at: int) -> str:
    """The key of the member whose value begins at a position."""
    colon = _visible_end(text, at) - 1
    end = _visible_end(text, colon)
    start = end - 1
    while True:
        start = text.rfind(b'"', 0, start)
        slashes = start
        while slashes and text[slashes - 1] == _BACKSLASH:
            slashes -= 1
        if (start - slashes) % 2 == 0:
            key: str = parsed_json(json_text(text[start:end]))
            return key
