"""An in-process llama-server that computes nothing and answers at once, for prompts of any length.

It keeps the rows of one slot as a mask, applies plans to it, and evicts in the given order when a
prompt exceeds the budget. The time that it takes itself is counted, so that a bench can subtract
it."""

from __future__ import annotations

import base64
import hashlib
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from bench.engine_in_process import DEFAULT_OPTIONS, body_of, reply_of
from evoke_proxy.adapters.llama.client import CallOptions
from evoke_proxy.adapters.llama.transport import Reply
from evoke_proxy.core.prompt.append_only import AppendOnlyArray

Tokens = npt.NDArray[np.int32]
Rows = npt.NDArray[np.bool_]

_FEATURES = ("blocks", "plan", "render", "reuse", "stream", "adopt")
_N_CTX = 1 << 30
_EDGES = 8
# What an answer begins with, and a prompt ends with.
_BEGINS = np.array([1, 2, 3, 4], np.int32)


class Talk:
    """One conversation as messages, and as the tokens they are made of."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.messages: list[dict[str, str]] = []
        self._said = AppendOnlyArray.of(np.zeros(0, np.int32))
        self.ends: list[int] = []
        self.stops: list[int] = []

    def add(self, said: Sequence[tuple[str, str, int]]) -> None:
        """More messages: role, text, number of tokens; sentences are equally long."""
        for role, text, count in said:
            self.messages.append({"role": role, "content": text})
            start, sentences = self.ends[-1] if self.ends else 0, text.count(". ") + 1
            self.stops += [start + count * i // sentences for i in range(1, sentences)]
            self.ends.append(start + count)
        n_new = sum(count for _, _, count in said)
        new = self._random.integers(0, 100_000, n_new, dtype=np.int32)
        at = 0
        for role, _, count in said:
            if role == "assistant":  # as it was asked for
                new[at : at + len(_BEGINS)] = _BEGINS
            at += count
        self._said = self._said.extended(len(self.tokens), new)

    @property
    def tokens(self) -> Tokens:
        """All of it."""
        return self._said.rows

    def body(self) -> bytes:
        """The request that a client would send now."""
        return orjson.dumps({"messages": self.messages, "max_tokens": 16, "temperature": 0})


def cpu_s() -> float:
    """Return the processor time of this process in seconds.

    All threads count, because the engine runs long steps in worker threads.
    """
    return time.process_time()


class SilentServer:
    """Answers the proxy's calls.

    `talk` is the conversation that is rendered next; the prompt of a request has four tokens after
    its last message. `n_ctx` is the context of the slot.
    """

    n_ctx = _N_CTX

    def __init__(self) -> None:
        self.talk = Talk(0)
        self.own_s = self.parsing_s = 0.0
        self._epoch = 1
        self._tokens: Tokens = np.zeros(0, np.int32)
        self._rows: Rows = np.zeros(0, np.bool_)
        self._stream: Mapping[str, Any] = {}
        self._before = (0, 0)

    async def call(
        self, method: str, target: str, body: object = None, options: CallOptions = DEFAULT_OPTIONS
    ) -> dict[str, Any]:
        """Replaces `LlamaClient.call`.

        Encoding the body and parsing the reply is work of the proxy (the latter is counted in
        `parsing_s`); everything else is counted in `own_s`.
        """
        data = body_of(body)
        began = cpu_s()
        raw = self._answer(target, data)
        self.own_s += cpu_s() - began
        began = cpu_s()
        if options.check is not None:
            options.check(raw)
        answer: dict[str, Any] = orjson.loads(raw)
        self.parsing_s += cpu_s() - began
        return answer

    @asynccontextmanager
    async def open(
        self, method: str, target: str, headers: Mapping[str, str], body: Any = None
    ) -> AsyncIterator[Reply]:
        """Replaces `LlamaClient.open`."""
        yield reply_of()

    def empty(self) -> None:
        """Remove all rows of the slot."""
        self._epoch += 1
        self._tokens, self._rows = np.zeros(0, np.int32), np.zeros(0, np.bool_)

    def _answer(self, target: str, data: bytes) -> bytes:
        if target == "/props":
            evoke = {"features": _FEATURES, "limits": {"n_ctx_logical": self.n_ctx}}
            return orjson.dumps({"evoke": evoke, "total_slots": 1})
        if target == "/evoke/render":
            return self._rendered(orjson.loads(data.partition(b',"body":')[0] + b"}")["known"])
        if "action=block-plan" in target:
            return self._planned(orjson.loads(data))
        return orjson.dumps(self._slot() | {"tokens_hash": "", "blocks": []})

    def _slot(self) -> dict[str, Any]:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self._rows, [0]]).astype(np.int8)))
        n_free = (1 << 20) - int(self._rows.sum())
        slot = {"id": 0, "epoch": self._epoch, "n_tokens": len(self._tokens), "n_free": n_free}
        return slot | {"resident": edges.reshape(-1, 2).tolist()}

    def _prompt(self) -> Tokens:
        return np.concatenate([self.talk.tokens, _BEGINS])

    def _rendered(self, cached_edges: Sequence[Sequence[Any]]) -> bytes:
        prompt, talk = self._prompt(), self.talk
        n = min(len(prompt), len(self._tokens))
        differs = prompt[:n] != self._tokens[:n]
        common = int(differs.argmax()) if differs.any() else n
        stops = np.zeros(len(prompt), np.bool_)
        stops[talk.stops] = True
        last = talk.ends[-_EDGES:]
        hashes = _hashes(prompt, {*last, *(end for end, _ in cached_edges)})
        since = max([end for end, said in cached_edges if hashes.get(end) == said], default=0)
        first, count = bisect_right(talk.ends, since) if since else 0, len(talk.ends)
        bits = np.packbits(stops[since:], bitorder="little")
        return orjson.dumps(
            {
                "from": since,
                "edges": [[end, hashes[end]] for end in last],
                "tokens_b64": base64.b64encode(prompt[since:].tobytes()).decode(),
                "stops_b64": base64.b64encode(bits.tobytes()).decode(),
                "generation": len(talk.tokens),
                "spans": {
                    "index": list(range(first, count)),
                    "role": [message["role"] for message in talk.messages[first:]],
                    "end": talk.ends[first:],
                },
                "slots": [self._slot() | {"n_common": common}],
            }
        )

    def _planned(self, call: Mapping[str, Any]) -> bytes:
        evicted = loaded = 0
        spans: dict[str, tuple[int, int]] = {}
        for op in call["ops"]:
            if op["op"] == "evict":
                evicted += int(self._rows[op["p0"] : op["p1"]].sum())
                self._rows[op["p0"] : op["p1"]] = False
            elif op["op"] == "stream":
                self._stream = op
            elif op["op"] == "load":
                spans |= {label: _span(label) for label in op["names"]}
        for start, end in spans.values():
            loaded += end - start
            self._rows[start:end] = True
        self._before = (int(self._rows.sum()) - loaded, loaded)
        return orjson.dumps({"epoch": self._epoch, "results": []})

    def decode(self) -> dict[str, Any]:
        """Decode the planned prompt; return the `timings` of the answer with the token counts."""
        prompt = self._prompt()
        n_past = len(self._rows) if len(self._rows) < len(prompt) else 0
        resident, recovered = self._before
        rows = np.ones(len(prompt), np.bool_)
        rows[:n_past] = self._rows[:n_past]
        evicted = self._evict_to_budget(rows)
        self._tokens, self._rows = prompt[: len(self.talk.tokens)], rows[: len(self.talk.tokens)]
        usage = {"marker": "ok", "n_prompt": len(prompt), "decoded": len(prompt) - n_past}
        usage |= {"recovered": recovered, "resident_before": resident, "epoch": self._epoch}
        usage |= {"omitted": n_past - recovered - resident, "auto_evicted": evicted}
        n_rows = int(rows.sum())
        return {"evoke": usage | {"n_resident": n_rows, "n_resident_peak": n_rows}}

    def _evict_to_budget(self, rows: Rows) -> list[tuple[int, int, str]]:
        """Evict rows in the given order until the budget is kept; return the evicted blocks."""
        over = int(rows.sum()) - self._stream.get("budget", 0)
        evicted = []
        for entry in self._stream.get("order", ()):
            if over <= 0:
                break
            start, end = entry["p0"], entry["p1"]
            if end + self._stream["recent"] < len(rows) and rows[start:end].all():
                rows[start:end] = False
                evicted.append((start, end, entry["name"]))
                over -= end - start
        return evicted


def _hashes(tokens: Tokens, ends: Iterable[int]) -> dict[int, str]:
    """Of the tokens up to each of these ends."""
    hashed, at, found = hashlib.blake2b(digest_size=8), 0, {}
    for end in sorted(ends):
        hashed.update(tokens[at:end].tobytes())
        at, found[end] = end, hashed.copy().hexdigest()
    return found


def _span(label: str) -> tuple[int, int]:
    """The positions that a block's name says."""
    start, end = label.split("/")[1].split("-")[:2]
    return int(start), int(end)
