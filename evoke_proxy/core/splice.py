"""Textual edits of a JSON object's bytes: what is not edited keeps every byte.

Re-serialising would change key order, number spelling and escapes, and with them the prompt.
Positions come from the decoder's own scanner, so what is edited is what a parser would read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from evoke_proxy.errors import RequestError

_MESSAGE_LISTS = ("messages", "input")
_SPACE = " \t\n\r"
_ESCAPED_ASCII = re.compile(r"\\u00[2-7]")
_EMPTY = re.compile(rb"\s*\}")


@dataclass(frozen=True, slots=True)
class _Member:
    key: str
    start: int
    value: int
    end: int


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
        return _inserted(body, set)
    text = _decoded(body)
    scanner = _Scanner(text, message_remove)
    members = scanner.document()
    edits = scanner.edits + _member_edits(members, _unwanted(members, set, remove))
    edits += _replacements(members, set)
    edits += _insertion(text, members, set, remove)
    return _applied(text, edits).encode() if edits else body


def remove_elements(body: bytes, key: str, indexes: Collection[int]) -> bytes:
    """`body` without these elements of its top-level list `key`; unchanged without such a list.

    RequestError when `body` is no JSON object.
    """
    text = _decoded(body)
    members = _Scanner(text, ()).document()
    found = [member for member in members if member.key == key and text[member.value] == "["]
    if not found or not indexes:
        return body
    elements = _Scanner(text, ()).elements(found[-1].value)
    return _applied(text, _member_edits(elements, indexes)).encode()


def edit_nested(body: bytes, path: Sequence[str], set: Mapping[str, bytes]) -> bytes:
    """`body`, a JSON object, with members set in the object at `path` inside it.

    Unchanged where `path` leads to no object. RequestError when `body` is no JSON object.
    """
    if not path:
        return edit_top_level(body, set, ())
    text = _decoded(body)
    members = _Scanner(text, ()).document()
    found = [member for member in members if member.key == path[0] and text[member.value] == "{"]
    if not found:
        return body
    start, end = found[-1].value, found[-1].end
    inner = edit_nested(text[start:end].encode(), path[1:], set)
    return text[:start].encode() + inner + text[end:].encode()


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        _refuse("it is not UTF-8")


def _refuse(why: str) -> NoReturn:
    raise RequestError(f"the request body is not a JSON object: {why}", "invalid_json")


def _may_hold(text: str, keys: Collection[str]) -> bool:
    """Whether one of these ASCII keys may be a key somewhere, spelled out or with escapes."""
    return any(f'"{key}"' in text for key in keys) or _ESCAPED_ASCII.search(text) is not None


def _inserted(body: bytes, set: Mapping[str, bytes]) -> bytes:
    """A JSON object that has none of these members, with them."""
    if not set:
        return body
    at = body.index(b"{") + 1
    more = b"" if _EMPTY.match(body, at) else b","
    added = b",".join(json.dumps(key).encode() + b":" + value for key, value in set.items())
    return body[:at] + added + more + body[at:]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class _Scanner:
    """Finds where members and elements are. Values are decoded only to learn where they end."""

    def __init__(self, text: str, message_remove: Collection[str]) -> None:
        self._text = text
        self._message_remove = message_remove if _may_hold(text, message_remove) else ()
        # float for whole numbers too: int() refuses long ones
        decoder = json.JSONDecoder(parse_int=float, parse_constant=_no_constant)
        self._decode: Callable[[str, int], tuple[Any, int]] = decoder.raw_decode
        self.edits: list[_Edit] = []

    def document(self) -> list[_Member]:
        """The top-level members; collects the edits inside messages on the way."""
        start = 1 if self._text.startswith("\ufeff") else 0
        at = self._space(start)
        if self._at(at) != "{":
            _refuse("it does not begin with {")
        members, end = self._members(at, top=True)
        if self._space(end) != len(self._text):
            _refuse(f"text after its end, at {end}")
        return members

    def elements(self, at: int) -> list[_Member]:
        """The elements of the list that begins at `at`, as members without a key."""
        return self._elements(at, self._value)[0]

    def _members(self, at: int, top: bool) -> tuple[list[_Member], int]:
        members: list[_Member] = []
        at = self._space(at + 1)
        if self._at(at) == "}":
            return members, at + 1
        while True:
            members.append(self._member(at, top))
            at = self._space(members[-1].end)
            if self._at(at) == "}":
                return members, at + 1
            at = self._space(self._expect(at, ","))

    def _member(self, start: int, top: bool) -> _Member:
        if self._at(start) != '"':
            _refuse(f"a key must be at {start}")
        key, at = self._value(start)
        at = self._space(self._expect(self._space(at), ":"))
        if top and self._message_remove and key in _MESSAGE_LISTS and self._at(at) == "[":
            return _Member(key, start, at, self._elements(at, self._message)[1])
        return _Member(key, start, at, self._value(at)[1])

    def _elements(
        self, at: int, read: Callable[[int], tuple[Any, int]]
    ) -> tuple[list[_Member], int]:
        elements: list[_Member] = []
        at = self._space(at + 1)
        if self._at(at) == "]":
            return elements, at + 1
        while True:
            elements.append(_Member("", at, at, read(at)[1]))
            at = self._space(elements[-1].end)
            if self._at(at) == "]":
                return elements, at + 1
            at = self._space(self._expect(at, ","))

    def _message(self, at: int) -> tuple[Any, int]:
        if self._at(at) != "{":
            return self._value(at)
        members, end = self._members(at, top=False)
        unwanted = {i for i, member in enumerate(members) if member.key in self._message_remove}
        self.edits += _member_edits(members, unwanted)
        return None, end

    def _value(self, at: int) -> tuple[Any, int]:
        try:
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


def _unwanted(
    members: list[_Member], set: Mapping[str, bytes], remove: Collection[str]
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


def _member_edits(members: list[_Member], unwanted: Collection[int]) -> list[_Edit]:
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


def _replacements(members: list[_Member], set: Mapping[str, bytes]) -> list[_Edit]:
    edits: dict[str, _Edit] = {}
    for member in members:
        if member.key in set and member.key not in edits:
            edits[member.key] = _Edit(member.value, member.end, set[member.key].decode())
    return list(edits.values())


def _insertion(
    text: str, members: list[_Member], set: Mapping[str, bytes], remove: Collection[str]
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
    return "".join([*parts, text[at:]])
