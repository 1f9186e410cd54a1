"""Edits JSON text in place: everything that is not edited keeps its bytes.

Serialising again would change key order, number spelling and escapes, and with them the prompt.
Positions come from the decoder's own scanner, so an edit applies to what a parser reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.request.json_parsing import json_text, refuse_body, reject_constant
from evoke_proxy.core.request.large_json import LARGE_BYTES, cut_long_strings

MESSAGE_LISTS = ("messages", "input")
Path = tuple[str | int, ...]
_SPACE = " \t\n\r"
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


class JsonScanner:
    """Finds where members and elements are. Values are decoded only to learn where they end.

    `on_message` is shown the members of each object in the lists `messages` and `input`.
    """

    def __init__(
        self, text: str, on_message: Callable[[list[JsonSpan]], None] | None = None
    ) -> None:
        self._text = text
        self._on_message = on_message
        # float for whole numbers too: int() refuses long ones
        decoder = json.JSONDecoder(parse_int=float, parse_constant=reject_constant)
        self._decode: Callable[[str, int], tuple[Any, int]] = decoder.raw_decode

    def document(self) -> list[JsonSpan]:
        """The top-level members. RequestError when the text is no JSON object."""
        start = 1 if self._text.startswith("\ufeff") else 0
        at = self._space(start)
        if self._at(at) != "{":
            refuse_body("it does not begin with {")
        members, end = self._members(at, top=True)
        if self._space(end) != len(self._text):
            refuse_body(f"text after its end, at {end}")
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
            refuse_body(f"a key must be at {start}")
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
            refuse_body("it is nested too deep")
        except ValueError as error:
            refuse_body(str(error))

    def _space(self, at: int) -> int:
        text = self._text
        while at < len(text) and text[at] in _SPACE:
            at += 1
        return at

    def _at(self, at: int) -> str:
        return self._text[at : at + 1]

    def _expect(self, at: int, char: str) -> int:
        if self._at(at) != char:
            refuse_body(f"{char!r} must be at {at}")
        return at + 1


_ESCAPED_ASCII = re.compile(r"\\u00[2-7]")
_VISIBLE = re.compile(r"[^ \t\n\r]")
_VISIBLE_BYTE = re.compile(rb"[^ \t\n\r]")


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    text: str


def edit_top_level(
    body: bytes,
    set: Mapping[str, bytes],
    remove: Collection[str],
    message_remove: Collection[str] = (),
    keys: Collection[str] | None = None,
) -> bytes:
    """`body`, a JSON object, with members set and removed, all other bytes as they were.

    `set` maps keys to JSON texts: a key that is there gets its value replaced in place (later
    duplicates go), a new one is put right after the first brace. `message_remove` names members to
    remove from each object in the lists `messages` and `input`. RequestError when `body` is no
    JSON object. `keys` are all of its top level, for a caller who has parsed it: what only adds
    members then need not read a long body.
    """
    if keys is not None and not message_remove and {*set, *remove}.isdisjoint(keys):
        return b"".join(inserted(body, set)) if set else body
    if len(body) > LARGE_BYTES:
        cut = cut_long_strings(body)
        if cut.places:
            return cut.restore(_edited(cut.rest, set, remove, message_remove))
    return _edited(body, set, remove, message_remove)


def _edited(
    body: bytes, set: Mapping[str, bytes], remove: Collection[str], message_remove: Collection[str]
) -> bytes:
    """As `edit_top_level`, by reading all of the body."""
    text = json_text(body)
    edits: list[_Edit] = []

    def unmark(members: list[JsonSpan]) -> None:
        unwanted = {i for i, member in enumerate(members) if member.key in message_remove}
        edits.extend(_member_edits(members, unwanted))

    members = JsonScanner(text, unmark if _may_hold(text, message_remove) else None).document()
    edits += _member_edits(members, _unwanted(members, set, remove))
    edits += _replacements(members, set)
    edits += _insertion(text, members, set, remove)
    return _applied(text, edits).encode() if edits else body


def remove_elements(body: bytes, key: str, indexes: Collection[int]) -> bytes:
    """`body` without these elements of its top-level list `key`; unchanged without such a list.

    RequestError when `body` is no JSON object.
    """
    text = json_text(body)
    members = JsonScanner(text).document()
    found = [member for member in members if member.key == key and text[member.value] == "["]
    if not found or not indexes:
        return body
    elements = JsonScanner(text).elements(found[-1].value)
    return _applied(text, _member_edits(elements, indexes)).encode()


def edit_nested(body: bytes, path: Sequence[str], set: Mapping[str, bytes]) -> bytes:
    """`body`, a JSON object, with members set in the object at `path` inside it.

    Unchanged where `path` leads to no object. RequestError when `body` is no JSON object.
    """
    if not path:
        return edit_top_level(body, set, ())
    text = json_text(body)
    members = JsonScanner(text).document()
    found = [member for member in members if member.key == path[0] and text[member.value] == "{"]
    if not found:
        return body
    start, end = found[-1].value, found[-1].end
    inner = edit_nested(text[start:end].encode(), path[1:], set)
    return text[:start].encode() + inner + text[end:].encode()


def prepend(body: bytes, path: Sequence[str | int], text: str, part: Mapping[str, str]) -> bytes:
    """`body` with a text at the beginning of the value at `path`, keys and indexes from the top.

    Inside the quotes of a string, or of a list as its first element, `part`. Unchanged where there
    is neither. RequestError when `body` is no JSON object.
    """
    decoded = json_text(body)
    at = JsonScanner(decoded).find(path)
    if at is None or decoded[at] not in '["':
        return body
    if decoded[at] == '"':
        added = json.dumps(text)[1:-1]
    else:
        first = _VISIBLE.search(decoded, at + 1)
        filled = first is not None and first[0] != "]"
        added = json.dumps(part) + ("," if filled else "")
    return _applied(decoded, [_Edit(at + 1, at + 1, added)]).encode()


def replaced(body: bytes, values: Mapping[tuple[str | int, ...], str]) -> bytes:
    """`body` with these JSON texts instead of the values at their paths, keys and indexes from the
    top; nothing for a path that leads nowhere. RequestError when `body` is no JSON object."""
    cut = cut_long_strings(body)
    text = json_text(cut.rest)
    places = JsonScanner(text).find_all(values)
    edits = [_Edit(place.value, place.end, values[path]) for path, place in places.items()]
    return cut.restore(_applied(text, edits).encode())


def reordered(body: bytes, key: str, order: Sequence[int]) -> bytes:
    """`body` with the elements of its top-level list `key` in this order of their indexes, each as
    it is spelled. RequestError when `body` is no JSON object."""
    cut = cut_long_strings(body)
    text = json_text(cut.rest)
    at = JsonScanner(text).find((key,))
    places = JsonScanner(text).elements(at) if at is not None and text[at] == "[" else []
    if len(places) != len(order):
        return body
    spelled = [text[place.start : place.end] for place in places]
    moved = [
        _Edit(place.start, place.end, spelled[index])
        for place, index in zip(places, order, strict=True)
    ]
    return cut.restore(_applied(text, moved).encode())


def _may_hold(text: str, keys: Collection[str]) -> bool:
    """Whether one of these ASCII keys may be a key somewhere, spelled out or with escapes."""
    return any(f'"{key}"' in text for key in keys) or _ESCAPED_ASCII.search(text) is not None


def inserted(body: bytes, set: Mapping[str, bytes]) -> tuple[bytes | memoryview, ...]:
    """A JSON object that has none of these members, with them, in parts without a copy of it."""
    if not set:
        return (body,)
    at = body.index(b"{") + 1
    first = _VISIBLE_BYTE.search(body, at)
    more = b"" if first is not None and first[0] == b"}" else b","
    added = b",".join(json.dumps(key).encode() + b":" + value for key, value in set.items())
    return (body[:at], added, more, memoryview(body)[at:])


def _unwanted(
    members: list[JsonSpan], set: Mapping[str, bytes], remove: Collection[str]
) -> Collection[int]:
    first: dict[str, int] = {}
    for i, member in enumerate(members):
        first.setdefault(member.key, i)
    return {
        i
        for i, member in enumerate(members)
        if (member.key in set and first[member.key] != i)
        or (member.key in remove and member.key not in set)
    }


def _member_edits(members: list[JsonSpan], unwanted: Collection[int]) -> list[_Edit]:
    """Removals with the right comma: the one before, or the next when nothing before is kept."""
    edits: list[_Edit] = []
    kept_before = False
    for i, member in enumerate(members):
        if i not in unwanted:
            kept_before = True
        elif kept_before:
            edits.append(_Edit(members[i - 1].end, member.end, ""))
        else:
            end = members[i + 1].start if i + 1 < len(members) else member.end
            edits.append(_Edit(member.start, end, ""))
    return edits


def _replacements(members: list[JsonSpan], set: Mapping[str, bytes]) -> list[_Edit]:
    edits: dict[str, _Edit] = {}
    for member in members:
        if member.key in set and member.key not in edits:
            edits[member.key] = _Edit(member.value, member.end, set[member.key].decode())
    return list(edits.values())


def _insertion(
    text: str, members: list[JsonSpan], set: Mapping[str, bytes], remove: Collection[str]
) -> list[_Edit]:
    present = {member.key for member in members}
    added = [f"{json.dumps(key)}:{set[key].decode()}" for key in set if key not in present]
    if not added:
        return []
    kept = any(member.key in set or member.key not in remove for member in members)
    at = text.index("{") + 1
    return [_Edit(at, at, ",".join(added) + ("," if kept else ""))]


def _applied(text: str, edits: list[_Edit]) -> str:
    parts: list[str] = []
    at = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if edit.start >= at:  # else it lies inside a member that goes as a whole
            parts += [text[at : edit.start], edit.text]
            at = edit.end
    parts.append(text[at:])
    return "".join(parts)
