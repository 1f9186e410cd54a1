"""Compacting a slot and loading at another position: keys are rotated, with rounding errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from llama import Llama, distributions, largest_difference, running, sample_text

from bench.random_models import SHAPES, ensure

STEPS, VOCABULARY = 12, 2048
BLOCK = (60, 180)
YARN = ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "2048")
KINDS = {
    "f16": (("-fa", "on"), 0.02),
    "f16 without flash attention": (("-fa", "off"), 0.02),
    "q8_0": (("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"), 0.05),
    "q4_0": (("-fa", "on", "-ctk", "q4_0", "-ctv", "q4_0"), 0.3),
    "yarn": (("-fa", "on", *YARN), 0.02),
}


@contextmanager
def serving(*options: str, shape: str = "tiny-dense") -> Iterator[Llama]:
    usual = ("-c", "4096", "--evoke-ram", "16", "-np", "1")
    with running(True, *usual, *options, model=ensure(SHAPES[shape])) as server:
        yield server


def read(server: Llama, prompt: list[int], slot: int = 0) -> tuple[list[dict[int, float]], int]:
    """Decodes greedily; returns all log probabilities of each step, and the tokens decoded."""
    fields = {"n_predict": STEPS, "n_probs": VOCABULARY, "grammar": "root ::= [ -~]*"}
    answer = server.complete(prompt, slot, **fields)
    found = distributions(answer)
    assert all(len(step) == VOCABULARY for step in found)
    return found, answer["timings"]["evoke"]["decoded"]


def start_conversation(server: Llama) -> list[int]:
    """Starts a new conversation in slot 0 and saves one block of it; returns its tokens."""
    server.erase()
    prompt = server.tokens(sample_text(300))
    server.complete(prompt, n_predict=1)
    server.act("block-save", name="b", p0=BLOCK[0], p1=BLOCK[1])
    return prompt


def evict_and_load_between(server: Llama) -> None:
    """Evicts the block, closes the gap, and loads the block at its old position."""
    server.act("block-evict", names=["b"])
    closed = server.act("block-compact")
    assert closed["n_closed"] == BLOCK[1] - BLOCK[0]
    server.act("block-load", names=["b"], at=BLOCK[0])


def round_trips(server: Llama, count: int) -> float:
    """The largest difference of log probabilities after `count` round trips and after none."""
    prompt = start_conversation(server)
    tail = server.tokens(sample_text(20, seed=3))
    whole, _ = read(server, prompt + tail)
    prompt = start_conversation(server)
    for _ in range(count):
        evict_and_load_between(server)
        server.complete(prompt, n_predict=1)  # rotates the keys now, not with the next trip
    repeated, decoded = read(server, prompt + tail)
    assert decoded == len(tail)
    return largest_difference(whole, repeated)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_errors_of_round_trips_do_not_accumulate(kind: str) -> None:
    options, tolerance = KINDS[kind]
    with serving(*options) as server:
        once, ten = round_trips(server, 1), round_trips(server, 10)
        assert 0 < once < tolerance and 0 < ten < 2 * tolerance


def test_compact_closes_gaps_and_decoding_continues_from_the_shorter_text() -> None:
    with serving() as server:
        prompt = start_conversation(server)
        server.act("block-evict", p0=BLOCK[0], p1=BLOCK[1])
        server.act("block-evict", p0=BLOCK[1] + 20, p1=BLOCK[1] + 30)
        epoch = server.epoch()
        closed = server.act("block-compact")
        short = prompt[: BLOCK[0]] + prompt[BLOCK[1] : BLOCK[1] + 20] + prompt[BLOCK[1] + 30 :]
        assert closed["n_tokens"] == len(short) == len(prompt) - closed["n_closed"]
        assert closed["n_moved"] == len(short) - BLOCK[0]
        assert closed["epoch"] == server.epoch() != epoch
        assert server.slot()["resident"] == [[0, len(short)]]
        tail = server.tokens(sample_text(20, seed=3))
        _, decoded = read(server, short + tail)
        assert decoded == len(tail)
        assert server.act("block-compact")["n_moved"] == 0


def test_a_block_is_loaded_at_the_end_of_another_text() -> None:
    with serving() as server:
        prompt = start_conversation(server)
        block, other = prompt[BLOCK[0] : BLOCK[1]], server.tokens(sample_text(60, seed=9))
        server.erase()
        server.complete(other, n_predict=1)
        joined = server.act("block-load", names=["b"], at=len(other))
        assert joined["n_tokens"] == len(other) + len(block)
        assert joined["turned"] == len(other) - BLOCK[0]
        tail = server.tokens(sample_text(20, seed=3))
        answer = server.complete(other + block + tail)
        accounting = answer["timings"]["evoke"]
        assert (accounting["recovered"], accounting["decoded"]) == (len(block), len(tail))


def test_blocks_saved_before_a_shift_are_saved_rotated() -> None:
    def moved(server: Llama, through_the_pool: bool) -> list[dict[int, float]]:
        prompt = start_conversation(server)
        server.act("block-evict", names=["b"])
        server.act("block-compact")
        if through_the_pool:
            server.act("block-save", name="m", p0=70, p1=100, evict=True)
            server.act("block-load", names=["m"])
        return read(server, prompt[: BLOCK[0]] + prompt[BLOCK[1] :] + [7])[0]

    with serving() as server:
        assert moved(server, True) == moved(server, False)


@pytest.mark.parametrize("kind", KINDS)
def test_compact_does_not_change_other_slots(kind: str, tmp_path: Path) -> None:
    """A shift rotates the keys of all slots: those that shift by 0 keep every bit."""

    def saved_state(server: Llama, name: str) -> bytes:
        server.post("/slots/1?action=save", {"filename": name})
        return (tmp_path / name).read_bytes()

    options = ("-np", "2", "-kvu", "--slot-save-path", str(tmp_path), *KINDS[kind][0])
    with serving(*options) as server:
        prompt = start_conversation(server)
        server.complete(server.tokens(sample_text(100, seed=4)), 1, n_predict=1)
        before = saved_state(server, "before")
        evict_and_load_between(server)
        server.complete([*prompt, 7])
        assert saved_state(server, "after") == before


@pytest.mark.parametrize("shape", ["tiny-gemma", "tiny-jamba", "tiny-qwen2vl"])
def test_compact_is_refused_where_keys_cannot_be_rotated(shape: str) -> None:
    with serving(shape=shape) as server:
        assert "compact" not in server.get("/props")["evoke"]["features"]
        start_conversation(server)
        before = server.slot()
        calls: list[tuple[str, dict[str, Any]]] = [
            ("block-compact", {}), ("block-load", {"names": ["b"], "at": 0}),
        ]  # fmt: skip
        for action, body in calls:
            error = server.refuse(action, **body)
            assert (error["code"], error["type"]) == (501, "not_supported_error")
        assert server.slot() == before


def test_a_refused_compact_changes_nothing() -> None:
    with serving() as server:
        prompt = start_conversation(server)
        before = server.slot()
        for code, body in (
            (400, {"names": ["b"], "at": len(prompt) + 1}),
            (400, {"names": ["b"], "at": -1}),
            (400, {"names": ["b", "b"], "at": 0}),
            (404, {"names": ["unknown"], "at": 0}),
            (409, {"names": ["b"], "at": 0, "epoch": 1}),
            (400, {"names": ["b"], "at": "end"}),
        ):
            assert server.refuse("block-load", **body)["code"] == code
        assert server.refuse("block-compact", epoch=1)["code"] == 409
        assert server.slot() == before
