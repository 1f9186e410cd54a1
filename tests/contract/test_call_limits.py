"""Limits of one block call: the largest permitted call does not block other clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from llama import Json, Llama, sample_text

OPS, PROTECT, ORDER, NAMES, RANGES = 4096, 4096, 16384, 16384, 16384
# The longest time of the main loop for one call, on a slow core that is shared.
LONGEST_MS = 150.0
STREAM: Json = {"budget": 2000, "sink": 4, "recent": 64, "block": 64}


HEADS: Json = {"per_head": True}
# Queries of the last 64 tokens of a prompt are kept: the most expensive case for `products`.
CAPTURE: Json = {"layers": [0, 1, 2, 3], "mode": "snapkv", "window": 64, "queries": 64} | HEADS


def ranges(count: int) -> list[list[int]]:
    """`count` ranges of one token with gaps between them, in descending order."""
    return [[2 * i, 2 * i + 1] for i in reversed(range(count))]


def order(count: int) -> list[Json]:
    return [{"name": f"block {i}", "p0": i, "p1": i + 1} for i in range(count)]


LARGEST: list[tuple[str, Json]] = [
    ("stream", {"budget": 1 << 20, "protect": ranges(PROTECT)}),
    ("stream", STREAM | {"order": order(ORDER)}),
    ("block-plan", {"ops": [{"op": "stream", "budget": 0, "protect": ranges(PROTECT)}] * 8}),
    ("block-plan", {"ops": [{"op": "reuse", "n_tokens": 64}] * OPS}),
    ("block-plan", {"ops": [{"op": "evict", "p0": 2 * i, "p1": 2 * i + 1} for i in range(900)]}),
    ("block-drop", {"names": [f"nobody {i}" for i in range(NAMES)]}),
    ("attention", {"ranges": [[i % 1900, i % 1900 + 1] for i in range(15000)]}),
    ("attention", {"ranges": [[0, 1899]] * 15} | HEADS),
    ("attention", {"bounds": [[0, 1899]] * 15}),
    ("attention", {"products": [[0, 1899]]}),
]
TOO_MANY: list[tuple[str, Json, str]] = [
    ("stream", STREAM | {"protect": ranges(PROTECT + 1)}, "protect"),
    ("stream", STREAM | {"order": order(ORDER + 1)}, "order"),
    ("block-plan", {"ops": [{"op": "reuse", "n_tokens": 64}] * (OPS + 1)}, "ops"),
    ("block-plan", {"ops": [{"op": "drop", "names": ["x"] * 5000}] * 4}, "names"),
    ("block-drop", {"names": ["x"] * (NAMES + 1)}, "names"),
    ("block-load", {"names": ["x"] * (NAMES + 1)}, "names"),
    ("attention", {"ranges": [[0, 1]] * (RANGES + 1)}, "ranges"),
    ("attention", {"ranges": "0-1," * 200_000}, "ranges"),
    ("attention", {"bounds": [[0, 1]] * (RANGES + 1)}, "bounds"),
    ("attention", {"products": [[0, 1]] * (RANGES + 1)}, "products"),
    ("attention", {"ranges": [[i % 1900, i % 1900 + 1] for i in range(15000)]} | HEADS, "ranges"),
    ("attention", {"products": [[0, 1899]] * 15}, "products"),
    ("block-drop", {"names": ["x"], "tenant": "t" * 1025}, "tenant"),
    ("block-plan", {"ops": [{"op": "evict", "p0": 0, "p1": 1899}] * 500}, "cover"),
]


def fill(server: Llama) -> Json:
    """Decodes 1900 tokens into slot 0 and captures their attention by head; returns its state."""
    server.erase(0)
    server.act("attn-capture", **CAPTURE)
    server.complete(server.tokens(sample_text(4000))[:1900], 0, n_predict=1)
    return server.slot(0)


@pytest.fixture(scope="module")
def filled_once(two: Llama) -> Iterator[tuple[Llama, Json]]:
    """A server whose slot 0 is filled, and the state that `fill` returned last."""
    yield two, fill(two)
    two.act("attn-capture", layers=[])


@pytest.fixture
def filled(filled_once: tuple[Llama, Json]) -> Llama:
    """Slot 0 as `fill` leaves it; it is filled again only if an earlier test changed it."""
    server, state = filled_once
    if server.slot(0) != state:
        state.clear()
        state.update(fill(server))
    return server


@pytest.mark.parametrize(("action", "body"), LARGEST)
def test_the_largest_permitted_lists_do_not_block_the_main_loop(
    filled: Llama, action: str, body: Json
) -> None:
    best = min(float(filled.act(action, **body)["t_ms"]) for _ in range(3))
    assert best < LONGEST_MS


@pytest.mark.parametrize(("action", "body", "named"), TOO_MANY)
def test_more_than_the_limit_is_refused_and_the_reason_names_it(
    filled: Llama, action: str, body: Json, named: str
) -> None:
    before = filled.slot(0)
    error = filled.refuse(action, **body)
    assert error["code"] == 400 and named in error["message"]
    assert filled.slot(0) == before


@pytest.mark.parametrize("value", [2**31, 2**32 + 5, 2**40, 2**63, 2**64 - 1, -1, -(2**40)])
def test_64_bit_numbers_out_of_range_are_refused_not_truncated(filled: Llama, value: int) -> None:
    bodies: list[tuple[str, Json]] = [
        ("stream", STREAM | {"protect": [[0, value]]}),
        ("stream", STREAM | {"protect": [[value, value]]}),
        ("stream", STREAM | {"budget": value}),
        ("stream", STREAM | {"order": [{"name": "a", "p0": 0, "p1": value}]}),
        ("block-save", {"name": "a", "p0": 0, "p1": value}),
        ("block-evict", {"p0": value, "p1": 64}),
        ("block-adopt", {"tokens": [1, value], "names": ["a"]}),
        ("attention", {"ranges": [[value, 4]]}),
    ]
    before = filled.slot(0)
    for action, body in bodies:
        assert filled.refuse(action, **body)["code"] == 400, (action, body)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    request = {"dialect": "chat", "body": chat, "compact": True, "known": [[value, "0" * 16]]}
    status, answer = filled.ask("POST", "/evoke/render", request)
    assert status == (200 if value == 2**31 - 1 else 400), answer
    assert filled.slot(0) == before


def test_a_too_large_call_is_refused_with_the_limit_it_exceeds(filled: Llama) -> None:
    """As many ranges as the limit allows are computed."""
    error = filled.refuse("attention", products=[[0, 1899]] * 15)
    assert error["type"] == "too_much_work" and error["needed"] > error["allowed"]
    count = 15 * error["allowed"] // error["needed"]
    answer = filled.act("attention", products=[[0, 1899]] * count)
    assert answer["key_products"]["known"] == [True] * count
    assert filled.refuse("attention", products=[[0, 1899]] * (count + 1))["type"] == error["type"]


def test_the_cost_of_masses_does_not_grow_with_overlapping_ranges(filled: Llama) -> None:
    def milliseconds(count: int) -> float:
        body: Json = {"ranges": [[0, 1899]] * count} | HEADS
        return min(float(filled.act("attention", **body)["t_ms"]) for _ in range(20))

    assert milliseconds(15) < 3.0 * milliseconds(1)


def test_protected_ranges_are_sorted_and_merged(filled: Llama) -> None:
    wanted = [[0, 10], [20, 40], [50, 51]]
    for protect in (wanted, wanted[::-1], [[0, 5], [5, 10], [50, 51], [30, 40], [20, 35], [7, 7]]):
        filled.act("stream", budget=1800, sink=0, recent=16, block=16, protect=protect)
        assert filled.slot(0)["stream"]["protect"] == wanted


def test_another_client_decodes_during_a_large_call(filled: Llama) -> None:
    """No token of slot 1 takes long while slot 0 gets the largest calls, one after the other."""
    longest, done = [0.0], threading.Event()

    def decode() -> None:
        while not done.is_set():
            start = time.monotonic()
            filled.complete([5, 6, 7], 1, marker=False, n_predict=1)
            longest[0] = max(longest[0], time.monotonic() - start)

    other = threading.Thread(target=decode)
    other.start()
    try:
        for action, body in LARGEST:
            answer: Any = filled.act(action, **body)
            assert answer
    finally:
        done.set()
        other.join()
    assert longest[0] < 3.0
