"""300 random operations on two slots: no crash, no wiped slot, no hash that disagrees."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from llama import Json, Llama, story

OPERATIONS = 300


@dataclass
class Model:
    """What the slots must hold, by our own bookkeeping."""

    server: Llama
    chance: random.Random
    held: dict[int, list[int]] = field(default_factory=lambda: {0: [], 1: []})
    saved: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    hashes: dict[tuple[int, ...], str] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)

    def chat(self, slot: int, marked: bool = True) -> None:
        more = self.server.tokens(story(self.chance.randint(5, 60), self.chance.randint(0, 99)))
        prompt = self.held[slot] + more
        if len(prompt) > 1500:
            prompt = more
        answer = self.server.complete(prompt, slot, marked=marked, n_predict=4)
        self.held[slot] = prompt + answer["tokens"][:-1]
        if marked:
            evoke = answer["timings"]["evoke"]
            parts = ("resident_before", "recovered", "decoded", "omitted")
            assert sum(evoke[part] for part in parts) == len(prompt)
        else:
            # a stranger never reads a cache with text missing
            assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == len(prompt)

    def stranger(self, slot: int) -> None:
        self.chat(slot, marked=False)

    def diverge(self, slot: int) -> None:
        cut = self.chance.randint(0, len(self.held[slot]))
        self.held[slot] = self.held[slot][:cut]
        self.chat(slot)

    def erase(self, slot: int) -> None:
        self.server.erase(slot)
        self.held[slot] = []

    def evict(self, slot: int) -> None:
        runs = [r for r in evictable(self.server.slot(slot)) if r[1] - r[0] > 2]
        if not runs:
            return
        start, end = self.chance.choice(runs)
        p0 = self.chance.randint(start, end - 2)
        p1 = self.chance.randint(p0 + 1, end - 1)
        name = f"b{self.chance.randint(0, 40)}"
        done = self.server.act("block-save", slot, name=name, p0=p0, p1=p1, evict=True)
        assert done["n_evicted"] == p1 - p0
        prefix = tuple(self.held[slot][:p1])
        assert self.hashes.setdefault(prefix, done["tokens_hash"]) == done["tokens_hash"]
        self.saved[name] = (prefix, p0)

    def load(self, slot: int) -> None:
        if not self.saved:
            return
        name = self.chance.choice(sorted(self.saved))
        prefix, p0 = self.saved[name]
        resident = self.server.slot(slot)["resident"]
        fits = tuple(self.held[slot][: len(prefix)]) == prefix
        free = not any(a < len(prefix) and p0 < b for a, b in resident)
        status, answer = self.server.ask(
            "POST",
            f"/slots/{slot}?action=block-load",
            {"epoch": self.server.epoch(slot), "names": [name]},
        )
        if fits and free:
            assert status == 200 and answer["n_loaded"] == len(prefix) - p0, answer
        else:
            expected = "already_resident" if fits else "stale_block"
            assert answer["error"]["type"] == expected, answer

    def check(self, slot: int) -> None:
        state = self.server.slot(slot)
        assert state["n_tokens"] == len(self.held[slot])
        assert sum(b - a for a, b in state["resident"]) == state["n_resident"]
        if self.held[slot]:
            assert state["resident"][-1][1] == len(self.held[slot])
            prefix = tuple(self.held[slot])
            assert self.hashes.setdefault(prefix, state["tokens_hash"]) == state["tokens_hash"]


def evictable(state: Json) -> list[tuple[int, int]]:
    """The resident ranges of a slot, cut at the rows that are held."""
    cuts = [row for p0, p1 in state["held"] for row in range(p0, p1)]
    runs = []
    for start, end in state["resident"]:
        inside = [row for row in cuts if start <= row < end]
        edges = [start, *(edge for row in inside for edge in (row, row + 1)), end]
        runs += list(zip(edges[::2], edges[1::2], strict=True))
    return runs


def play(server: Llama, operations: int) -> int:
    """Random operations on slots 0 and 1, each followed by a look at both; how many were done."""
    model = Model(server, random.Random(20260101))
    for slot in (0, 1):
        model.erase(slot)
    choices = ["chat", "evict", "evict", "load", "load", "stranger", "diverge", "erase"]
    weights = [30, 15, 15, 20, 10, 8, 8, 3]
    for _ in range(operations):
        name = model.chance.choices(choices, weights)[0]
        slot = model.chance.randint(0, 1)
        getattr(model, name)(slot)
        model.done[name] = model.done.get(name, 0) + 1
        for each in (0, 1):
            model.check(each)
    assert set(model.done) == set(choices)
    assert len(set(model.hashes.values())) == len(model.hashes)
    return sum(model.done.values())


@pytest.mark.parametrize("layout", ["two", "shared"])
def test_random_operations(request: pytest.FixtureRequest, layout: str) -> None:
    assert play(request.getfixturevalue(layout), OPERATIONS) == OPERATIONS
