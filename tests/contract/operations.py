"""Runs random operations on two slots of a server and compares the slots with a model.

Each row is compared by its checksum, position by position: a row does not change until it is
decoded again, and a row loaded from a copy is the row that was saved under that name.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from llama import Json, Llama, sample_text

MOST_TOKENS = 1500
PARTS = ("resident_before", "recovered", "decoded", "omitted")
WEIGHTS = {
    "chat": 30, "evict": 30, "load": 15, "recover": 10, "unmarked_chat": 10, "diverge": 8,
    "erase": 3, "set_budget": 6, "swap": 8, "adopt": 4, "reuse": 3, "drop": 3, "restore": 2,
    "compact": 3, "insert": 3, "capture": 4, "decode_again": 6,
}  # fmt: skip
SCALES = (0.0, 0.5, 1.0)  # scales of the adapter, if the server has one

Rows = dict[int, str]  # a checksum of each row, by position


@dataclass
class Copy:
    """The rows saved under one name."""

    prefix: tuple[int, ...]
    """The tokens from the start of the prompt to the end of the copy."""
    p0: int
    """The first position of the copy."""
    scale: float
    """The adapter's scale when the rows were decoded."""
    visibility: str
    """The server's hash of what the rows have seen."""
    rows: Rows | None
    """None if the server made the copy itself, during a turn."""


@dataclass
class Model:
    """What slots 0 and 1 must contain, and the operations that change it."""

    server: Llama
    rng: random.Random
    cached: dict[int, list[int]] = field(default_factory=lambda: {0: [], 1: []})
    """The tokens of each slot."""
    budget: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    """The budget of each slot in tokens; 0 for none."""
    saved: dict[str, Copy] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=lambda: {0: {}, 1: {}})
    compared: int = 0
    """How many rows were loaded from copies and compared."""
    scale: dict[int, float] = field(default_factory=lambda: {0: 1.0, 1: 1.0})
    adapted: bool = False
    """Whether the server has an adapter."""
    hashes: dict[tuple[float, ...], str] = field(default_factory=dict)
    """The server's hash of each (scale, *tokens)."""
    done: dict[str, int] = field(default_factory=dict)
    """How often each operation was run."""
    cells: int = 0
    evicts: bool = False
    """Whether the server evicts without a budget when no cell is free."""
    sinks: bool = False
    """Whether the model has attention sinks: then a row of attention sums to less than 1."""

    def __post_init__(self) -> None:
        props = self.server.get("/props")
        self.sinks, evoke = "gpt-oss" in props["model_path"], props["evoke"]
        self.adapted = bool(self.server.get("/lora-adapters"))
        self.cells, self.evicts = evoke["limits"]["n_cells"], evoke["kv_eviction"]["mode"] != "off"

    def chat(self, slot: int, marker: bool = True) -> None:
        more = self.server.tokens(sample_text(self.rng.randint(5, 60), self.rng.randint(0, 99)))
        prompt = self.cached[slot] + more
        if len(prompt) > MOST_TOKENS:
            prompt = more
        self._complete(slot, prompt, marker)

    def _complete(self, slot: int, prompt: list[int], marker: bool = True, count: int = 4) -> None:
        lora = [{"id": 0, "scale": self.scale[slot]}]
        more_fields = {"lora": lora} if self.adapted else {}
        answer = self.server.complete(prompt, slot, marker=marker, n_predict=count, **more_fields)
        self.cached[slot] = prompt + answer["tokens"][:-1]
        if not marker:
            self.budget[slot] = 0
        evoke = answer["timings"].get("evoke")
        decoded = evoke["decoded"] if evoke else answer["timings"]["prompt_n"]
        self._forget_auto_evicted(slot, evoke["auto_evicted"] if evoke else [])
        self._forget_rows(slot, len(prompt) - decoded)
        assert evoke or not (marker or self.evicts)
        if evoke:
            assert sum(evoke[part] for part in PARTS) == len(prompt)
            budget = self.budget[slot]
            assert evoke["budget"] == budget
            assert evoke["n_resident"] <= (budget or self.cells) or evoke["budget_breaches"]
        if not marker and (not evoke or (len(prompt) <= self.cells and not evoke["auto_evicted"])):
            # an unmarked request never reads a cache with holes, except those made while it runs
            assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == len(prompt)

    def decode_again(self, slot: int) -> None:
        """Decodes the text of a copy again, saves it under another name and loads that.

        Part of the text before it is evicted in half of the cases.
        """
        if not self.saved:
            return
        copy = self.saved[self.rng.choice(sorted(self.saved))]
        p0, p1 = copy.p0, len(copy.prefix)
        self.erase(slot)
        cut = self.rng.randint(1, max(1, p0))
        self._complete(slot, list(copy.prefix[:cut]), count=1)
        if cut > 16 and self.rng.random() < 0.5:
            self._call("block-evict", slot, p0=4, p1=cut - 4)
        self._complete(slot, [*copy.prefix, *copy.prefix[:5]], count=1)
        self.check(slot)
        whole = any(a <= p0 and p1 <= b for a, b in evictable(self.server.slot(slot)))
        if not whole:
            return  # part of it was evicted again, or may not be evicted
        done = self.server.act("block-save", slot, name="decoded again", p0=p0, p1=p1, evict=True)
        self._record_copy(slot, "decoded again", (p0, p1), done["visibility"])
        if p1 - p0 <= self._room(slot, self.server.slot(slot)):
            self.server.act("block-load", slot, names=["decoded again"])
            self._record_load(slot, ["decoded again"])

    def unmarked_chat(self, slot: int) -> None:
        self.chat(slot, marker=False)

    def rescale(self, slot: int) -> None:
        """Chats with the adapter at another scale, so that no cached row can be reused."""
        self.scale[slot] = self.rng.choice([s for s in SCALES if s != self.scale[slot]])
        self.budget[slot] = 0
        self._forget_rows(slot, 0)
        self.chat(slot)

    def diverge(self, slot: int) -> None:
        cut = self.rng.randint(0, len(self.cached[slot]))
        self.cached[slot] = self.cached[slot][:cut]
        self.chat(slot)

    def erase(self, slot: int) -> None:
        self.server.erase(slot)
        self.cached[slot], self.budget[slot] = [], 0
        self._forget_rows(slot, 0)

    def set_budget(self, slot: int) -> None:
        budget = self.rng.choice([0, 128, 256, 700])
        self.server.act("stream", slot, budget=budget, sink=4, recent=32, block=32)
        self.budget[slot] = budget
        self.chat(slot)

    def evict(self, slot: int) -> None:
        chosen = self._evictable(slot)
        if chosen is None:
            return
        p0, p1 = chosen
        name = f"b{self.rng.randint(0, 40)}"
        done = self.server.act("block-save", slot, name=name, p0=p0, p1=p1, evict=True)
        assert done["n_evicted"] == p1 - p0
        hashed = (self.scale[slot], *self.cached[slot][:p1])
        assert self.hashes.setdefault(hashed, done["tokens_hash"]) == done["tokens_hash"]
        self._record_copy(slot, name, (p0, p1), done["visibility"])

    def load(self, slot: int) -> None:
        """Loads a random block, which may be resident, too large, or of another text."""
        if not self.saved:
            return
        name = self.rng.choice(sorted(self.saved))
        prefix, p0 = self.saved[name].prefix, self.saved[name].p0
        before = self.server.slot(slot)
        fits = tuple(self.cached[slot][: len(prefix)]) == prefix
        fits = fits and self.saved[name].scale == self.scale[slot]
        free = not any(a < len(prefix) and p0 < b for a, b in before["resident"])
        status, answer = self._call("block-load", slot, names=[name])
        kind = "" if status == 200 else answer["error"]["type"]
        if kind == "unknown_block":
            assert name not in {block["name"] for block in before["blocks"]}
            del self.saved[name]
        elif not fits or not free:
            assert kind == ("already_resident" if fits else "stale_block"), answer
        elif kind == "no_free_cells":
            assert len(prefix) - p0 > self._room(slot, before), answer
        else:
            assert status == 200 and answer["n_loaded"] == len(prefix) - p0, answer
            self._record_load(slot, [name])

    def recover(self, slot: int) -> None:
        """Loads several loadable blocks in one plan."""
        state = self.server.slot(slot)
        room, names, taken = self._room(slot, state), list[str](), list[tuple[int, int]]()
        for block in state["blocks"]:
            p0, p1 = block["p0"], block["p1"]
            clear = not any(a < p1 and p0 < b for a, b in [*state["resident"], *taken])
            if clear and not block["stale"] and block["n_tokens"] <= room and len(names) < 4:
                names.append(block["name"])
                taken.append((p0, p1))
                room -= block["n_tokens"]
        if names:
            answer = self.server.act("block-plan", slot, ops=[{"op": "load", "names": names}])
            assert answer["results"][0]["n_loaded"] == sum(p1 - p0 for p0, p1 in taken)
            self._record_load(slot, names)

    def swap(self, slot: int) -> None:
        """Saves and loads in one plan whose load may fail: all of it is done, or nothing."""
        chosen = self._evictable(slot)
        if chosen is None:
            return
        name = self.rng.choice([*sorted(self.saved), "nobody"])
        p0, p1 = chosen
        save = {"op": "save", "name": "swap", "p0": p0, "p1": p1, "evict": True}
        before = self.server.slot(slot)
        status, answer = self._call("block-plan", slot, ops=[save, {"op": "load", "names": [name]}])
        after = self.server.slot(slot)
        if status != 200:
            assert _without_disk_state(after) == _without_disk_state(before), answer
        else:
            assert after["n_resident"] == answer["n_resident"]
            self._record_copy(slot, "swap", (p0, p1), answer["results"][0]["visibility"])
            self._record_load(slot, [name])

    def adopt(self, slot: int) -> None:
        if not self.saved:
            return
        name = self.rng.choice(sorted(self.saved))
        copy = self.saved[name]
        prefix, p0 = copy.prefix, copy.p0
        status, answer = self._call("block-adopt", slot, tokens=prefix, names=[name])
        kind = "" if status == 200 else answer["error"]["type"]
        if kind:
            other = copy.scale != self.scale[slot]
            refusals = ("not_supported_error", "unknown_block", *(["stale_block"] * other))
            assert kind in refusals, answer
            return
        assert answer["n_loaded"] == len(prefix) - p0
        self.cached[slot], self.budget[slot] = list(prefix), 0
        self._forget_rows(slot, 0)
        self._record_load(slot, [name])

    def reuse(self, slot: int) -> None:
        n_tokens = self.rng.randint(0, len(self.cached[slot]))
        self.server.act("block-plan", slot, ops=[{"op": "reuse", "n_tokens": n_tokens}])
        self.chat(slot)

    def capture(self, slot: int) -> None:
        """Captures attention during a chat; each row of attention sums to 1."""
        possible = self.server.get("/props")["evoke"]["limits"]["attention"]["layers"]
        if not possible:  # latent or sparse attention
            return self.chat(slot)
        layers = self.rng.sample(possible, self.rng.randint(1, len(possible)))
        window, per_head = self.rng.randint(1, 64), self.rng.random() < 0.3
        self.server.act("attn-capture", slot, layers=[])
        settings = {"mode": "sum", "window": window, "per_head": per_head, "queries": window // 4}
        self.server.act("attn-capture", slot, layers=layers, **settings)
        self.chat(slot)
        body = {"bounds": self.server.slot(slot)["resident"], "with_queries": True}
        answer = self.server.post(f"/slots/{slot}?action=attention", body)
        rows, total = answer["n_obs"], answer["total"]
        assert rows > 0 and -rows * (1 if self.sinks else 1e-4) < total - rows < rows * 1e-4
        assert all(answer["key_bounds"]["known"])

    def drop(self, slot: int) -> None:
        names = [name for name in sorted(self.saved) if self.rng.random() < 0.2]
        if names:
            self.server.act("block-drop", slot, names=names)
            self.saved = {name: self.saved[name] for name in self.saved if name not in names}

    def restore(self, slot: int) -> None:
        """Saves a slot to its file, erases and restores it; the holes are restored too."""
        before = self.server.slot(slot)
        if not self.cached[slot]:
            return
        name = {"filename": f"slot-{slot}"}
        self.server.post(f"/slots/{slot}?action=save", name)
        self.server.erase(slot)
        self.server.post(f"/slots/{slot}?action=restore", name)
        assert self.server.slot(slot)["resident"] == before["resident"]
        self.budget[slot] = 0

    def compact(self, slot: int) -> None:
        before = self.server.slot(slot)["resident"]
        status, answer = self._call("block-compact", slot)
        if status != 200:
            assert answer["error"]["type"] == "not_supported_error", answer
            return
        self._forget_rows(slot, before[0][1] if before and before[0][0] == 0 else 0)
        kept = [self.cached[slot][a:b] for a, b in before]
        self.cached[slot], self.budget[slot] = [token for part in kept for token in part], 0
        assert answer["n_tokens"] == len(self.cached[slot])

    def insert(self, slot: int) -> None:
        """Loads a random block at a random position."""
        if not self.saved:
            return
        name = self.rng.choice(sorted(self.saved))
        prefix, p0 = self.saved[name].prefix, self.saved[name].p0
        at, cached = (
            self.rng.randint(0, len(self.cached[slot])),
            self.cached[slot],
        )
        status, answer = self._call("block-load", slot, names=[name], at=at)
        kind = "" if status == 200 else answer["error"]["type"]
        if kind:
            allowed = ("not_supported_error", "unknown_block", "no_free_cells")
            full = len(cached) + len(prefix) - p0 >= self.server.slot(slot)["n_ctx_logical"]
            assert kind in allowed or full, answer
            return
        self.cached[slot] = [*cached[:at], *prefix[p0:], *cached[at:]]
        self.budget[slot] = 0
        self._forget_rows(slot, at)

    def check(self, slot: int) -> None:
        state = self.server.slot(slot)
        assert state["n_tokens"] == len(self.cached[slot])
        assert sum(b - a for a, b in state["resident"]) == state["n_resident"]
        assert state["ram"]["used"] <= state["ram"]["budget"]
        if self.cached[slot]:
            assert state["resident"][-1][1] == len(self.cached[slot])
            prefix = (self.scale[slot], *self.cached[slot])
            assert self.hashes.setdefault(prefix, state["tokens_hash"]) == state["tokens_hash"]
        rows = {"epoch": state["epoch"], "p0": 0, "p1": state["n_tokens"]}
        answer = self.server.post(f"/slots/{slot}?action=block-rows", rows)
        there = {at: each for at, each in enumerate(answer["sums"]) if each is not None}
        allowed = self.rows[slot]
        other = [at for at, each in there.items() if allowed.get(at, each) != each]
        assert not other, f"rows at {other} of slot {slot} have changed"
        self.rows[slot] = there

    def compare_after_restart(self, server: Llama) -> int:
        """Loads every copy that a restarted server found on disk; returns the rows compared."""
        self.server, compared = server, 0
        listed = {block["name"]: block for block in server.slot(0)["blocks"]}
        for name, copy in sorted(self.saved.items()):
            if name not in listed or copy.rows is None:
                continue
            assert listed[name]["visibility"] == copy.visibility
            if self.adapted:  # the adapter of the slot's latest request decides which copies fit
                lora = [{"id": 0, "scale": copy.scale}]
                server.complete(list(copy.prefix[:1]), 0, n_predict=1, lora=lora)
            server.act("block-adopt", 0, tokens=copy.prefix, names=[name])
            rows = server.act("block-rows", 0, p0=copy.p0, p1=len(copy.prefix))["sums"]
            assert rows == [copy.rows[at] for at in range(copy.p0, len(copy.prefix))], name
            compared += len(rows)
        return compared

    def _record_copy(self, slot: int, name: str, span: tuple[int, int], visibility: str) -> None:
        """Records a new copy; older names of the same rows share it."""
        p0, p1 = span
        prefix, scale = tuple(self.cached[slot][:p1]), self.scale[slot]
        rows = {at: self.rows[slot][at] for at in range(p0, p1)}
        self.saved[name] = Copy(prefix, p0, scale, visibility, rows)
        for copy in self.saved.values():
            if (copy.prefix, copy.p0, copy.scale) == (prefix, p0, scale):
                copy.rows = rows if copy.visibility == visibility else copy.rows

    def _record_load(self, slot: int, names: Sequence[str]) -> None:
        """Expects the saved rows of these copies in the slot."""
        for name in names:
            rows = self.saved[name].rows if name in self.saved else None
            self.rows[slot].update(rows or {})
            self.compared += len(rows or {})

    def _forget_auto_evicted(
        self, slot: int, evicted: Sequence[tuple[int, int, str | None]]
    ) -> None:
        """Forgets the rows of copies that the server made itself: nobody has read their rows."""
        for p0, p1, _ in evicted:
            for copy in self.saved.values():
                if (copy.p0, len(copy.prefix)) == (p0, p1):
                    copy.rows = None

    def _forget_rows(self, slot: int, first: int) -> None:
        """Forgets the expected rows from position `first` on."""
        self.rows[slot] = {at: each for at, each in self.rows[slot].items() if at < first}

    def _call(self, action: str, slot: int, **body: object) -> tuple[int, Json]:
        body["epoch"] = self.server.epoch(slot)
        return self.server.ask("POST", f"/slots/{slot}?action={action}", body)

    def _room(self, slot: int, state: Json) -> int:
        budget = state["stream"]["budget"]
        free = int(state["n_free"])
        return min(free, budget - state["n_resident"]) if budget else free

    def _evictable(self, slot: int) -> tuple[int, int] | None:
        """A random range that may be evicted; None if there is none."""
        runs = [run for run in evictable(self.server.slot(slot)) if run[1] - run[0] > 2]
        if not runs:
            return None
        start, end = self.rng.choice(runs)
        p0 = self.rng.randint(start, end - 2)
        return p0, self.rng.randint(p0 + 1, end - 1)


def _without_disk_state(state: Json) -> Json:
    """The fields that a refused call must not change; it may still have read copies from disk."""
    changing = {"ram", "disk", "blocks", "version"} if state["disk"] else set()
    return {key: value for key, value in state.items() if key not in changing}


def evictable(state: Json) -> list[tuple[int, int]]:
    """The resident ranges of a slot, without the rows that may not be evicted."""
    cuts = [row for p0, p1 in state["held"] for row in range(p0, p1)]
    runs = []
    for start, end in state["resident"]:
        inside = [row for row in cuts if start <= row < end]
        edges = [start, *(edge for row in inside for edge in (row, row + 1)), end]
        runs += list(zip(edges[::2], edges[1::2], strict=True))
    return runs


def run_operations(
    server: Llama, operations: int, seed: int = 20260101, but: Sequence[str] = ()
) -> Model:
    """Runs random operations on slots 0 and 1, and checks both slots after each.

    Operations named in `but` are left out. Returns the model, with counts in `done`.
    """
    model = Model(server, random.Random(seed))
    for slot in (0, 1):
        model.erase(slot)
    model.server.post("/slots/0?action=block-drop", {"all": True})
    for slot in (0, 1) if model.adapted else ():
        model.chat(slot)  # the first request with an adapter empties its slot
        model.check(slot)
    weighed = WEIGHTS | ({"rescale": 8} if model.adapted else {})
    choices = [name for name in weighed if name not in but]
    weights = [weighed[name] for name in choices]
    for _ in range(operations):
        name = model.rng.choices(choices, weights)[0]
        slot = model.rng.randint(0, 1)
        getattr(model, name)(slot)
        model.done[name] = model.done.get(name, 0) + 1
        for each in (0, 1):
            model.check(each)
        if len(model.hashes) > 500:  # two texts never have the same hash
            assert len(set(model.hashes.values())) == len(model.hashes)
            model.hashes.clear()
    assert len(set(model.hashes.values())) == len(model.hashes)
    return model
