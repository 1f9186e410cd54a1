"""Random operations on two slots of a server, compared with a model of them.

Slots are compared by what their rows hold, position by position: a row stays as it is until it is
decoded again, and a row that comes back from a copy is the row that was saved under that name.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from llama import Json, Llama, sample_text

MOST_TOKENS = 1500
PARTS = ("resident_before", "recovered", "decoded", "omitted")
WEIGHTS = {
    "chat": 30, "evict": 30, "load": 15, "recover": 10, "stranger": 10, "diverge": 8, "erase": 3,
    "hold": 6, "swap": 8, "adopt": 4, "reuse": 3, "drop": 3, "restore": 2, "compact": 3,
    "insert": 3, "attend": 4, "remake": 6,
}  # fmt: skip
SCALES = (0.0, 0.5, 1.0)  # of the adapter, where the server has one

Rows = dict[int, str]  # a checksum of each row, by position


@dataclass
class Copy:
    """What was saved under a name; `rows` are None where nobody could look at them."""

    prefix: tuple[int, ...]
    p0: int
    scale: float
    visibility: str
    rows: Rows | None


@dataclass
class Model:
    """What the slots must hold; `budget` is what their streams hold, 0 when nothing is held."""

    server: Llama
    chance: random.Random
    cached: dict[int, list[int]] = field(default_factory=lambda: {0: [], 1: []})
    budget: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    saved: dict[str, Copy] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=lambda: {0: {}, 1: {}})
    compared: int = 0  # rows that came back from copies
    scale: dict[int, float] = field(default_factory=lambda: {0: 1.0, 1: 1.0})
    adapted: bool = False  # the server has an adapter
    hashes: dict[tuple[float, ...], str] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    cells: int = 0
    evicts: bool = False  # without a budget too, when no cell is free
    sinks: bool = False  # rows of attention sum to 1 without what goes to the model's sinks

    def __post_init__(self) -> None:
        props = self.server.get("/props")
        self.sinks, evoke = "gpt-oss" in props["model_path"], props["evoke"]
        self.adapted = bool(self.server.get("/lora-adapters"))
        self.cells, self.evicts = evoke["limits"]["n_cells"], evoke["kv_eviction"]["mode"] != "off"

    def chat(self, slot: int, marker: bool = True) -> None:
        more = self.server.tokens(
            sample_text(self.chance.randint(5, 60), self.chance.randint(0, 99))
        )
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
        self._went_out(slot, evoke["auto_evicted"] if evoke else [])
        self._forget(slot, len(prompt) - decoded)
        assert evoke or not (marker or self.evicts)
        if evoke:
            assert sum(evoke[part] for part in PARTS) == len(prompt)
            budget = self.budget[slot]
            assert evoke["budget"] == budget
            assert evoke["n_resident"] <= (budget or self.cells) or evoke["budget_breaches"]
        if not marker and (not evoke or (len(prompt) <= self.cells and not evoke["auto_evicted"])):
            # a stranger never reads a cache with text missing, but for what left while it was read
            assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == len(prompt)

    def remake(self, slot: int) -> None:
        """Text of which there is a copy is decoded again, with all before it visible or not, saved
        under another name, and brought back by that."""
        if not self.saved:
            return
        copy = self.saved[self.chance.choice(sorted(self.saved))]
        p0, p1 = copy.p0, len(copy.prefix)
        self.erase(slot)
        cut = self.chance.randint(1, max(1, p0))
        self._complete(slot, list(copy.prefix[:cut]), count=1)
        if cut > 16 and self.chance.random() < 0.5:
            self._ask("block-evict", slot, p0=4, p1=cut - 4)
        self._complete(slot, [*copy.prefix, *copy.prefix[:5]], count=1)
        self.check(slot)
        whole = any(a <= p0 and p1 <= b for a, b in evictable(self.server.slot(slot)))
        if not whole:
            return  # some of it has left again, or must stay
        done = self.server.act("block-save", slot, name="remade", p0=p0, p1=p1, evict=True)
        self._keep(slot, "remade", (p0, p1), done["visibility"])
        if p1 - p0 <= self._room(slot, self.server.slot(slot)):
            self.server.act("block-load", slot, names=["remade"])
            self._was_recovered(slot, ["remade"])

    def stranger(self, slot: int) -> None:
        self.chat(slot, marker=False)

    def dress(self, slot: int) -> None:
        """The adapter at another scale: nothing of what is there is of use."""
        self.scale[slot] = self.chance.choice([s for s in SCALES if s != self.scale[slot]])
        self.budget[slot] = 0
        self._forget(slot, 0)
        self.chat(slot)

    def diverge(self, slot: int) -> None:
        cut = self.chance.randint(0, len(self.cached[slot]))
        self.cached[slot] = self.cached[slot][:cut]
        self.chat(slot)

    def erase(self, slot: int) -> None:
        self.server.erase(slot)
        self.cached[slot], self.budget[slot] = [], 0
        self._forget(slot, 0)

    def hold(self, slot: int) -> None:
        budget = self.chance.choice([0, 128, 256, 700])
        self.server.act("stream", slot, budget=budget, sink=4, recent=32, block=32)
        self.budget[slot] = budget
        self.chat(slot)

    def evict(self, slot: int) -> None:
        chosen = self._evictable(slot)
        if chosen is None:
            return
        p0, p1 = chosen
        name = f"b{self.chance.randint(0, 40)}"
        done = self.server.act("block-save", slot, name=name, p0=p0, p1=p1, evict=True)
        assert done["n_evicted"] == p1 - p0
        hashed = (self.scale[slot], *self.cached[slot][:p1])
        assert self.hashes.setdefault(hashed, done["tokens_hash"]) == done["tokens_hash"]
        self._keep(slot, name, (p0, p1), done["visibility"])

    def load(self, slot: int) -> None:
        """Some block, whether or not it fits, is free or is of this text."""
        if not self.saved:
            return
        name = self.chance.choice(sorted(self.saved))
        prefix, p0 = self.saved[name].prefix, self.saved[name].p0
        before = self.server.slot(slot)
        fits = tuple(self.cached[slot][: len(prefix)]) == prefix
        fits = fits and self.saved[name].scale == self.scale[slot]
        free = not any(a < len(prefix) and p0 < b for a, b in before["resident"])
        status, answer = self._ask("block-load", slot, names=[name])
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
            self._was_recovered(slot, [name])

    def recover(self, slot: int) -> None:
        """Several blocks that can come back, in one plan, and the one that they are."""
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
            self._was_recovered(slot, names)

    def swap(self, slot: int) -> None:
        """A plan of which one op may be wrong: all of it or nothing."""
        chosen = self._evictable(slot)
        if chosen is None:
            return
        name = self.chance.choice([*sorted(self.saved), "nobody"])
        p0, p1 = chosen
        save = {"op": "save", "name": "swap", "p0": p0, "p1": p1, "evict": True}
        before = self.server.slot(slot)
        status, answer = self._ask("block-plan", slot, ops=[save, {"op": "load", "names": [name]}])
        after = self.server.slot(slot)
        if status != 200:
            assert _but_for_disk(after) == _but_for_disk(before), answer
        else:
            assert after["n_resident"] == answer["n_resident"]
            self._keep(slot, "swap", (p0, p1), answer["results"][0]["visibility"])
            self._was_recovered(slot, [name])

    def adopt(self, slot: int) -> None:
        if not self.saved:
            return
        name = self.chance.choice(sorted(self.saved))
        copy = self.saved[name]
        prefix, p0 = copy.prefix, copy.p0
        status, answer = self._ask("block-adopt", slot, tokens=prefix, names=[name])
        kind = "" if status == 200 else answer["error"]["type"]
        if kind:
            other = copy.scale != self.scale[slot]
            refusals = ("not_supported_error", "unknown_block", *(["stale_block"] * other))
            assert kind in refusals, answer
            return
        assert answer["n_loaded"] == len(prefix) - p0
        self.cached[slot], self.budget[slot] = list(prefix), 0
        self._forget(slot, 0)
        self._was_recovered(slot, [name])

    def reuse(self, slot: int) -> None:
        n_tokens = self.chance.randint(0, len(self.cached[slot]))
        self.server.act("block-plan", slot, ops=[{"op": "reuse", "n_tokens": n_tokens}])
        self.chat(slot)

    def attend(self, slot: int) -> None:
        """Attention is captured from now on; each row that is counted sums to 1."""
        possible = self.server.get("/props")["evoke"]["limits"]["attention"]["layers"]
        layers = self.chance.sample(possible, self.chance.randint(1, len(possible)))
        window, per_head = self.chance.randint(1, 64), self.chance.random() < 0.3
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
        names = [name for name in sorted(self.saved) if self.chance.random() < 0.2]
        if names:
            self.server.act("block-drop", slot, names=names)
            self.saved = {name: self.saved[name] for name in self.saved if name not in names}

    def restore(self, slot: int) -> None:
        """A slot through its file, holes and all."""
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
        status, answer = self._ask("block-compact", slot)
        if status != 200:
            assert answer["error"]["type"] == "not_supported_error", answer
            return
        self._forget(slot, before[0][1] if before and before[0][0] == 0 else 0)
        kept = [self.cached[slot][a:b] for a, b in before]
        self.cached[slot], self.budget[slot] = [token for part in kept for token in part], 0
        assert answer["n_tokens"] == len(self.cached[slot])

    def insert(self, slot: int) -> None:
        """Some block at some place."""
        if not self.saved:
            return
        name = self.chance.choice(sorted(self.saved))
        prefix, p0 = self.saved[name].prefix, self.saved[name].p0
        at, cached = (
            self.chance.randint(0, len(self.cached[slot])),
            self.cached[slot],
        )
        status, answer = self._ask("block-load", slot, names=[name], at=at)
        kind = "" if status == 200 else answer["error"]["type"]
        if kind:
            allowed = ("not_supported_error", "unknown_block", "no_free_cells")
            full = len(cached) + len(prefix) - p0 >= self.server.slot(slot)["n_ctx_logical"]
            assert kind in allowed or full, answer
            return
        self.cached[slot] = [*cached[:at], *prefix[p0:], *cached[at:]]
        self.budget[slot] = 0
        self._forget(slot, at)

    def check(self, slot: int) -> None:
        state = self.server.slot(slot)
        assert state["n_tokens"] == len(self.cached[slot])
        assert sum(b - a for a, b in state["resident"]) == state["n_resident"]
        assert state["ram"]["used"] <= state["ram"]["budget"]
        if self.cached[slot]:
            assert state["resident"][-1][1] == len(self.cached[slot])
            prefix = (self.scale[slot], *self.cached[slot])
            assert self.hashes.setdefault(prefix, state["tokens_hash"]) == state["tokens_hash"]
        answer = self.server.act("block-rows", slot, p0=0, p1=state["n_tokens"])
        there = {at: each for at, each in enumerate(answer["sums"]) if each is not None}
        allowed = self.rows[slot]
        other = [at for at, each in there.items() if allowed.get(at, each) != each]
        assert not other, f"rows at {other} of slot {slot} are not those that were there"
        self.rows[slot] = there

    def outlived(self, server: Llama) -> int:
        """Bring back every copy that another server of the same kind has found in the folder of the
        first; how many rows were compared."""
        self.server, compared = server, 0
        listed = {block["name"]: block for block in server.slot(0)["blocks"]}
        for name, copy in sorted(self.saved.items()):
            if name not in listed or copy.rows is None:
                continue
            assert listed[name]["visibility"] == copy.visibility
            if self.adapted:  # copies are those of the adapters of the slot's latest request
                lora = [{"id": 0, "scale": copy.scale}]
                server.complete(list(copy.prefix[:1]), 0, n_predict=1, lora=lora)
            server.act("block-adopt", 0, tokens=copy.prefix, names=[name])
            rows = server.act("block-rows", 0, p0=copy.p0, p1=len(copy.prefix))["sums"]
            assert rows == [copy.rows[at] for at in range(copy.p0, len(copy.prefix))], name
            compared += len(rows)
        return compared

    def _keep(self, slot: int, name: str, span: tuple[int, int], visibility: str) -> None:
        """A copy was made of rows that were there; every name of that copy has these now."""
        p0, p1 = span
        prefix, scale = tuple(self.cached[slot][:p1]), self.scale[slot]
        rows = {at: self.rows[slot][at] for at in range(p0, p1)}
        self.saved[name] = Copy(prefix, p0, scale, visibility, rows)
        for copy in self.saved.values():
            if (copy.prefix, copy.p0, copy.scale) == (prefix, p0, scale):
                copy.rows = rows if copy.visibility == visibility else copy.rows

    def _was_recovered(self, slot: int, names: Sequence[str]) -> None:
        """Rows of these copies were written into the cells: they must be what was saved."""
        for name in names:
            rows = self.saved[name].rows if name in self.saved else None
            self.rows[slot].update(rows or {})
            self.compared += len(rows or {})

    def _went_out(self, slot: int, evicted: Sequence[tuple[int, int, str | None]]) -> None:
        """The engine has made copies during a turn, of rows that nobody could look at then."""
        for p0, p1, _ in evicted:
            for copy in self.saved.values():
                if (copy.p0, len(copy.prefix)) == (p0, p1):
                    copy.rows = None

    def _forget(self, slot: int, first: int) -> None:
        """Rows from here on are decoded again, moved or gone."""
        self.rows[slot] = {at: each for at, each in self.rows[slot].items() if at < first}

    def _ask(self, action: str, slot: int, **body: object) -> tuple[int, Json]:
        body["epoch"] = self.server.epoch(slot)
        return self.server.ask("POST", f"/slots/{slot}?action={action}", body)

    def _room(self, slot: int, state: Json) -> int:
        budget = state["stream"]["budget"]
        free = int(state["n_free"])
        return min(free, budget - state["n_resident"]) if budget else free

    def _evictable(self, slot: int) -> tuple[int, int] | None:
        """A range that may go: what must stay of a slot is not in it."""
        runs = [run for run in evictable(self.server.slot(slot)) if run[1] - run[0] > 2]
        if not runs:
            return None
        start, end = self.chance.choice(runs)
        p0 = self.chance.randint(start, end - 2)
        return p0, self.chance.randint(p0 + 1, end - 1)


def _but_for_disk(state: Json) -> Json:
    """What a refused call leaves as it was: what it wanted may have come from disk all the same."""
    moving = {"ram", "disk", "blocks", "version"} if state["disk"] else set()
    return {key: value for key, value in state.items() if key not in moving}


def evictable(state: Json) -> list[tuple[int, int]]:
    """The resident ranges of a slot, cut at the rows that are held."""
    cuts = [row for p0, p1 in state["held"] for row in range(p0, p1)]
    runs = []
    for start, end in state["resident"]:
        inside = [row for row in cuts if start <= row < end]
        edges = [start, *(edge for row in inside for edge in (row, row + 1)), end]
        runs += list(zip(edges[::2], edges[1::2], strict=True))
    return runs


def play(server: Llama, operations: int, seed: int = 20260101, but: Sequence[str] = ()) -> Model:
    """Random operations on slots 0 and 1, each followed by a look at both; what was done.

    `but` names those that are left out.
    """
    model = Model(server, random.Random(seed))
    for slot in (0, 1):
        model.erase(slot)
    model.server.post("/slots/0?action=block-drop", {"all": True})
    for slot in (0, 1) if model.adapted else ():
        model.chat(slot)  # the first request with an adapter empties its slot
        model.check(slot)
    weighed = WEIGHTS | ({"dress": 8} if model.adapted else {})
    choices = [name for name in weighed if name not in but]
    weights = [weighed[name] for name in choices]
    for _ in range(operations):
        name = model.chance.choices(choices, weights)[0]
        slot = model.chance.randint(0, 1)
        getattr(model, name)(slot)
        model.done[name] = model.done.get(name, 0) + 1
        for each in (0, 1):
            model.check(each)
        if len(model.hashes) > 500:  # of long prefixes; two texts never have one hash
            assert len(set(model.hashes.values())) == len(model.hashes)
            model.hashes.clear()
    assert len(set(model.hashes.values())) == len(model.hashes)
    return model
