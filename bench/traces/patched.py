"""The patched llama-server without its arithmetic: slots, cells, copies and their rules.

Answers the calls of the proxy as patches/API.md describes them, for a dense memory whose slots do
not share cells. A call is checked first and then run, so that a refused call changes nothing."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from multidict import CIMultiDict

from bench.slot_rows import TokenizedChat, evictions, rendering, spans_of
from bench.traces.replay import DEFAULT_COSTS, Costs
from bench.traces.texts import Reader, Scale, Tokens
from evoke_proxy.adapters.llama.client import CallOptions
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import DecodeBudget
from evoke_proxy.core.prompt.rendered import common_prefix
from evoke_proxy.errors import UpstreamRejected

# What identifies a copy: range, hash of all tokens up to its end, and visibility (0: whole).
Key = tuple[int, int, int, int]


@dataclass(slots=True)
class Copy:
    """The rows of one range."""

    key: Key  # what identifies it
    # Its labels, each with the session that has it.
    names: dict[str, str] = field(default_factory=dict)
    version: int = 0  # number of the latest change that `GET /slots/{id}/blocks` reports
    on_disk: bool = False  # whether only a file has the rows

    @property
    def size(self) -> int:
        """Tokens."""
        return self.key[1] - self.key[0]


class Refusal(UpstreamRejected):
    """The server refuses a call."""

    def __init__(self, status: int, type: str, name: str | None = None) -> None:
        error = {"code": status, "type": type, "message": f"{type} {name or ''}", "name": name}
        super().__init__(status, orjson.dumps({"error": error}))
        self.type = type


class PoolFull(Refusal):
    """The copies of one call do not fit the host memory."""

    def __init__(self) -> None:
        super().__init__(413, "ram_budget")


class BlockPool:
    """Copies of one tenant, the least recently used lost first."""

    def __init__(self, ram: int, disk: int = 0) -> None:
        """`ram` and `disk` are the tokens that fit there."""
        self.ram, self.disk = ram, disk
        self.ram_used = self.disk_used = 0
        self.version = 0  # number of the latest change
        self.n_lost = 0  # tokens of copies that were lost because there was no room
        self.copies: OrderedDict[Key, Copy] = OrderedDict()
        self.names: dict[str, Copy] = {}
        # Of the copies, those in host memory: the order in which they leave it.
        self._in_ram: OrderedDict[Key, Copy] = OrderedDict()

    def add(self, key: Key, name: str, session: str) -> bool:
        """Give a range this name; return whether its rows had to be copied.

        Raises PoolFull, and then changes nothing, when it is larger than the host memory.
        """
        is_new = key not in self.copies
        if is_new:
            self._put(Copy(key))
            self.copies[key] = self._in_ram[key]
        self.rename(self.copies[key], name, session)
        return is_new

    def rename(self, copy: Copy, name: str, session: str) -> None:
        """Use a copy, and give it one more name, which its previous copy loses."""
        before = self.names.get(name)
        if before is not copy and before is not None:
            self._remove_name(before, name)
        self.names[name] = copy
        copy.names[name] = session
        self.version += 1
        copy.version = self.version
        self.use(copy)

    def use(self, copy: Copy) -> None:
        """Make a copy the latest used."""
        self.copies.move_to_end(copy.key)
        if copy.key in self._in_ram:
            self._in_ram.move_to_end(copy.key)

    def read(self, copies: Iterable[Copy]) -> int:
        """Bring copies into host memory; return the tokens that were read from disk."""
        n_read = 0
        for copy in copies:
            if copy.on_disk:
                if copy.size > self.ram:
                    raise PoolFull
                copy.on_disk = False  # so that it is not lost to make room
                self.disk_used -= copy.size
                self._put(copy)
                n_read += copy.size
            self.use(copy)
        return n_read

    def drop(self, name: str) -> bool:
        """Delete a name, and the copy with its last name; return whether it existed."""
        copy = self.names.get(name)
        if copy is None:
            return False
        self._remove_name(copy, name)
        return True

    def _remove_name(self, copy: Copy, name: str) -> None:
        del self.names[name]
        del copy.names[name]
        if not copy.names:
            self._delete(copy)

    def _delete(self, copy: Copy) -> None:
        del self.copies[copy.key]
        if self._in_ram.pop(copy.key, None) is not None:
            self.ram_used -= copy.size
        else:
            self.disk_used -= copy.size
        for name in copy.names:
            del self.names[name]

    def _put(self, copy: Copy) -> None:
        """Put a copy into host memory; the oldest ones there are moved or lost to make room."""
        if copy.size > self.ram:
            raise PoolFull
        while self.ram_used + copy.size > self.ram:
            key, oldest = self._in_ram.popitem(last=False)
            if not self._move_to_disk(oldest):
                self._in_ram[key] = oldest
                self._delete(oldest)
                self.n_lost += oldest.size
        self._in_ram[copy.key] = copy
        self.ram_used += copy.size

    def _move_to_disk(self, copy: Copy) -> bool:
        """Move a copy that has left `_in_ram`; False where the disk cannot take it."""
        if copy.size > self.disk:
            return False
        while self.disk_used + copy.size > self.disk:
            oldest = next(each for each in self.copies.values() if each.on_disk)
            self._delete(oldest)
            self.n_lost += oldest.size
        self.ram_used -= copy.size
        self.disk_used += copy.size
        copy.on_disk = True
        return True


Rows = npt.NDArray[np.bool_]
Sums = npt.NDArray[np.uint64]
Origins = npt.NDArray[np.int64]

FEATURES = ("blocks", "plan", "render", "reuse", "stream", "find", "adopt", "share")
_N_BATCH = 2048  # recorded tokens
_RANDOM = np.random.default_rng(0)
_MULTIPLIERS = _RANDOM.integers(0, 1 << 63, 1 << 21, dtype=np.uint64) | np.uint64(1)


def sums_of(tokens: Tokens) -> Sums:
    """Return a hash of each prefix [n + 1]: equal hashes mean equal prefixes."""
    products = (tokens.astype(np.uint64) + np.uint64(1)) * _MULTIPLIERS[: len(tokens)]
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(products, dtype=np.uint64)])


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a server, in its own (scaled) tokens."""

    n_slots: int
    n_cells: int  # cells of each
    n_ctx: int  # longest prompt with its answer (--ctx-logical)
    ram: int  # tokens of the copies that fit host memory
    disk: int = 0  # the same on disk
    features: Sequence[str] = FEATURES  # what `GET /props` names


@dataclass(slots=True, eq=False)
class Slot:
    """One slot."""

    id: int
    # Its text, resident or not.
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    # Hashes of the prefixes of the text.
    sums: Sums = field(default_factory=lambda: np.zeros(1, np.uint64))
    rows: Rows = field(default_factory=lambda: np.zeros(0, np.bool_))  # which positions have rows
    # For each position 0 if its row was decoded with every earlier row resident, else a number for
    # what was.
    origin: Origins = field(default_factory=lambda: np.zeros(0, np.int64))
    # Rows that were loaded since the latest reply.
    loaded: Rows = field(default_factory=lambda: np.zeros(0, np.bool_))
    # The budget as the latest `stream` set it; {} for none.
    stream: Mapping[str, Any] = field(default_factory=dict)
    # Ranges that the engine evicted since the latest reply, with names.
    evicted: list[tuple[int, int, str | None]] = field(default_factory=list)
    epoch: int = 1
    tenant: str = ""
    session: str = ""
    is_busy: bool = False
    peak: int = 0
    reuse: int | None = None  # most tokens that the next request continues; None without a limit

    @property
    def n_rows(self) -> int:
        """Resident rows."""
        return int(self.rows.sum())

    @property
    def n_whole(self) -> int:
        """Leading tokens whose rows were all decoded with every earlier row resident."""
        bad = ~self.rows | (self.origin != 0)
        return int(bad.argmax()) if bad.any() else len(self.rows)

    def replace(self, tokens: Tokens, rows: Rows, origin: Origins) -> None:
        """Set the text and its rows."""
        self.tokens, self.sums, self.rows, self.origin = tokens, sums_of(tokens), rows, origin
        self.loaded = np.zeros(len(tokens), np.bool_)

    def append(self, tokens: Tokens) -> None:
        """Lengthen the text by tokens without rows."""
        rows = np.append(self.rows, np.zeros(len(tokens), np.bool_))
        origin = np.append(self.origin, np.zeros(len(tokens), np.int64))
        self.replace(np.append(self.tokens, tokens), rows, origin)


_DEFAULT_OPTIONS = CallOptions()


class PatchedServer:
    """A patched llama-server."""

    def __init__(
        self,
        limits: Limits,
        scale: Scale,
        costs: Costs = DEFAULT_COSTS,
        read: Callable[[Sequence[Mapping[str, Any]]], TokenizedChat] | None = None,
    ) -> None:
        """`read` renders the messages of a chat; by default those are messages of traces."""
        self.limits = limits
        self._read_chat = read or Reader(scale)
        self.pool = BlockPool(limits.ram, limits.disk)
        self.slots = [Slot(number) for number in range(limits.n_slots)]
        self.peak = 0  # the most resident rows of one slot
        self.refusals: Counter[str] = Counter()
        self.prefilled: Counter[str] = Counter()  # tokens decoded without an answer, by session
        self._scale = scale
        self._costs = costs
        self._n_origins = 0
        # Tokens that a call copies into or out of cells, and those it reads from disk.
        self._n_copied = self._n_read = 0

    # Calls of the proxy.

    async def call(
        self, method: str, target: str, body: object = None, options: CallOptions = _DEFAULT_OPTIONS
    ) -> dict[str, Any]:
        """Replaces `LlamaClient.call`."""
        data = _body_of(body)
        if target in ("/completion", "/v1/models"):  # the models once, before the first request
            return await self._prefill(orjson.loads(data)) if body else {"data": []}
        self._n_copied = self._n_read = 0
        try:
            answer = self._answer(target, data)
        except Refusal as refused:
            self.refusals[refused.type] += 1
            raise
        if options.check is not None:
            options.check(orjson.dumps(answer))
        costs, row = self._costs, self._costs.row_bytes / self._scale.factor
        moving = self._n_copied * row / costs.copy + self._n_read * row / costs.disk
        await asyncio.sleep(costs.call_s + moving)
        return answer

    @asynccontextmanager
    async def open(
        self, method: str, target: str, headers: Mapping[str, str], body: Any = None
    ) -> AsyncIterator[Any]:
        """Replaces `LlamaClient.open`; the reply has the decoded prompt."""
        decoded = await self.decode(orjson.loads(_body_of(body)))
        yield SimpleNamespace(status=200, reason="OK", headers=CIMultiDict(), decoded=decoded)

    def _answer(self, target: str, data: bytes) -> dict[str, Any]:
        if target == "/props":
            return self._props()
        if target == "/evoke/render":
            return self._rendered(orjson.loads(data))
        path, _, query = target.partition("?")
        slot = self.slots[int(path.split("/")[2])]
        if path.endswith("/blocks"):
            return self._state(slot, query.partition("since=")[2])
        action, body = query.removeprefix("action="), orjson.loads(data)
        of_slot = {"block-plan": self._plan, "block-adopt": self._adopt}
        of_pool = {"block-share": self._share, "block-find": self._find}
        if action in of_slot:
            return of_slot[action](slot, body)
        if action in of_pool:
            return of_pool[action](body)
        if action == "block-drop":
            return {"n_dropped": sum(map(self.pool.drop, body.get("names", ())))}
        raise Refusal(501, "not_supported_error")

    def _props(self) -> dict[str, Any]:
        limits = self.limits
        sizes = {"ram_bytes": limits.ram, "n_cells": limits.n_cells, "row_bytes": 1}
        sizes |= {"n_slot_cells": limits.n_cells, "n_ctx_logical": limits.n_ctx}
        evoke = {"version": 1, "instance": "1" * 16, "features": list(limits.features)}
        evoke |= {"memory": "dense", "limits": sizes}
        return {"evoke": evoke, "total_slots": limits.n_slots}

    def _rendered(self, call: Mapping[str, Any]) -> dict[str, Any]:
        chat = self._read_chat(call["body"]["messages"])
        sums = sums_of(chat.tokens)

        def hash_of(wanted: Iterable[int]) -> dict[int, str]:
            return {end: str(int(sums[end])) for end in wanted if end < len(sums)}

        made = rendering(chat, call["known"], hash_of)
        slots = [self._view(slot, chat.tokens) for slot in self.slots]
        return made | {"slots": slots, "instance": "1" * 16}

    def _view(self, slot: Slot, prompt: Tokens | None = None) -> dict[str, Any]:
        view: dict[str, Any] = {
            "id": slot.id,
            "epoch": slot.epoch,
            "n_tokens": len(slot.tokens),
            "n_free": self.limits.n_cells - slot.n_rows,
            "resident": [[span.start, span.end] for span in spans_of(slot.rows)],
            "is_processing": slot.is_busy,
            "n_reusable": slot.n_whole,
            "tenant": slot.tenant,
            "session": slot.session,
        }
        if prompt is not None:
            n_common = common_prefix(slot.tokens, prompt)
            view["n_common"] = n_common if slot.reuse is None else min(n_common, slot.reuse)
        return view

    def _state(self, slot: Slot, since: str) -> dict[str, Any]:
        pool = self.pool
        state = self._view(slot) | {"tokens_hash": str(int(slot.sums[-1])), "row_bytes": 1}
        state |= {"ram": {"used": pool.ram_used, "budget": pool.ram, "n_dropped": 0}}
        state |= {"version": pool.version, "disk": None}
        listed: Iterable[Copy] = ()
        if since != "latest":
            after = int(since or 0)
            listed = (copy for copy in pool.copies.values() if copy.version > after)
        state["blocks"] = [
            {"name": name, "p0": copy.key[0], "p1": copy.key[1], "n_tokens": copy.size}
            | {"n_bytes": copy.size, "tier": "disk" if copy.on_disk else "ram"}
            | {"whole": copy.key[3] == 0, "session": session}
            for copy in listed
            for name, session in copy.names.items()
        ]
        return state

    # Block calls.

    def _copy(self, name: str, sums: Sums, session: str) -> Copy:
        """The copy of a name that fits a text with these hashes."""
        copy = self.pool.names.get(name)
        if copy is None:
            raise Refusal(404, "unknown_block", name)
        _, end, hashed, origin = copy.key
        if end >= len(sums) or int(sums[end]) != hashed:
            raise Refusal(409, "stale_block", name)
        if origin and copy.names[name] != session:
            raise Refusal(409, "not_whole", name)
        return copy

    def _check_epoch(self, slot: Slot, body: Mapping[str, Any]) -> None:
        if slot.is_busy:
            raise Refusal(503, "unavailable_error")
        if "epoch" in body and body["epoch"] != slot.epoch:
            raise Refusal(409, "stale_epoch")

    def _plan(self, slot: Slot, body: Mapping[str, Any]) -> dict[str, Any]:
        self._check_epoch(slot, body)
        expected = body.get("expect")
        if expected and (
            expected["n_tokens"] != len(slot.tokens)
            or expected["tokens_hash"] != str(int(slot.sums[-1]))
        ):
            raise Refusal(409, "stale_epoch")
        session = str(body.get("session", ""))
        rows, origin, stream, loads = self._checked(slot, body["ops"], session)
        keys = [(self._key(slot, op["p0"], op["p1"]), op["name"]) for op in _of(body, "save")]
        kept = {copy.key: copy for copy in loads}  # a plan does not displace its own copies
        kept |= {key: self.pool.copies[key] for key, _ in keys if key in self.pool.copies}
        n_new = sum(key[1] - key[0] for key, _ in keys if key not in kept)
        if n_new + sum(copy.size for copy in kept.values()) > self.pool.ram:
            raise PoolFull
        for copy in kept.values():
            self.pool.use(copy)
        for key, name in keys:
            if self.pool.add(key, name, session):
                self._n_copied += key[1] - key[0]
        before, limit = slot.n_rows, stream.get("budget") or self.limits.n_cells
        self._n_read += self.pool.read(loads)
        self._n_copied += sum(copy.size for copy in loads)
        for copy in loads:
            slot.loaded[copy.key[0] : copy.key[1]] = True
        slot.loaded &= rows
        if stream is not slot.stream:
            slot.peak = 0
        slot.rows, slot.origin, slot.stream = rows, origin, stream
        slot.tenant, slot.session = str(body.get("tenant", "")), session
        slot.reuse = next((op["n_tokens"] for op in _of(body, "reuse")), slot.reuse)
        self._note(slot, min(before, limit))
        for op in _of(body, "drop"):
            for name in op["names"]:
                self.pool.drop(name)
        return {"epoch": slot.epoch, "results": [], "n_resident": slot.n_rows}

    def _checked(
        self, slot: Slot, ops: Sequence[Mapping[str, Any]], session: str
    ) -> tuple[Rows, Origins, Mapping[str, Any], list[Copy]]:
        """Run the ops that change rows on copies of them; raises Refusal."""
        rows, origin, stream = slot.rows.copy(), slot.origin.copy(), slot.stream
        loads: list[Copy] = []
        for op in ops:
            if op["op"] == "save":
                if not op["p0"] < op["p1"] <= len(rows) or not rows[op["p0"] : op["p1"]].all():
                    raise Refusal(400, "invalid_request_error", op["name"])
            elif op["op"] == "evict":
                if rows[op["p1"] :].sum() == 0 and rows[op["p0"] : op["p1"]].any():
                    raise Refusal(400, "invalid_request_error")
                rows[op["p0"] : op["p1"]] = False
            elif op["op"] == "stream":
                stream = op
            elif op["op"] == "load":
                for name in op["names"]:
                    copy = self._copy(name, slot.sums, session)
                    start, end = copy.key[:2]
                    if rows[start:end].any():
                        raise Refusal(409, "already_resident", name)
                    rows[start:end], origin[start:end] = True, copy.key[3]
                    loads.append(copy)
                limit = min(self.limits.n_cells, stream.get("budget") or self.limits.n_cells)
                if rows.sum() > limit:
                    raise Refusal(503, "no_free_cells")
            elif op["op"] not in ("drop", "reuse"):
                raise Refusal(400, "invalid_request_error")
        return rows, origin, stream, loads

    def _key(self, slot: Slot, start: int, end: int) -> Key:
        return start, end, int(slot.sums[end]), int(slot.origin[start:end].max())

    def _adopt(self, slot: Slot, body: Mapping[str, Any]) -> dict[str, Any]:
        self._check_epoch(slot, body)
        tokens = np.array(body["tokens"], np.int32)
        sums = sums_of(tokens)
        session = str(body.get("session", ""))
        copies = [self._copy(name, sums, session) for name in body["names"]]
        rows, origin = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.int64)
        for copy in copies:
            start, end, _, seen = copy.key
            if rows[start:end].any():
                raise Refusal(409, "already_resident")
            rows[start:end], origin[start:end] = True, seen
        if not len(rows) or not rows[-1]:
            raise Refusal(400, "invalid_request_error")
        if rows.sum() > self.limits.n_cells:
            raise Refusal(503, "no_free_cells")
        self._n_read += self.pool.read(copies)
        self._n_copied += int(rows.sum())
        slot.replace(tokens, rows, origin)
        slot.loaded = rows.copy()
        slot.epoch += 1
        slot.stream, slot.evicted, slot.reuse, slot.peak = {}, [], None, 0
        slot.tenant, slot.session = str(body.get("tenant", "")), session
        self._note(slot, 0)
        return {"epoch": slot.epoch, "n_tokens": len(tokens), "n_loaded": int(rows.sum())}

    def _share(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Give a session names for the whole rows that its tenant has of a text."""
        sums, session = sums_of(np.array(body["tokens"], np.int32)), str(body.get("session", ""))
        most = body.get("max_copied", self._scale.tokens(2048))
        found: list[dict[str, Any]] = []
        n_copied, more = 0, False
        for block in body["blocks"]:
            start, end, name = block["p0"], block["p1"], block["name"]
            key = (start, end, int(sums[end]), 0)
            copy = self.pool.copies.get(key)
            if copy is not None:
                self.pool.rename(copy, name, session)
                found.append({"name": name, "p0": start, "p1": end, "from": "copy"})
                continue
            if not any(_has_whole(slot, key) for slot in self.slots):
                continue
            if n_copied + end - start > most and n_copied:
                more = True
                break
            self.pool.add(key, name, session)
            n_copied += end - start
            found.append({"name": name, "p0": start, "p1": end, "from": "slot"})
        self._n_copied += n_copied
        return {"blocks": found, "n_copied": n_copied, "more": more}

    def _find(self, body: Mapping[str, Any]) -> dict[str, Any]:
        sums, session = sums_of(np.array(body["tokens"], np.int32)), body.get("session", "")
        return {
            "blocks": [
                {"name": name, "p0": copy.key[0], "p1": copy.key[1]}
                for name, copy in self.pool.names.items()
                if copy.names[name] == session
                and copy.key[1] < len(sums)
                and int(sums[copy.key[1]]) == copy.key[2]
            ]
        }

    def _note(self, slot: Slot, n_rows: int) -> None:
        slot.peak = max(slot.peak, slot.n_rows, n_rows)
        self.peak = max(self.peak, slot.n_rows)

    # Decoding.

    async def decode(self, body: Mapping[str, Any]) -> DecodedPrompt:
        """Decode the prompt of a forwarded request, batch by batch; its slot is busy after it."""
        return await self._decoded(self._read_chat(body["messages"]).tokens, body)

    async def _prefill(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Decode a list of tokens, and generate nothing."""
        decoded = await self._decoded(np.array(body["prompt"], np.int32), body)
        session = decoded.slot.session
        self.prefilled[session] += decoded.counts["decoded"]
        timings = {"cache_n": 0, "prompt_n": decoded.counts["decoded"], "prompt_ms": 1.0}
        timings |= await self.answer(decoded, np.zeros(1, np.int32))
        return {"id_slot": decoded.slot.id, "timings": timings}

    async def _decoded(self, prompt: Tokens, body: Mapping[str, Any]) -> DecodedPrompt:
        marker = body.get("evoke") or {}
        idle = (slot for slot in self.slots if not slot.is_busy)
        slot = self.slots[body["id_slot"]] if "id_slot" in body else next(idle, self.slots[0])
        while slot.is_busy:
            await asyncio.sleep(0.01)
        has_marker = marker.get("epoch") == slot.epoch
        n_past = self._n_past(slot, prompt, has_marker)
        if not has_marker:
            slot.epoch += 1
            slot.stream, slot.session, slot.tenant = {}, "", ""
        slot.is_busy, slot.reuse = True, None
        before = int(slot.rows[:n_past].sum())
        recovered = int((slot.loaded & slot.rows)[:n_past].sum())
        rows, origin = np.zeros(len(prompt), np.bool_), np.zeros(len(prompt), np.int64)
        rows[:n_past], origin[:n_past] = slot.rows[:n_past], slot.origin[:n_past]
        slot.replace(prompt, rows, origin)
        at = n_past
        while at < len(prompt):
            n = self._decode_batch(slot, at, len(prompt) - at)
            await asyncio.sleep(n / self._scale.factor / self._costs.prefill)
            at += n
        n_hidden = sum(
            max(0, end - max(start, n_past)) for start, end, _ in slot.evicted if end > n_past
        )
        marker_text = "ok" if has_marker else "stale" if marker else "none"
        counts = {"n_prompt": len(prompt), "decoded": len(prompt) - n_past, "recovered": recovered}
        counts |= {"resident_before": before - recovered, "omitted": n_past - before}
        counts |= {"decoded_hidden": n_hidden}
        return DecodedPrompt(slot, counts, marker_text)

    async def answer(self, decoded: DecodedPrompt, answer: Tokens) -> dict[str, Any]:
        """Generate an answer; return the `timings` of the reply, and set the slot free."""
        slot = decoded.slot
        await asyncio.sleep(len(answer) / self._scale.factor / self._costs.decode)
        at = len(slot.tokens)
        slot.append(answer[:-1])  # the row of the last token is not decoded
        while at < len(slot.tokens):
            at += self._decode_batch(slot, at, min(self._scale.block, len(slot.tokens) - at))
        slot.is_busy = False
        usage = decoded.counts | {"n_resident": slot.n_rows, "n_resident_peak": slot.peak}
        usage |= {"budget": slot.stream.get("budget", 0), "epoch": slot.epoch}
        evicted, slot.evicted = slot.evicted, []
        slot.peak = slot.n_rows
        return {"evoke": usage | {"marker": decoded.marker, "auto_evicted": evicted}}

    def _n_past(self, slot: Slot, prompt: Tokens, has_marker: bool) -> int:
        """How many tokens of a prompt are not decoded."""
        limit = min(common_prefix(slot.tokens, prompt), len(prompt) - 1)
        if slot.reuse is not None:
            limit = min(limit, slot.reuse)
        if not has_marker:
            return min(limit, slot.n_whole)
        resident = np.flatnonzero(slot.rows[:limit])
        return int(resident[-1]) + 1 if len(resident) else 0

    def _decode_batch(self, slot: Slot, at: int, n_left: int) -> int:
        """Decode the next tokens of a slot, and evict what must go; return their number."""
        stream, cells = slot.stream, self.limits.n_cells
        limit = min(stream.get("budget") or cells, cells)
        wanted = min(n_left, self._scale.tokens(_N_BATCH))
        used = slot.n_rows
        if used + wanted > limit:
            used = self._evict(slot, at, wanted, limit)
        n = max(1, min(wanted, limit - used))
        visible = slot.rows[:at].all() and not slot.origin[:at].any()
        if not visible:
            self._n_origins += 1
            slot.origin[at : at + n] = self._n_origins
        slot.rows[at : at + n] = True
        self._note(slot, 0)
        return n

    def _evict(self, slot: Slot, at: int, wanted: int, limit: int) -> int:
        """Evict rows for the next batch, in the order of the budget; return the rows left."""
        stream = slot.stream
        recent = stream.get("recent", max(32, slot.n_rows // 4))
        protect = tuple(Span(start, end) for start, end in stream.get("protect", ()))
        sink, block = stream.get("sink", 4), stream.get("block", 64)
        budget = DecodeBudget(limit, sink, recent, block, protect)
        order = [(Span(it["p0"], it["p1"]), it["name"]) for it in stream.get("order", ())]
        for span, name in evictions(slot.rows[:at].copy(), (at, wanted), budget, order):
            if name.startswith("auto/"):
                name = f"auto/{slot.id}.{slot.epoch}/{span.start}-{span.end}"
            self._auto_evict(slot, span.start, span.end, name)
        return slot.n_rows

    def _auto_evict(self, slot: Slot, start: int, end: int, name: str) -> None:
        saved: str | None = name
        try:
            self.pool.add(self._key(slot, start, end), name, slot.session)
        except PoolFull:
            saved = None
        slot.rows[start:end] = False
        slot.evicted.append((start, end, saved))


@dataclass(frozen=True, slots=True)
class DecodedPrompt:
    """A decoded prompt whose answer is not generated yet."""

    slot: Slot
    counts: dict[str, int]  # its tokens, as `timings.evoke` counts them
    marker: str  # what became of the request's marker


def _body_of(body: object) -> bytes:
    """The bytes of a call's body, which may come in parts."""
    parts = body if isinstance(body, tuple) else (body,)
    return b"".join(
        part
        if isinstance(part, bytes | memoryview)
        else orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)
        for part in parts
    )


def _of(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [op for op in body["ops"] if op["op"] == name]


def _has_whole(slot: Slot, key: Key) -> bool:
    """Whether a slot has all rows of a range, decoded with every earlier row resident."""
    start, end, hashed, _ = key
    if end >= len(slot.sums) or int(slot.sums[end]) != hashed:
        return False
    return bool(slot.rows[start:end].all()) and not slot.origin[start:end].any()
