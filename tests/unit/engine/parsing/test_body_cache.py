"""The body cache: a body parsed incrementally equals the body parsed whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evoke_proxy.engine.parsing.body_cache import BodyCache, CachedBody, ReadBody

# Texts that look like the JSON structure around them.
STRUCTURAL = st.text(st.sampled_from('"\\{}[],: ab\n\u00e9\U0001f642'), max_size=12)
TEXT = STRUCTURAL | st.sampled_from(
    ['"]}', '"},{"role":"user"', '],"messages":[', "}]", '\\"}', "{}"]
)
VALUE = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": VALUE})
ELEMENTS = st.lists(MESSAGE, max_size=2) | st.lists(MESSAGE | VALUE, max_size=2)
NAMES = st.sampled_from(["model", "x", "y", "model", "x", "y", "messages"])
MEMBERS = st.lists(st.tuples(NAMES, VALUE), max_size=2)
SPELLED: list[Callable[[Any], str]] = [
    json.dumps,
    lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False),
    lambda value: json.dumps(value, indent=1),
]


@st.composite
def bodies_of_conversation(draw: st.DrawFn) -> list[bytes]:
    """Bodies of a conversation; most of them continue the one before."""
    spell = draw(st.sampled_from(SPELLED))
    key = draw(st.sampled_from(["messages", "messages", "input"]))
    messages, bodies = draw(st.lists(MESSAGE, min_size=2, max_size=4)), list[bytes]()
    before, after = draw(MEMBERS), draw(MEMBERS)
    for turn in range(draw(st.integers(3, 5))):
        removed = draw(st.sampled_from([0, 0, 0, 1])) if turn else 0
        messages = messages[: len(messages) - removed] + draw(ELEMENTS)
        if draw(st.sampled_from([False, False, False, True])):
            after = draw(MEMBERS)
        members = [*before, (key, messages), *after]
        pairs = ", ".join(f"{json.dumps(name)}: {spell(value)}" for name, value in members)
        bodies.append(f"{{{pairs}}}".encode("utf-8", "replace"))
    return bodies


@settings(max_examples=60)
@given(bodies_of_conversation())
def test_an_incrementally_parsed_body_equals_a_wholly_parsed_one(turns: list[bytes]) -> None:
    bodies, kept = BodyCache(least=1), list[CachedBody | None]()
    for body in turns:
        whole = orjson.loads(body)
        read = bodies.read(body, "t")
        if read is None:
            read = ReadBody(body, whole)
        assert read.parsed == whole and list(read.parsed) == list(whole)
        for name, count in read.n_shared.items():
            assert read.before is not None
            assert read.parsed[name][:count] == read.before.parsed[name][:count]
        cached = bodies.keep(read, "t")
        assert cached is not None and cached.n_bytes == CachedBody.of(ReadBody(body, whole)).n_bytes
        kept.append(cached)


def chat_body(n: int, **more: object) -> bytes:
    messages = [{"role": "user", "content": f'{i} "]}} {"x" * 50}'} for i in range(n)]
    return orjson.dumps({"model": "m", "messages": messages, "stream": True} | more)


def test_only_new_messages_are_parsed() -> None:
    bodies = BodyCache(least=1)
    kept = bodies.keep(ReadBody(chat_body(8), orjson.loads(chat_body(8))), "t")
    for n in (10, 11, 20, 21):
        read = bodies.read(chat_body(n), "t")
        assert read is not None and read.before is kept and kept is not None
        assert read.n_shared == {"messages": kept.n} and kept.n == len(kept.parsed["messages"])
        same = zip(read.parsed["messages"], kept.parsed["messages"], strict=False)
        assert all(one is other for one, other in same)
        kept = bodies.keep(read, "t")


def test_bodies_of_other_tenants_short_and_released_bodies_are_not_cached() -> None:
    bodies = BodyCache(least=len(chat_body(8)))
    kept = bodies.keep(ReadBody(chat_body(8), orjson.loads(chat_body(8))), "t")
    assert bodies.read(chat_body(9), "t") is not None
    assert bodies.read(chat_body(9), "other") is None
    assert bodies.keep(ReadBody(chat_body(7), orjson.loads(chat_body(7))), "t") is None
    assert bodies.read(chat_body(9, model="another"), "t") is None
    del kept
    assert bodies.read(chat_body(9), "t") is None and not bodies._latest


def test_only_a_few_nested_lists_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying a list costs time for all the text before it."""
    parsed: list[int] = []

    def counted(text: bytes) -> None:
        parsed.append(len(text))

    inside = [{"messages": []}] * 500
    messages = [{"role": "user", "content": "x" * 100}] * 2
    first, later = (orjson.dumps({"x": inside, "messages": messages[:n]}) for n in (1, 2))
    bodies = BodyCache(least=1)
    kept = bodies.keep(ReadBody(first, orjson.loads(first)), "t")
    monkeypatch.setattr("evoke_proxy.engine.parsing.body_cache._parsed", counted)
    assert bodies.read(later, "t") is None
    assert kept is not None and len(parsed) < 10


@pytest.mark.parametrize("depth", [100, 1000])
def test_a_body_too_deep_to_compare_is_parsed_whole(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    first, later = (chat_body(n).replace(b'"m"', deep) for n in (8, 9))
    bodies = BodyCache(least=1)
    kept = bodies.keep(ReadBody(first, orjson.loads(first)), "t")
    read = bodies.read(later, "t")
    assert kept is not None and (read is not None or depth > 100)
