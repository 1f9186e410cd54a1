"""Replays recorded conversations through the proxy with snapshots, in front of a stock server.

The server keeps account of slots, its RAM cache and files, and computes nothing. Its times are
those of the cost model of `bench.traces`, in virtual time. Files have the format of llama-server,
with few bytes for each token.

python -m tests.stock_replay --out bench/results/traces_stock.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import orjson
from multidict import CIMultiDict

sys.path.insert(0, str(Path(__file__).parents[1]))  # pytest has it on its path

from bench.record import checkout, machine, table  # noqa: E402
from bench.traces.__main__ import longest_of, plan_of  # noqa: E402
from bench.traces.proxied import proxied  # noqa: E402
from bench.traces.replay import DEFAULT_COSTS, Counts, Replay, misses, now, run  # noqa: E402
from bench.traces.stock import PromptCache, Slot, StockServer  # noqa: E402
from bench.traces.texts import ANSWER, Agent, Prompt, Scale, Tokens, numbers, shipped  # noqa: E402
from evoke_proxy.adapters import clock  # noqa: E402
from evoke_proxy.adapters.llama.client import CallOptions  # noqa: E402
from evoke_proxy.core.prompt.rendered import common_prefix  # noqa: E402
from evoke_proxy.engine.gateway import RequestTrace  # noqa: E402
from evoke_proxy.engine.parsing.request import IncomingRequest  # noqa: E402
from evoke_proxy.engine.routing.model_router import ModelRouter  # noqa: E402
from evoke_proxy.engine.storage.threads import OrderedThread  # noqa: E402
from evoke_proxy.errors import CapacityError, UpstreamRejected  # noqa: E402

SCALE, SLOTS = Scale(8), 2
_ROW = 24  # bytes of K and of V of a token in the files
_FILE_BYTES = 4 + 12 + 2 * _ROW  # of one token
_ANSWER_WORD = "<answer>"
_OPTIONS = CallOptions()
_SIMILARITY, _KEEP_SLOT = 0.1, 0.5  # as in bench/traces/stock.py
# What was decoded for the request of the current task, also by the proxy, and loaded from RAM.
_COUNTED: ContextVar[Counter] = ContextVar("_COUNTED")


class Counter:
    """Tokens that were decoded and loaded for one request."""

    decoded = loaded = 0


class FileServer(StockServer):
    """The calls of a stock llama-server with `--slot-save-path`; slots do not share cells."""

    def __init__(self, n_slots: int, ram_tokens: float, folder: Path) -> None:
        super().__init__(n_slots, PromptCache(ram_tokens), SCALE, DEFAULT_COSTS)
        self._folder = folder
        self._tasks: dict[int, int] = {}  # the latest of each slot
        self.n_saved = self.n_restored = 0

    async def call(
        self, method: str, target: str, body: object = None, options: CallOptions = _OPTIONS
    ) -> dict[str, Any]:
        """Replaces `LlamaClient.call`."""
        await asyncio.sleep(DEFAULT_COSTS.call_s)
        if target == "/props":
            return {"total_slots": len(self.slots), "build_info": "replay"}
        if target == "/v1/models":
            return {"data": [{"id": "replay", "meta": {}}]}
        request = orjson.loads(_bytes_of(body))
        if target == "/apply-template":
            return {"prompt": _text_of(request)}
        if target == "/tokenize":
            return {"tokens": _tokens_of(request["content"]).tolist()}
        if target == "/completion":
            return await self._prefill(request)
        slot = self.slots[int(target.split("/")[2].partition("?")[0])]
        while slot.is_busy:
            await asyncio.sleep(0.01)
        return await self._file(slot, target.partition("action=")[2], request)

    @asynccontextmanager
    async def open(
        self, method: str, target: str, headers: Mapping[str, str], body: Any = None
    ) -> AsyncIterator[Any]:
        """Replaces `LlamaClient.open`; the reply to a chat has its slot."""
        head = {"status": 200, "reason": "OK", "headers": CIMultiDict(), "url": ""}
        if method == "GET":
            listed = self._listed() if target == "/slots" else []

            async def read() -> bytes:
                return orjson.dumps(listed)

            yield SimpleNamespace(**head, read=read)
            return
        request = orjson.loads(_bytes_of(body))
        slot, n_decoded = await self._start(_tokens_of(_text_of(request)), request.get("id_slot"))
        yield SimpleNamespace(**head, slot=slot, n_decoded=n_decoded)

    async def answer(self, slot: Slot, answer: Tokens) -> None:
        """Generate an answer in a slot, and set the slot free."""
        await asyncio.sleep(len(answer) / SCALE.factor / DEFAULT_COSTS.decode)
        slot.tokens = np.concatenate([slot.tokens, answer[:-1]])
        self.peak = max(self.peak, len(slot.tokens))
        self._free(slot)

    async def _start(self, prompt: Tokens, number: int | None) -> tuple[Slot, int]:
        """Decode a prompt; returns its slot, and the number of tokens decoded."""
        while (chosen := self._choose(prompt, number)) is None:
            free = asyncio.Event()
            self._waiting.append(free)
            await free.wait()
        slot, updates = chosen
        copied, counter = 0, _COUNTED.get(Counter())
        if updates:
            copied = self.cache.save(slot.tokens)
            state = self.cache.load(slot.tokens, prompt)
            if state is not None:
                slot.tokens = state
                copied += len(state)
                counter.loaded += len(state)
        slot.is_busy, at = True, self.slots.index(slot)
        self._tasks[at] = 1 + max(self._tasks.values(), default=0)
        # As `--cache-idle-slots` does by default.
        copied += sum(self.cache.save(each.tokens) for each in self.slots if not each.is_busy)
        n_known = min(common_prefix(slot.tokens, prompt), len(prompt) - 1)
        n_decoded = len(prompt) - n_known
        seconds = copied * DEFAULT_COSTS.row_bytes / DEFAULT_COSTS.copy
        seconds = (seconds + n_decoded / DEFAULT_COSTS.prefill) / SCALE.factor
        began, slot.tokens = now(), prompt
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:  # the rest is not decoded
            slot.tokens = prompt[: n_known + int(n_decoded * (now() - began) / seconds)]
            self._free(slot)
            raise
        counter.decoded += n_decoded
        return slot, n_decoded

    def _choose(self, prompt: Tokens, number: int | None) -> tuple[Slot, bool] | None:
        """The slot for a prompt, and whether the RAM cache is updated; None while it is busy."""
        if number is None:
            return self._chosen(prompt)
        slot = self.slots[number]
        n_common = common_prefix(slot.tokens, prompt)
        is_alike = n_common > _SIMILARITY * len(prompt)
        keeps = is_alike and n_common >= _KEEP_SLOT * len(slot.tokens)
        return None if slot.is_busy else (slot, len(slot.tokens) > 0 and not keeps)

    def _free(self, slot: Slot) -> None:
        slot.is_busy, slot.last_used = False, now()
        while self._waiting:
            self._waiting.popleft().set()

    async def _prefill(self, request: Mapping[str, Any]) -> dict[str, Any]:
        prompt, began = np.array(request["prompt"], np.int32), now()
        slot, n_decoded = await self._start(prompt, request.get("id_slot"))
        timings: dict[str, float] = {"prompt_n": n_decoded, "prompt_ms": (now() - began) * 1000}
        self._free(slot)
        timings |= {"cache_n": len(prompt) - n_decoded}
        return {"id_slot": self.slots.index(slot), "timings": timings}

    async def _file(self, slot: Slot, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if action == "erase":
            slot.tokens = slot.tokens[:0]
            return {"n_erased": 0}
        path = self._folder / Path(str(request["filename"])).name
        if action == "save":
            self.n_saved += 1
            path.write_bytes(_file_of(slot.tokens))
        elif not path.exists():
            raise UpstreamRejected(400, b"{}")
        else:
            self.n_restored += 1
            content = path.read_bytes()
            slot.tokens = np.frombuffer(content, "<i4", int.from_bytes(content[8:12], "little"), 12)
        # The file may be deleted while llama-server reads it.
        n, size = len(slot.tokens), path.stat().st_size
        seconds = n / SCALE.factor * DEFAULT_COSTS.row_bytes / DEFAULT_COSTS.disk
        await asyncio.sleep(seconds)
        counts = {"n_saved": n, "n_written": size, "n_restored": n, "n_read": size}
        return counts | {"timings": {f"{action}_ms": seconds * 1000}}

    def _listed(self) -> list[dict[str, Any]]:
        return [
            {"id": at, "id_task": self._tasks.get(at), "is_processing": slot.is_busy}
            | {"n_prompt_tokens": len(slot.tokens)}
            for at, slot in enumerate(self.slots)
        ]


class Snapshots:
    """The proxy in front of a stock server; an arm of the replay."""

    def __init__(self, engine: ModelRouter, server: FileServer) -> None:
        self._engine, self._server = engine, server

    async def ask(self, prompt: Prompt, label: str) -> Counts:
        """See bench.traces.replay.Arm; a request that finds no slot is sent again."""
        began, counter = now(), Counter()
        _COUNTED.set(counter)
        while True:
            await asyncio.sleep(DEFAULT_COSTS.proxy_s)
            try:
                first_token_s, session = await self._chat(prompt, began)
            except CapacityError:
                await asyncio.sleep(1.0)
            else:
                return Counts(counter.decoded, counter.loaded, 0, first_token_s, session)

    async def _chat(self, prompt: Prompt, began: float) -> tuple[float, str]:
        incoming = IncomingRequest(dialect="chat", body=orjson.dumps(prompt.body()), headers={})
        trace = RequestTrace(now())
        request = await self._engine.parser.parse(incoming)
        async with self._engine.exchange(request, trace) as exchange:
            reply: Any = exchange.reply
            first_token_s = now() - began
            await self._server.answer(reply.slot, prompt.answer)
            words = {number: word for word, number in numbers().items()}
            content = " ".join(["x", *(words[each] for each in prompt.answer[1:].tolist())])
            n_prompt, n_decoded = len(prompt.tokens), reply.n_decoded
            timings = {"cache_n": n_prompt - n_decoded, "prompt_n": n_decoded}
            seconds = n_decoded / SCALE.factor / DEFAULT_COSTS.prefill
            timings |= {"predicted_n": len(prompt.answer), "prompt_ms": seconds * 1000}
            message = {"role": "assistant", "content": content}
            body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
            exchange.observe(orjson.dumps(body | {"timings": timings}))
        return first_token_s, str((trace.facts or {}).get("session") or "")


def replayed(
    conversations: Sequence[Agent], users: int, ram_gib: float, disk_gib: float
) -> dict[str, Any]:
    """Replay conversations, some at a time; return a row. Without `disk_gib` the server alone."""
    tokens_of_gib = (1 << 30) / DEFAULT_COSTS.row_bytes * SCALE.factor
    replay = Replay(conversations, SCALE)
    row: dict[str, Any] = {"users": users, "ram_gib": ram_gib, "disk_gib": disk_gib}

    async def with_proxy() -> Any:
        with tempfile.TemporaryDirectory() as folder, _virtual_clocks():
            server = FileServer(SLOTS, ram_gib * tokens_of_gib, Path(folder))
            limit = round(disk_gib * tokens_of_gib * _FILE_BYTES / (1 << 20))
            settings = {
                "snapshots.directory": folder,
                "snapshots.max_mib": max(1, limit),
                "snapshots.min_tokens": SCALE.tokens(256),
            }
            async with proxied(server, settings, DEFAULT_COSTS) as proxy:  # type: ignore[arg-type]
                served = await replay.run(Snapshots(proxy.engine, server), users)
            row.update(saves=server.n_saved, restores=server.n_restored)
            return served

    if disk_gib:
        served = run(with_proxy())
    else:
        cache = PromptCache(ram_gib * tokens_of_gib)
        served = run(replay.run(StockServer(SLOTS, cache, SCALE, DEFAULT_COSTS), users))
    first = [each.counts.first_token_s for each in served]
    decoded, fresh = (
        round(sum(numbers) / SCALE.factor)
        for numbers in ([each.counts.decoded for each in served], [each.fresh for each in served])
    )
    missed = len(misses(served, SCALE))
    return row | {
        "requests": len(served),
        "fresh": fresh,
        "decoded": decoded,
        "of_bound": round(decoded / fresh, 4),
        "misses": missed,
        "miss_share": missed / len(served),
        "first_token_p50_s": float(np.percentile(first, 50)),
        "first_token_mean_s": float(np.mean(first)),
    }


@contextmanager
def _virtual_clocks() -> Iterator[None]:
    """Have the clocks of the proxy run in virtual time, which must not pass in its own threads."""

    def at_once(thread: OrderedThread, work: Callable[[], Any]) -> Future[Any]:
        future = thread._thread.submit(work)
        wait([future])
        return future

    clocks = asyncio.get_running_loop().time
    with (
        mock.patch.object(time, "monotonic", clocks),
        mock.patch.object(clock, "uptime_s", clocks),
        mock.patch.object(OrderedThread, "_queue", at_once),
    ):
        yield


def _bytes_of(body: object) -> bytes:
    """The bytes of a call's body, which may come in parts."""
    parts = body if isinstance(body, tuple) else (body,)
    numpy = orjson.OPT_SERIALIZE_NUMPY
    return b"".join(
        bytes(part) if isinstance(part, bytes | memoryview) else orjson.dumps(part, option=numpy)
        for part in parts
    )


def _text_of(request: Mapping[str, Any]) -> str:
    """The text of a chat request as the template writes it."""
    parts = []
    for message in request["messages"]:
        text = str(message["content"])
        if message["role"] == "assistant":
            text = f"{_ANSWER_WORD} {text.partition(' ')[2]}"
        parts.append(text)
    if request.get("add_generation_prompt", True):
        parts.append(_ANSWER_WORD)
    return " ".join(parts)


def _tokens_of(text: str) -> Tokens:
    table_of = numbers()
    unknown = ANSWER + 1  # words of the proxy's own tests
    tokens = [
        ANSWER if word == _ANSWER_WORD else table_of.get(word, unknown + sum(word.encode()) % 1000)
        for word in text.split()
    ]
    return np.array(tokens, np.int32)


def _file_of(tokens: Tokens) -> bytes:
    """A state file: head, tokens, and one cache of one layer with rows of zeros."""
    n = len(tokens)
    head = struct.pack("<III", 0x67677371, 3, n) + tokens.astype("<i4").tobytes()
    cells = np.zeros((n, 3), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(n), 1
    cache = struct.pack("<II", 1, n)
    if n:
        cache += cells.tobytes() + struct.pack("<II", 0, 1)
        cache += (struct.pack("<iQ", 8, _ROW) + bytes(n * _ROW)) * 2
    return head + cache


def main() -> None:
    """Replay all conversations on each arm, and write the record."""
    parser = argparse.ArgumentParser(
        "python -m tests.stock_replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench/traces_stock.json"))
    parser.add_argument("--conversations", type=int, help="only the first N")
    args = parser.parse_args()
    conversations = shipped()[: args.conversations]
    disk = round(plan_of(longest_of(conversations), SLOTS).disk_mib / 1024)
    arms = [(4, 8.0, gib) for gib in (0, disk, 128, 64, 32)] + [(4, 32.0, 0), (4, 32.0, disk)]
    arms += [(2, 8.0, 0), (2, 8.0, disk), (8, 8.0, 0), (8, 8.0, disk)]
    rows = []
    for users, ram, disk_gib in arms:
        rows.append(replayed(conversations, users, ram, disk_gib))
        print(table(rows[-1:], list(rows[-1])), flush=True)
    record = {
        "command": shlex.join(["python", "-m", "tests.stock_replay", *sys.argv[1:]]),
        "commit": checkout(),
        "machine": machine(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "rows": rows,
        "summary": {"conversations": len(conversations), "slots": SLOTS, "disk_gib": disk},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
