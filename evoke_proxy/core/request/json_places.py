"""Where the values of a JSON object are in its text, as the decoder itself reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from evoke_proxy.errors import RequestError

MESSAGE_LISTS = ("messages", "input")
Path = tuple[str | int, ...]
_SPACE = " \t\n\r"
# Numbers of more characters are read as floats: the interpreter refuses long whole ones.
_WHOLE_CHARS = 20
# Of a longer text, objects and lists are read value by value: the decoder holds the interpreter's
# lock until the end of a value.
_DECODED_CHARS = 256 * 1024


@dataclass(frozen=True, slots=True)
class JsonSpan:
    """Where a member of an object, or an element of a list, is in the text: [start, end), its value
    from `value` on; an element has no key."""

    key: str
    start: int
    value: int
    end: int


def json_text(body: bytes) -> str:
    """The text of a body; RequestError when it is not UTF-8."""
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        _refuse("it is not UTF-8")


def parsed_json(body: bytes | str) -> Any:
    """What a JSON text says; RequestError when it is none that the interpreter can read.

    Whole numbers beyond 64 bits become floats, as they do in orjson.
    """
    try:
        return json.loads(body, parse_int=_whole, parse_constant=_no_constant)
    except RecursionError:
        _refuse("it is nested too deep")
    except ValueError as error:
        _refuse(str(error))


def _whole(text: str) -> int | float:
    return int(text) if len(text) <= _WHOLE_CHARS else float(text)


def _refuse(why: str) -> NoReturn:
    raise RequestError(f"the request body is not a JSON object: {why}", "invalid_json")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class Scanner:
    """Finds where members and elements are. Values are decoded only to learn where they end.

    `on_message` is shown the members of each object in the lists `messages` and `input`.
    """

    def __init__(
        self, text: str, on_message: Callable[[list[JsonSpan]], None] | None = None
    ) -> None:
        self._text = text
        self._on_message = on_message
        # float for whole numbers too: int() refuses long ones
        decoder = json.JSONDecoder(parse_int=float, parse_constant=_no_constant)
        self._decode: Callable[[str, int], tuple[Any, int]] = decoder.raw_decode

    def document(self) -> list[JsonSpan]:
        """The top-level members. RequestError when the text is no JSON object."""
        start = 1 if self._text.startswith("\ufeff") else 0
        at = self._space(start)
        if self._at(at) != "{":
            _refuse("it does not begin with {")
        members, end = self._members(at, top=True)
        if self._space(end) != len(self._text):
            _refuse(f"text after its end, at {end}")
        return members

    def elements(self, at: int) -> list[JsonSpan]:
        """The elements of the list that begins at `at`, as members without a key."""
        return self._elements(at, self._value)[0]

    def end(self, at: int) -> int:
        """Where the value that begins at `at` ends."""
        return self._value(at)[1]

    def find(self, path: Sequence[str | int]) -> int | None:
        """Where the value at a path of keys and indexes begins; None when nothing is there."""
        found, at = self.document(), 0
        for depth, step in enumerate(path):
            if depth:
                found = self._inside(at)
            if isinstance(step, str):
                found = [place for place in found if place.key == step][-1:]
            else:
                found = found[step : step + 1]
            if not found:
                return None
            at = found[0].value
        return at

    def find_all(self, paths: Iterable[Path]) -> dict[Path, JsonSpan]:
        """Where the values at these paths are, as `find` would say; each part is read once."""
        found: dict[Path, JsonSpan] = {}
        waiting = [(list(paths), 0, self.document())]
        while waiting:
            given, depth, places = waiting.pop()
            below: dict[str | int, list[Path]] = {}
            for path in given:
                below.setdefault(path[depth], []).append(path)
            named = {place.key: place for place in places}  # of two with a name the last counts
            for step, those in below.items():
                if isinstance(step, str):
                    place = named.get(step)
                else:
                    place = places[step] if step < len(places) else None
                if place is None:
                    continue
                found |= {path: place for path in those if len(path) == depth + 1}
                deeper = [path for path in those if len(path) > depth + 1]
                if deeper:
                    waiting.append((deeper, depth + 1, self._inside(place.value)))
        return found

    def _inside(self, at: int) -> list[JsonSpan]:
        if self._at(at) == "{":
            return self._members(at, top=False)[0]
        return self.elements(at) if self._at(at) == "[" else []

    def _members(self, at: int, top: bool) -> tuple[list[JsonSpan], int]:
        members: list[JsonSpan] = []
        at = self._space(at + 1)
        if self._at(at) == "}":
            return members, at + 1
        while True:
            members.append(self._member(at, top))
            at = self._space(members[-1].end)
            if self._at(at) == "}":
                return members, at + 1
            at = self._space(self._expect(at, ","))

    def _member(self, start: int, top: bool) -> JsonSpan:
        if self._at(start) != '"':
            _refuse(f"a key must be at {start}")
        key, at = self._value(start)
        at = self._space(self._expect(self._space(at), ":"))
        if top and self._on_message and key in MESSAGE_LISTS and self._at(at) == "[":
            return JsonSpan(key, start, at, self._elements(at, self._message)[1])
        return JsonSpan(key, start, at, self._value(at)[1])

    def _elements(
        self, at: int, read: Callable[[int], tuple[Any, int]]
    ) -> tuple[list[JsonSpan], int]:
        elements: list[JsonSpan] = []
        at = self._space(at + 1)
        if self._at(at) == "]":
            return elements, at + 1
        while True:
            elements.append(JsonSpan("", at, at, read(at)[1]))
            at = self._space(elements[-1].end)
            if self._at(at) == "]":
                return elements, at + 1
            at = self._space(self._expect(at, ","))

    def _message(self, at: int) -> tuple[Any, int]:
        if self._at(at) != "{":
            return self._value(at)
        members, end = self._members(at, top=False)
        assert self._on_message is not None
        self._on_message(members)
        return None, end

    def _value(self, at: int) -> tuple[Any, int]:
        try:
            if len(self._text) > _DECODED_CHARS:
                if self._at(at) == "[":
                    return None, self._elements(at, self._value)[1]
                if self._at(at) == "{":
                    return None, self._members(at, top=False)[1]
            return self._decode(self._text, at)
        except RecursionError:
            _refuse("it is nested too deep")
        except ValueError as error:
            _refuse(str(error))

    def _space(self, at: int) -> int:
        text = self._text
        while at < len(text) and text[at] in _SPACE:
            at += 1
        return at

    def _at(self, at: int) -> str:
        return self._text[at : at + 1]

    def _expect(self, at: int, char: str) -> int:
        if self._at(at) != char:
            _refuse(f"{char!r} must be at {at}")
        return at + 1
