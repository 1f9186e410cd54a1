"""Edits JSON text in place; all other bytes stay unchanged.

Serialising a parsed body would change key order, number spelling and escapes, and with them the
prompt. The decoder's own scanner finds the positions, so that an edit applies to the same values
that a parser reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from evoke_proxy.core.request.json_parsing import json_text, refuse_body, reject_constant
from evoke_proxy.core.request.large_json import LARGE_BYTES, cut_long_strings

MESSAGE_LISTS = ("messages", "input")
Path = tuple[str | int, ...]
_SPACE = " \t\n\r"
# In a longer text, objects and lists are read value by value, because the decoder holds the
# interpreter's lock until the end of a value.
_DECODED_CHARS = 256 * 1024


@dataclass(frozen=True, slots=True)
class JsonSpan:
    """Position of an object's member or a list's element in the text, as character indexes.

    Attributes:
        key: key of the member; empty for an element.
        start: start of the element, or of the member's key.
        value: start of the value.
        end: index after the last character of the value.
    """

    key: str
    start: int
    value: int
    end: int


class JsonScanner:
    """Finds the positions of members and elements; decodes values only to find their end.

    `on_message` is called with the members of each object in the lists `messages` and `input`.
    """

    def __init__(
        self, text: str, on_message: Callable[[list[JsonSpan]], None] | None = None
    ) -> None:
        self._text = text
        self._on_message = on_message
        # int() refuses long integers, so they are decoded as floats
        decoder = json.JSONDecoder(parse_int=float, parse_constant=reject_constant)
        self._decode: Callable[[str, int], tuple[Any, int]] = decoder.raw_decode

    def document(self) -> list[JsonSpan]:
        """The top-level members; RequestError when the text is not a JSON object."""
        start = 1 if self._text.startswith("\ufeff") else 0
        at = self._space(start)
        if self._at(at) != "{":
            refuse_body("it does not begin with {")
        members, end = self._members(at, top=True)
        if self._space(end) != len(self._text):
            refuse_body(f"it has text after its end, at {end}")
        return members

    def elements(self, at: int) -> list[JsonSpan]:
        """The elements of the list that begins at `at`."""
        return self._elements(at, self._value)[0]

    def end(self, at: int) -> int:
        """The end of the value that begins at `at`."""
        return self._value(at)[1]

    def find(self, path: Sequence[str | int]) -> int | None:
        """The start of the value at a path of keys and indexes; None when there is none."""
        spans, at = self.document(), 0
        for depth, step in enumerate(path):
            if depth:
                spans = self._inside(at)
            if isinstance(step, str):
                spans = [span for span in spans if span.key == step][-1:]
            else:
                spans = spans[step : step + 1]
            if not spans:
                return None
            at = spans[0].value
        return at

    def find_all(self, paths: Iterable[Path]) -> dict[Path, JsonSpan]:
        """The positions of the values at these paths, without paths that have none.

        Each part of the text is read once.
        """
        result: dict[Path, JsonSpan] = {}
        todo = [(list(paths), 0, self.document())]
        while todo:
            group, depth, spans = todo.pop()
            by_step: dict[str | int, list[Path]] = {}
            for path in group:
                by_step.setdefault(path[depth], []).append(path)
            by_key = {span.key: span for span in spans}  # the last member of a key counts
            for step, matching in by_step.items():
                if isinstance(step, str):
                    span = by_key.get(step)
                else:
                    span = spans[step] if step < len(spans) else None
                if span is None:
                    continue
                result |= {path: span for path in matching if len(path) == depth + 1}
                deeper = [path for path in matching if len(path) > depth + 1]
                if deeper:
                    todo.append((deeper, depth + 1, self._inside(span.value)))
        return result

    def _inside(self, at: int) -> list[JsonSpan]:
        if self._at(at) == "{":
            return self._members(at, top=False)[0]
        return self.elements(at) if self._at(at) == "[" else []

    def _members(self, at: int, top: bool) -> tuple[list[JsonSpan], int]:
        """Read the object that begins at `at`; returns its members and the index after it."""
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
            refuse_body(f"a key is missing at {start}")
        key, at = self._value(start)
        at = self._space(self._expect(self._space(at), ":"))
        if top and self._on_message and key in MESSAGE_LISTS and self._at(at) == "[":
            read = partial(self._message, self._on_message)
            return JsonSpan(key, start, at, self._elements(at, read)[1])
        return JsonSpan(key, start, at, self._value(at)[1])

    def _elements(
        self, at: int, read: Callable[[int], tuple[Any, int]]
    ) -> tuple[list[JsonSpan], int]:
        """Read the list that begins at `at`; returns its elements and the index after it."""
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

    def _message(self, on_message: Callable[[list[JsonSpan]], None], at: int) -> tuple[Any, int]:
        if self._at(at) != "{":
            return self._value(at)
        members, end = self._members(at, top=False)
        on_message(members)
        return None, end

    def _value(self, at: int) -> tuple[Any, int]:
        """Read the value that begins at `at`; returns it and the index after it.

        In a long text, None takes the place of an object or a list.
        """
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
            refuse_body(f"{char!r} is missing at {at}")
        return at + 1


_ESCAPED_ASCII = re.compile(r"\\u00[2-7]")
_VISIBLE = re.compile(r"[^ \t\n\r]")
_VISIBLE_BYTE = re.compile(rb"[^ \t\n\r]")


@dataclass(frozen=True, slots=True)
class _Edit:
    """Replaces the characters [start, end) by a text."""

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
    """Set and remove members of a JSON object; all other bytes stay unchanged.

    `set` maps keys to JSON texts. The value of an existing key is replaced in place, and later
    duplicates are removed; a new member is inserted after the first brace. `message_remove` names
    members to remove from each object in the lists `messages` and `input`. With
    `keys`, all top-level keys of the body, an edit that only adds members does not read the body.
    Raises RequestError when `body` is not a JSON object.
    """
    if keys is not None and not message_remove and {*set, *remove}.isdisjoint(keys):
        return b"".join(inserted(body, set)) if set else body
    if len(body) > LARGE_BYTES:
        cut = cut_long_strings(body)
        if cut.strings:
            return cut.restore(_edited(cut.rest, set, remove, message_remove))
    return _edited(body, set, remove, message_remove)


def _edited(
    body: bytes, set: Mapping[str, bytes], remove: Collection[str], message_remove: Collection[str]
) -> bytes:
    """Edit as `edit_top_level`, reading all of the body."""
    text = json_text(body)
    edits: list[_Edit] = []

    def remove_from_message(members: list[JsonSpan]) -> None:
        unwanted = {i for i, member in enumerate(members) if member.key in message_remove}
        edits.extend(_member_edits(members, unwanted))

    members = JsonScanner(
        text, remove_from_message if _may_contain(text, message_remove) else None
    ).document()
    edits += _member_edits(members, _unwanted(members, set, remove))
    edits += _replacements(members, set)
    edits += _insertion(text, members, set, remove)
    return _applied(text, edits).encode() if edits else body


def remove_elements(body: bytes, key: str, indexes: Collection[int]) -> bytes:
    """Remove elements of the top-level list `key`; unchanged when there is no such list.

    Raises RequestError when `body` is not a JSON object.
    """
    text = json_text(body)
    members = JsonScanner(text).document()
    lists = [member for member in members if member.key == key and text[member.value] == "["]
    if not lists or not indexes:
        return body
    elements = JsonScanner(text).elements(lists[-1].value)
    return _applied(text, _member_edits(elements, indexes)).encode()


def edit_nested(body: bytes, path: Sequence[str], set: Mapping[str, bytes]) -> bytes:
    """Set members of the object at `path` inside a JSON object.

    Unchanged when there is no object at `path`. Raises RequestError when `body` is not a JSON
    object.
    """
    if not path:
        return edit_top_level(body, set, ())
    text = json_text(body)
    members = JsonScanner(text).document()
    matching = [item for item in members if item.key == path[0] and text[item.value] == "{"]
    if not matching:
        return body
    start, end = matching[-1].value, matching[-1].end
    inner = edit_nested(text[start:end].encode(), path[1:], set)
    return text[:start].encode() + inner + text[end:].encode()


def prepend(body: bytes, path: Sequence[str | int], text: str, part: Mapping[str, str]) -> bytes:
    """Insert a text at the beginning of the value at a path of keys and indexes.

    In a string `text` is inserted; in a list `part` becomes the first element. Any other value
    stays unchanged. Raises RequestError when `body` is not a JSON object.
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
    """Replace the values at paths of keys and indexes by JSON texts.

    A path without a value is ignored. Raises RequestError when `body` is not a JSON object.
    """
    cut = cut_long_strings(body)
    text = json_text(cut.rest)
    spans = JsonScanner(text).find_all(values)
    edits = [_Edit(span.value, span.end, values[path]) for path, span in spans.items()]
    return cut.restore(_applied(text, edits).encode())


def reorder_elements(body: bytes, key: str, order: Sequence[int]) -> bytes:
    """Put the elements of the top-level list `key` in this order of their indexes.

    Unchanged unless the list has as many elements as `order`. Raises RequestError when `body` is
    not a JSON object.
    """
    cut = cut_long_strings(body)
    text = json_text(cut.rest)
    at = JsonScanner(text).find((key,))
    spans = JsonScanner(text).elements(at) if at is not None and text[at] == "[" else []
    if len(spans) != len(order):
        return body
    texts = [text[span.start : span.end] for span in spans]
    moved = [
        _Edit(span.start, span.end, texts[index]) for span, index in zip(spans, order, strict=True)
    ]
    return cut.restore(_applied(text, moved).encode())


def _may_contain(text: str, keys: Collection[str]) -> bool:
    """Whether the text may contain one of these ASCII keys, plain or with escapes."""
    return any(f'"{key}"' in text for key in keys) or _ESCAPED_ASCII.search(text) is not None


def inserted(body: bytes, set: Mapping[str, bytes]) -> tuple[bytes | memoryview, ...]:
    """Insert members that a JSON object lacks; returns parts that do not copy the body."""
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
    """The indexes of members to remove: those of `remove`, and repetitions of those of `set`."""
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
    """Edits that remove members, each with the comma before it or, at the start, after it."""
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
    """Return the edit that inserts the members of `set` that the object lacks, if there are any."""
    present = {member.key for member in members}
    added = [f"{json.dumps(key)}:{set[key].decode()}" for key in set if key not in present]
    if not added:
        return []
    has_others = any(member.key in set or member.key not in remove for member in members)
    at = text.index("{") + 1
    return [_Edit(at, at, ",".join(added) + ("," if has_others else ""))]


def _applied(text: str, edits: list[_Edit]) -> str:
    """Apply edits to a text; an edit inside a removed member has no effect."""
    parts: list[str] = []
    at = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if edit.start >= at:  # else it is inside a member that is removed
            parts += [text[at : edit.start], edit.text]
            at = edit.end
    parts.append(text[at:])
    return "".join(parts)
