"""Editing JSON texts in place: only the edited members change."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.request.json_edit import edit_nested, edit_top_level, prepend, remove_elements
from evoke_proxy.errors import RequestError

KEYS = st.sampled_from(["a", "b", "messages", "input", "evoke_keep", "id_slot", 'q"\\', "ü", ""])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "evoke_keep", "evoke_name"]), VALUES)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=6) | st.builds(
    lambda other, messages: other | {"messages": messages},
    st.dictionaries(KEYS, VALUES, max_size=3),
    st.lists(MESSAGE | VALUES, max_size=4),
)
SPACE = st.sampled_from(["", " ", "\n\t ", "\r\n"])
EITHER = st.booleans()


@st.composite
def texts(draw: st.DrawFn, value: Any) -> str:
    """A JSON text of `value` with any white space, with or without escapes."""
    return _text(draw, value)


def _text(draw: st.DrawFn, value: Any) -> str:
    space = draw(SPACE)
    if isinstance(value, dict):
        members = [
            f"{_text(draw, key)}{space}:{draw(SPACE)}{_text(draw, item)}"
            for key, item in value.items()
        ]
        return "{" + space + f"{space},{space}".join(members) + draw(SPACE) + "}"
    if isinstance(value, list):
        return "[" + f",{space}".join(_text(draw, item) for item in value) + space + "]"
    if isinstance(value, str) and draw(EITHER):
        if draw(EITHER):
            return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0xD800 else c for c in value) + '"'
        return json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


def with_text(objects: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[tuple[Any, str]]:
    return objects.flatmap(lambda value: st.tuples(st.just(value), texts(value)))


def dict_edit(
    value: dict[str, Any], set_: dict[str, Any], remove: set[str], message_remove: set[str]
) -> dict[str, Any]:
    edited = {key: item for key, item in value.items() if key not in remove}
    for name in ("messages", "input"):
        if isinstance(edited.get(name), list):
            edited[name] = [
                {k: v for k, v in item.items() if k not in message_remove}
                if isinstance(item, dict)
                else item
                for item in edited[name]
            ]
    return edited | set_


@given(
    with_text(OBJECTS),
    st.dictionaries(KEYS, VALUES, max_size=3),
    st.sets(KEYS, max_size=3),
    st.sets(st.sampled_from(["role", "evoke_keep", "evoke_name", "a"]), max_size=3),
    SPACE,
)
def test_an_edit_equals_the_same_edit_of_the_parsed_object(
    value_and_text: tuple[dict[str, Any], str],
    set_: dict[str, Any],
    remove: set[str],
    message_remove: set[str],
    space: str,
) -> None:
    value, text = value_and_text
    body = (space + text + space).encode()
    raw = {key: json.dumps(item).encode() for key, item in set_.items()}
    edited = edit_top_level(body, raw, remove, message_remove)
    assert json.loads(edited) == dict_edit(value, set_, remove, message_remove)


@given(with_text(OBJECTS), SPACE)
def test_an_edit_without_changes_returns_the_same_bytes(
    value_and_text: tuple[dict[str, Any], str], space: str
) -> None:
    body = (space + value_and_text[1] + space).encode()
    assert edit_top_level(body, {}, {"absent"}, {"absent"}) is body


@given(with_text(OBJECTS), st.integers())
def test_an_insertion_keeps_every_other_byte(
    value_and_text: tuple[dict[str, Any], str], number: int
) -> None:
    value, text = value_and_text
    edited = edit_top_level(text.encode(), {"new": str(number).encode()}, ())
    comma = "," if value else ""
    assert edited.decode() == "{" + f'"new":{number}{comma}' + text[1:]


@given(with_text(OBJECTS), with_text(OBJECTS), SPACE)
def test_removing_a_member_keeps_every_other_byte(
    first: tuple[dict[str, Any], str], other: tuple[dict[str, Any], str], space: str
) -> None:
    inner = first[1]
    members = [f'"k":{inner}', '"gone" : 1.0', f'"k2"{space}:{other[1]}']
    body = f"{{ {members[0]} ,{space}{members[1]},{members[2]} }}".encode()
    assert edit_top_level(body, {}, ["gone"]) == f"{{ {members[0]},{members[2]} }}".encode()


def test_numbers_and_escapes_keep_their_spelling() -> None:
    body = '{"t": 1.50e+01, "n": 123456789012345678901234567890, "s": "\\u00fc\\/ü", "id_slot":9}'
    edited = edit_top_level(body.encode(), {"id_slot": b"3", "x": b"[1]"}, ())
    assert edited.decode() == '{"x":[1],' + body[1:].replace('"id_slot":9', '"id_slot":3')


@pytest.mark.parametrize(
    ("body", "remove", "expected"),
    [
        ('{"a":1}', "a", "{}"),
        ('{ "a" : 1 }', "a", "{  }"),
        ('{"a":1,"b":2}', "a", '{"b":2}'),
        ('{"a":1,"b":2}', "b", '{"a":1}'),
        ('{"a":1, "b":2, "c":3}', "b", '{"a":1, "c":3}'),
        ('{"a":1, "b":2, "c":3}', "ab", '{"c":3}'),
        ('{"a":1, "b":2, "c":3}', "ac", '{"b":2}'),
        ('{"a":1, "b":2, "c":3}', "bc", '{"a":1}'),
        ('{"a":1,"a":2,"b":{"a":1}}', "a", '{"b":{"a":1}}'),
        ('{"\\u0061":1,"b":2}', "a", '{"b":2}'),
    ],
)
def test_a_member_is_removed_with_its_comma(body: str, remove: str, expected: str) -> None:
    assert edit_top_level(body.encode(), {}, list(remove)).decode() == expected


def test_setting_a_repeated_key_leaves_it_once() -> None:
    edited = edit_top_level(b'{"id":1,"b":2,"id":3}', {"id": b"7"}, ())
    assert edited == b'{"id":7,"b":2}'


def test_a_key_both_set_and_removed_is_set() -> None:
    assert edit_top_level(b'{"a":1}', {"a": b"2"}, ["a"]) == b'{"a":2}'
    assert edit_top_level(b'{"b":1}', {"a": b"2"}, ["a", "b"]) == b'{"a":2}'


def test_marks_are_removed_from_messages_and_not_from_deeper_objects() -> None:
    first, last = (
        b'{"evoke_keep":"pin","content":{"evoke_keep":1}}',
        b'{"role":"x" , "evoke_keep":2}',
    )
    body = b'{"messages":[' + first + b", 3, " + last + b"]}"
    edited = edit_top_level(body, {}, (), ["evoke_keep"])
    assert edited == b'{"messages":[{"content":{"evoke_keep":1}}, 3, {"role":"x"}]}'


def test_messages_that_are_replaced_are_not_edited() -> None:
    body = b'{"messages":[{"evoke_keep":1,"a":2}],"b":1}'
    assert edit_top_level(body, {"messages": b"[]"}, (), ["a"]) == b'{"messages":[],"b":1}'
    assert edit_top_level(body, {}, ["messages"], ["a"]) == b'{"b":1}'


def test_a_byte_order_mark_is_kept() -> None:
    assert (
        edit_top_level('\ufeff{"a":1}'.encode(), {"b": b"2"}, ()) == '\ufeff{"b":2,"a":1}'.encode()
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"nul",
        b"{",
        b'{"a"}',
        b'{"a":}',
        b'{"a":1,}',
        b'{"a":1 "b":2}',
        b'{"a":1}}',
        b'{"a":1} x',
        b"{a:1}",
        b"{1:1}",
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":01}',
        b'{"a":"\n"}',
        b'{"a":"\\x"}',
        b'{"a":"\xff"}',
        b'{"messages":[{"a":1,}]}',
        b'{"messages":[{"a":1} {"a":1}]}',
        b'{"messages":[',
        '{"a":1}'.encode("utf-16"),
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_text_that_is_not_a_json_object_is_a_request_error(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        edit_top_level(body, {"a": b"1"}, (), ["a"])
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    with pytest.raises(RequestError):
        remove_elements(body, "messages", [0])


@given(st.lists(VALUES, max_size=6), st.sets(st.integers(0, 7)), SPACE)
def test_list_elements_are_removed_with_their_commas(
    values: list[Any], indexes: set[int], space: str
) -> None:
    inner = f"{space},{space}".join(json.dumps(value) for value in values)
    body = f'{{"x":1.0,"messages":[{space}{inner}{space}],"y":[1,2]}}'.encode()
    edited = remove_elements(body, "messages", indexes)
    kept = [value for i, value in enumerate(values) if i not in indexes]
    assert json.loads(edited) == {"x": 1.0, "messages": kept, "y": [1, 2]}
    assert re.match(rb'\{"x":1\.0,"messages":\[', edited) and edited.endswith(b'],"y":[1,2]}')


def test_removing_elements_of_a_missing_list_changes_nothing() -> None:
    for body in (b'{"a":[1]}', b'{"messages":"text"}', b'{"messages":[]}'):
        assert remove_elements(body, "messages", [0]) == body


def test_a_large_body_is_edited_in_reasonable_time() -> None:
    import time

    message = {"role": "user", "content": "line one\nline two\t" * 200, "evoke_keep": "pin"}
    body = json.dumps({"messages": [message] * 300}).encode()
    started = time.process_time()
    edit_top_level(body, {"id_slot": b"0"}, ["evoke"], ["evoke_keep"])
    assert len(body) > 1_000_000
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    ("body", "edited"),
    [
        (b'{"a": {"b": {"c":1.0}}}', b'{"a": {"b": {"x":7,"c":1.0}}}'),
        (b'{"a":{"b":{}},"b":2}', b'{"a":{"b":{"x":7}},"b":2}'),
        (b' {"a":{"b":{"x" : 1e3}}}\n', b' {"a":{"b":{"x" : 7}}}\n'),
        (b'{"a":{"b":1},"a":{"b":{}}}', b'{"a":{"b":1},"a":{"b":{"x":7}}}'),
        (b'{"a":[{"b":{}}]}', b'{"a":[{"b":{}}]}'),
        ('{"ü":"€","a":{"ß":"𝄞","b":{"c":"é"}}}'.encode(), None),
        (b'{"a":null}', b'{"a":null}'),
    ],
)
def test_a_member_of_a_nested_object_is_set(body: bytes, edited: bytes | None) -> None:
    expected = edited or body.replace(b'"b":{', b'"b":{"x":7,')
    assert edit_nested(body, ("a", "b"), {"x": b"7"}) == expected


def prepended(value: Any, path: list[Any], text: str, part: dict[str, str]) -> Any:
    """The same edit on the parsed value."""
    if path:
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[path[0]] = prepended(value[path[0]], path[1:], text, part)
        return copy
    if isinstance(value, str):
        return text + value
    return [part, *value] if isinstance(value, list) else value


@given(with_text(OBJECTS), st.data(), st.text(max_size=20))
def test_a_text_is_prepended_to_a_string_or_list(
    value_and_text: tuple[dict[str, Any], str], data: st.DataObject, text: str
) -> None:
    value, body = value_and_text
    path, target = [], value
    while isinstance(target, dict | list) and target and data.draw(st.integers(0, 3)):
        steps = sorted(target) if isinstance(target, dict) else range(len(target))
        path.append(data.draw(st.sampled_from(steps)))
        target = target[path[-1]]
    part = {"type": "text", "text": text}
    edited = prepend(body.encode(), path, text, part)
    assert json.loads(edited) == prepended(value, path, text, part)
    if not isinstance(target, str | list):
        assert edited == body.encode()


def test_a_path_that_does_not_exist_changes_nothing() -> None:
    body = b'{"messages": [{"content": "a"}, 7], "input": "b"}'
    for path in (["x"], ["messages", 2, "content"], ["messages", 1, "content"], ["input", 0], [],
                 ["messages", 0, "content", 0], ["messages", 0, "role"]):  # fmt: skip
        assert prepend(body, path, "note", {"type": "text"}) == body  # type: ignore[arg-type]
    twice = b'{"input": "first", "input": "last"}'
    assert json.loads(prepend(twice, ["input"], "> ", {})) == {"input": "> last"}
