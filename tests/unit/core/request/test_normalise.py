"""Normalising system prompts and tools, so that requests share a prefix."""

from __future__ import annotations

import json
import random
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config.schema import NormaliseConfig
from evoke_proxy.core.request.normalise import (
    EDGE_CHARS,
    EDGE_LINES,
    DateFreezer,
    edges,
    is_dated,
    system_texts,
    with_sorted_tools,
    with_texts,
    without_billing,
)
from evoke_proxy.engine.parsing.parser import Normalizer

HEADER = "x-anthropic-billing-header: cc_version=2.1.86.d24; cc_entrypoint=cli; cch=a5145;"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{HEADER}\nYou help.", "You help."),
        (f"{HEADER}You help.", "You help."),
        (HEADER, ""),
        (f"You help.\n{HEADER}\nWell.", "You help.\nWell."),
        (f"Never send {HEADER}", f"Never send {HEADER}"),  # not at the start of a line
        ("You help.", "You help."),
    ],
)
def test_a_billing_header_is_removed_from_the_start_of_a_line(text: str, left: str) -> None:
    assert without_billing(text) == left


@pytest.mark.parametrize(
    ("line", "dated"),
    [
        ("Today is Monday, 12:34.", True),
        ("Current date: 21 November 2026", True),
        ("<env>2026-11-21</env>", True),
        ("The time now is 9", True),
        ("Take your time.", False),
        ("Use at most 3 tools.", False),
        ("Port 8080 is open.", False),
    ],
)
def test_a_line_with_a_date_or_a_time_is_recognised(line: str, dated: bool) -> None:
    assert is_dated(line) == dated


def test_the_date_of_a_system_prompt_is_frozen_for_some_hours_per_tenant() -> None:
    clock = DateFreezer()
    at = "You help with 3 tools.\nToday is {}.".format
    first = at("Monday, 2026-11-23, 12:34")
    assert clock.freeze(first, "t", 0.0, 2.0) == first
    assert clock.freeze(at("Tuesday, 2026-11-24, 01:02"), "t", 7199.0, 2.0) == first
    later = at("Tuesday, 2026-11-24, 03:04")
    assert clock.freeze(later, "t", 7200.0, 2.0) == later
    assert clock.freeze(first, "t", 7300.0, 2.0) == later
    assert clock.freeze(first, "u", 7300.0, 2.0) == first
    other = later.replace("3 tools", "4 tools")
    assert clock.freeze(other, "t", 7300.0, 2.0) == other


BODIES = {
    "chat": {
        "messages": [
            {"role": "system", "content": "A"},
            {"role": "developer", "content": [{"type": "text", "text": "B"}]},
            {"role": "user", "content": "C"},
            {"role": "system", "content": "D"},
        ]
    },
    "messages": {"system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
    "responses": {"instructions": "A", "input": [{"role": "system", "content": "B"}]},
}


@pytest.mark.parametrize("dialect", BODIES)
def test_only_the_system_prompt_of_each_dialect_is_changed(dialect: str) -> None:
    body = BODIES[dialect]
    raw = json.dumps(body, separators=(",", ":"))
    found = dict(system_texts(body, dialect))
    assert list(found.values()) == ["A", "B"]
    changed = with_texts(raw.encode(), {path: f"caf\u00e9 {text}" for path, text in found.items()})
    expected = raw.replace('"A"', '"caf\\u00e9 A"').replace('"B"', '"caf\\u00e9 B"')
    assert changed.decode() == expected


def test_bodies_of_other_shapes_have_no_system_prompt() -> None:
    for body in ({}, {"messages": 3}, {"messages": [3]}, {"system": {"a": 1}}, {"system": [1]}):
        for dialect in BODIES:
            assert list(system_texts(body, dialect)) == []


def named(name: str, dialect: str) -> dict[str, object]:
    definition = {"name": name, "x": [1.50, 2]}
    return {"type": "function", "function": definition} if dialect == "chat" else definition


@given(
    st.lists(st.text(min_size=1, max_size=3), max_size=6),
    st.randoms(),
    st.sampled_from(["chat", "messages"]),
)
def test_sorted_tools_give_the_same_bytes_for_any_order(
    names: list[str], rng: random.Random, dialect: str
) -> None:
    tools = [named(name, dialect) for name in sorted(names)]
    body = {"a": 1.0, "tools": tools, "messages": []}
    expected = json.dumps(body).encode()
    assert with_sorted_tools(expected, tools) is expected
    rng.shuffle(tools)
    shuffled = json.dumps(body | {"tools": tools}).encode()
    assert with_sorted_tools(shuffled, tools) == expected


def test_tools_that_are_not_a_list_of_objects_are_unchanged() -> None:
    for tools in (None, 3, ["b", "a"], {"b": 1}):
        body = json.dumps({"tools": tools}).encode()
        assert with_sorted_tools(body, tools) is body


def test_many_prompts_of_one_tenant_do_not_displace_the_dates_of_another() -> None:
    clock, dated = DateFreezer(), "You are {name}.\nToday is {date}."
    first = dated.format(name="a helper", date="2026-01-02")
    assert clock.freeze(first, "quiet", 0.0, 24.0) == first
    for number in range(600):
        clock.freeze(dated.format(name=f"number {number}", date="2026-01-02"), "loud", 1.0, 24.0)
    later = dated.format(name="a helper", date="2026-03-04")
    assert clock.freeze(later, "quiet", 2.0, 24.0) == first


def test_frozen_dates_of_long_prompts_take_bounded_memory() -> None:
    clock, middle = DateFreezer(), "You help with 3 tools.\n" * 40_000
    tracemalloc.start()
    for number in range(300):
        prompt = f"Today is 2026-01-02.\nYou are number {number}.\n{middle}Date: 2026-01-02"
        clock.freeze(prompt, "t", 0.0, 24.0)
    del prompt
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 8 << 20, "300 prompts of 0.9 MB are stored"


@pytest.mark.parametrize("break_every", [3, 60, 5000, 10**9])
def test_a_text_is_divided_into_first_lines_middle_and_last_lines(break_every: int) -> None:
    for n_chars in (0, 1, 100, EDGE_CHARS, EDGE_CHARS + 1, 2 * EDGE_CHARS, 9 * EDGE_CHARS):
        text = "".join("\n" if at % break_every == 1 else "a" for at in range(n_chars))
        head, middle, tail = edges(text)
        assert head + middle + tail == text
        assert max(len(head), len(tail)) <= EDGE_CHARS
        assert max(head.count("\n"), tail.count("\n")) <= EDGE_LINES
        assert not middle or (head and tail)


def test_dates_are_frozen_only_at_both_ends_of_a_long_system_prompt() -> None:
    clock = DateFreezer()
    filler = "You help with 3 tools.\n" * 2000

    def prompt(begins: str, middle: str, ends: str) -> str:
        return f"Today is {begins}.\n{filler}Date: {middle}\n{filler}Date: {ends}\nGo on."

    first = prompt("Monday, 9:30", "2026-11-23", "2026-11-23")
    assert clock.freeze(first, "t", 0.0, 2.0) == first
    later = prompt("Tuesday, 10:31", "2026-11-23", "2026-11-24")
    assert clock.freeze(later, "t", 1.0, 2.0) == first
    another = prompt("Tuesday, 10:31", "2026-11-24", "2026-11-24")
    assert clock.freeze(another, "t", 1.0, 2.0) == another


@pytest.mark.parametrize("word", ["now ", "time\t"])
def test_a_line_is_searched_for_dates_in_linear_time(word: str) -> None:
    line = word * 5000
    start = time.thread_time()
    assert not is_dated(line)
    assert time.thread_time() - start < 0.05


PROMPTS = {
    "a date in each line": "2026-11-21\n" * 20_000,
    "times in each line": "9:30 9:31\n" * 20_000,
    "dates in one line": "2026-11-21 " * 20_000,
    "numbers in one line": "today " + "1 " * 100_000,
    "empty lines": "\n" * 120_000,
    "billing headers": f"{HEADER}\n" * 2500,
}


@pytest.mark.parametrize("n_texts", [1, 400])
@pytest.mark.parametrize("name", PROMPTS)
def test_normalising_never_blocks_the_event_loop_for_long(name: str, n_texts: int) -> None:
    """These bodies are small enough to be read on the event loop."""
    text = PROMPTS[name]
    parts = [text[at::n_texts] if n_texts > 1 else text for at in range(n_texts)]
    body = json.dumps({"messages": [{"role": "system", "content": part} for part in parts]})
    assert len(body) < 256 * 1024 + 40 * n_texts
    seconds = []
    for _ in range(4):
        config = NormaliseConfig(billing=True, dates_h=1.0)
        normaliser = Normalizer(config, Metrics())
        start = time.thread_time()
        normaliser.apply(body.encode(), "chat", "t")
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.02, seconds
