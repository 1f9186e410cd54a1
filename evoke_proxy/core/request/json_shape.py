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
from evoke_proxy.core.request.json_parsing import escaped_positions
from evoke_proxy.errors import RequestError

_PIECE_BYTES = 128 * 1024
_QUOTE, _COLON, _COMMA = b'"'[0], b":"[0], b","[0]
_BLANKS = b" \t\r\n"
# Class of each byte; 0 for text.
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
        depth: Maximum nesting depth of objects and lists.
        keys: Maximum number of keys in one object.
        values: Number of objects, lists and keys.
        elements: Number of commas, most of which separate list elements.
    """

    depth: int = 0
    keys: int = 0
    values: int = 0
    elements: int = 0


def measure(body: bytes, limits: LimitsConfig) -> Shape:
    """Measure the structure of a JSON text; RequestError as soon as it exceeds a limit.

    Text that is not JSON is measured like JSON, and not refused.
    """
    scan = Scan(limits)
    scan.take(body)
    return scan.shape


class Scan:
    """Measures a JSON text that arrives in parts."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self.deepest = self.most_keys = self.values = self.elements = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False  # whether the next byte follows an unpaired backslash
        self._number_chars = 0  # length of an unfinished number at the end of the previous piece
        # Number of members so far of the open object at each depth.
        self._keys = np.zeros(limits.json_depth + 1, np.int64)

    @property
    def shape(self) -> Shape:
        """The structure of the parts so far."""
        return Shape(self.deepest, self.most_keys, self.values, self.elements)

    def take(self, part: bytes) -> None:
        """Measure the next part; RequestError as soon as the text exceeds a limit."""
        data = np.frombuffer(part, np.uint8)
        for start in range(0, len(data), _PIECE_BYTES):
            self._take(data[start : start + _PIECE_BYTES])

    def _take(self, piece: _Bytes) -> None:
        """Measure one piece of a text."""
        classes = _CLASSES.take(piece)
        self._clear_escaped_quotes(piece, classes)
        at = np.flatnonzero(classes != 0)  # comparing first is faster than flatnonzero of numbers
        kinds = classes[at]
        inside = np.logical_xor.accumulate(kinds == _IS_QUOTE)
        if self._in_string:
            inside = ~inside
        # By this count an opening quote is inside its string, and a closing quote is not.
        self._check_numbers(piece, at, inside)
        if len(at):
            self._in_string = bool(inside[-1])
        kinds = kinds[~inside]
        kinds = kinds[kinds != _IS_QUOTE]
        if len(kinds):
            self._count(kinds)

    def _clear_escaped_quotes(self, piece: _Bytes, classes: _Bytes) -> None:
        """Classify escaped bytes as text."""
        positions, self._escaped = escaped_positions(piece, self._escaped)
        classes[positions] = 0

    def _check_numbers(self, piece: _Bytes, at: _Numbers, inside: npt.NDArray[np.bool_]) -> None:
        """Refuse a long run of text outside strings, which can only be a number."""
        limit = self._limits.json_number_chars
        first = int(at[0]) if len(at) else len(piece)
        if not self._in_string:
            n_chars = _n_stripped(piece[:first])
            if self._number_chars + n_chars > limit:
                self._refuse_number()
        gaps = np.diff(at, append=len(piece)) > limit
        for index in np.flatnonzero(gaps & ~inside).tolist():
            end = int(at[index + 1]) if index + 1 < len(at) else len(piece)
            if _n_stripped(piece[int(at[index]) + 1 : end]) > limit:
                self._refuse_number()
        if not len(at):
            self._number_chars += 0 if self._in_string else _n_stripped(piece)
        else:
            self._number_chars = 0 if inside[-1] else _n_stripped(piece[int(at[-1]) + 1 :])

    def _count(self, kinds: _Bytes) -> None:
        """Count brackets, colons and commas outside strings, given their classes in text order."""
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
            _refuse("has more list elements", "limits.json_values", self._limits.json_elements)
        self._count_keys(depths, opening, colon)

    def _count_keys(
        self, depths: _Numbers, opening: npt.NDArray[np.bool_], colon: npt.NDArray[np.bool_]
    ) -> None:
        """Count the members of each object: the colons at its depth up to the next opening there.

        Surplus closing brackets, which are not JSON, stay at depth 0.
        """
        selected = opening | colon
        depths = np.clip(depths[selected], 0, None).astype(np.int16)
        opening = opening[selected]
        if not len(depths):
            return
        order = np.argsort(depths, kind="stable")
        depths, opening = depths[order], opening[order]
        is_new_depth = np.concatenate(([True], depths[1:] != depths[:-1]))
        starts = np.flatnonzero(is_new_depth | opening)
        # A segment starts with its opening, except one that continues from the previous piece.
        counts = np.diff(starts, append=len(depths)) - opening[starts]
        continued = ~opening[starts]
        counts[continued] += self._keys[depths[starts[continued]]]
        self.most_keys = max(self.most_keys, int(counts.max()))
        if self.most_keys > self._limits.json_keys:
            _refuse("has an object with more keys", "limits.json_keys", self._limits.json_keys)
        last = np.concatenate((depths[starts][1:] != depths[starts][:-1], [True]))
        self._keys[depths[starts][last]] = counts[last]

    def _refuse_number(self) -> None:
        _refuse(
            "has a number with more characters",
            "limits.json_number_chars",
            self._limits.json_number_chars,
        )


def _n_stripped(text: _Bytes) -> int:
    """Number of characters of a text without the white space at its ends."""
    return len(text.tobytes().strip(_BLANKS))


def _refuse(what: str, setting: str, limit: int) -> None:
    raise RequestError(
        f"the request body {what} than {setting} allows ({limit})", "request_too_complex"
    )
