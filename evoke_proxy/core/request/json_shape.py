"""Measures the structure of a JSON text without parsing it: depth, keys, values, long numbers.

The text is read in pieces of a fixed size with numpy, so time and memory stay linear and small, and
other threads run between two steps: numpy does not hold the interpreter's lock while it works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.config import LimitsConfig
from evoke_proxy.errors import RequestError

_PIECE_BYTES = 128 * 1024
_QUOTE, _BACKSLASH, _COLON, _COMMA = b'"'[0], b"\\"[0], b":"[0], b","[0]
_BLANKS = b" \t\r\n"
# What each byte is: 0 text, else the number of its class.
_IS_QUOTE, _IS_OPENING, _IS_CLOSING, _IS_COLON, _IS_COMMA = 1, 2, 3, 4, 5
_CLASSES = np.zeros(256, np.uint8)
_CLASSES[_QUOTE] = _IS_QUOTE
_CLASSES[list(b"{[")] = _IS_OPENING
_CLASSES[list(b"}]")] = _IS_CLOSING
_CLASSES[_COLON] = _IS_COLON
_CLASSES[_COMMA] = _IS_COMMA
_STEPS = np.zeros(6, np.int32)
_STEPS[_IS_OPENING], _STEPS[_IS_CLOSING] = 1, -1

_Bytes = npt.NDArray[np.uint8]
_Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """The structure of a JSON text.

    Attributes:
        depth: Deepest nesting of objects and lists.
        keys: Most keys of one object.
        values: Objects, lists and keys in total.
        elements: Commas in total, most of which separate list elements.
    """

    depth: int = 0
    keys: int = 0
    values: int = 0
    elements: int = 0


def measure(body: bytes, limits: LimitsConfig) -> Shape:
    """The structure of a JSON text; RequestError as soon as it exceeds a limit.

    A text that is not JSON is measured as far as a parser could read it, and not refused.
    """
    scan = Scan(limits)
    scan.take(body)
    return scan.shape


class Scan:
    """Measures a JSON text of which the parts come one after the other."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self.deepest = self.most_keys = self.values = self.elements = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False  # whether the next byte follows an unpaired backslash
        self._number_chars = 0  # of a number that the piece before has n_chars
        # Members so far of the object that is open at each depth.
        self._keys = np.zeros(limits.json_depth + 1, np.int64)

    @property
    def shape(self) -> Shape:
        """The structure of what was taken so far."""
        return Shape(self.deepest, self.most_keys, self.values, self.elements)

    def take(self, part: bytes) -> None:
        """Measure the next part; RequestError as soon as the text exceeds a limit."""
        data = np.frombuffer(part, np.uint8)
        for start in range(0, len(data), _PIECE_BYTES):
            self._take(data[start : start + _PIECE_BYTES])

    def _take(self, piece: _Bytes) -> None:
        classes = _CLASSES.take(piece)
        self._clear_escaped_quotes(piece, classes)
        at = np.flatnonzero(classes != 0)  # faster than on numbers
        kinds = classes[at]
        inside = np.logical_xor.accumulate(kinds == _IS_QUOTE)
        if self._in_string:
            inside = ~inside
        # A quote that opens a string is inside by this count, one that closes it is not.
        self._check_numbers(piece, at, inside)
        if len(at):
            self._in_string = bool(inside[-1])
        kinds = kinds[~inside]
        kinds = kinds[kinds != _IS_QUOTE]
        if len(kinds):
            self._count(kinds)

    def _clear_escaped_quotes(self, piece: _Bytes, classes: _Bytes) -> None:
        """Make quotes that follow an odd number of backslashes text."""
        if self._escaped:
            self._escaped = False
            first_is_escaped = True
        else:
            first_is_escaped = False
        slashes = np.flatnonzero(piece == _BACKSLASH)
        if first_is_escaped:
            if piece[0] == _BACKSLASH:
                slashes = slashes[1:]
            classes[0] = 0
        if not len(slashes):
            return
        separate = np.diff(slashes) != 1
        starts = slashes[np.concatenate(([True], separate))]
        ends = slashes[np.concatenate((separate, [True]))]
        escaped = ends[(ends - starts) % 2 == 0] + 1
        if len(escaped) and escaped[-1] == len(piece):
            self._escaped = True
            escaped = escaped[:-1]
        classes[escaped] = 0

    def _check_numbers(self, piece: _Bytes, at: _Numbers, inside: npt.NDArray[np.bool_]) -> None:
        """Refuse a long run of text outside strings: only a number can be long."""
        most = self._limits.json_number_chars
        first = int(at[0]) if len(at) else len(piece)
        if not self._in_string:
            n_chars = _unblanked(piece[:first])
            if self._number_chars + n_chars > most:
                self._refuse_number()
        gaps = np.diff(at, append=len(piece)) > most
        for index in np.flatnonzero(gaps & ~inside).tolist():
            end = int(at[index + 1]) if index + 1 < len(at) else len(piece)
            if _unblanked(piece[int(at[index]) + 1 : end]) > most:
                self._refuse_number()
        if not len(at):
            self._number_chars += 0 if self._in_string else _unblanked(piece)
        else:
            self._number_chars = 0 if inside[-1] else _unblanked(piece[int(at[-1]) + 1 :])

    def _count(self, kinds: _Bytes) -> None:
        depths = np.cumsum(_STEPS[kinds]) + self._depth
        self._depth = int(depths[-1])
        self.deepest = max(self.deepest, int(depths.max()))
        if self.deepest > self._limits.json_depth:
            _refuse("is nested deeper", "limits.json_depth", self._limits.json_depth)
        opening, colon = kinds == _IS_OPENING, kinds == _IS_COLON
        self.values += int(np.count_nonzero(opening)) + int(np.count_nonzero(colon))
        if self.values > self._limits.json_values:
            _refuse(
                "has more objects, lists and members",
                "limits.json_values",
                self._limits.json_values,
            )
        self.elements += int(np.count_nonzero(kinds == _IS_COMMA))
        if self.elements > self._limits.json_elements:
            _refuse("has more elements", "limits.json_elements", self._limits.json_elements)
        self._count_keys(depths, opening, colon)

    def _count_keys(
        self, depths: _Numbers, opening: npt.NDArray[np.bool_], colon: npt.NDArray[np.bool_]
    ) -> None:
        """Count the members of each object: the colons at its depth up to the next opening there.

        Not JSON, but measured all the same: what closes more than was opened is at depth 0.
        """
        wanted = opening | colon
        depths = np.clip(depths[wanted], 0, None).astype(np.int16)
        opening = opening[wanted]
        if not len(depths):
            return
        order = np.argsort(depths, kind="stable")
        depths, opening = depths[order], opening[order]
        another = np.concatenate(([True], depths[1:] != depths[:-1]))
        begins = np.flatnonzero(another | opening)
        # The opening itself is the first of its segment, but for what goes on from before.
        counts = np.diff(begins, append=len(depths)) - opening[begins]
        continued = ~opening[begins]
        counts[continued] += self._keys[depths[begins[continued]]]
        self.most_keys = max(self.most_keys, int(counts.max()))
        if self.most_keys > self._limits.json_keys:
            _refuse("has an object with more keys", "limits.json_keys", self._limits.json_keys)
        last = np.concatenate((depths[begins][1:] != depths[begins][:-1], [True]))
        self._keys[depths[begins][last]] = counts[last]

    def _refuse_number(self) -> None:
        _refuse(
            "has a number with more characters",
            "limits.json_number_chars",
            self._limits.json_number_chars,
        )


def _unblanked(text: _Bytes) -> int:
    """Characters of a text without the white space at its ends."""
    return len(text.tobytes().strip(_BLANKS))


def _refuse(what: str, setting: str, limit: int) -> None:
    raise RequestError(
        f"the request body {what} than {setting} allows ({limit})", "request_too_complex"
    )
