"""A patched llama-server that computes nothing: it answers any chat and any block call at once.

Four bytes of text are a token. It keeps the rows of one slot as a mask, applies plans to it, and
evicts in the given order when a prompt exceeds the budget. A chat whose `model` is `bytes-N` is
answered with N bytes of text. `growth` and `stall` measure the proxy in front of it."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from aiohttp import web

from bench.slot_rows import TokenizedChat, rendering, spans_of
from evoke_proxy.core.prompt.rendered import common_prefix
from evoke_proxy.demo.processes import free_port, serving

Tokens = npt.NDArray[np.int32]
Rows = npt.NDArray[np.bool_]
Json = dict[str, Any]

_FEATURES = ("blocks", "plan", "render", "reuse", "stream", "adopt")
N_CTX, _N_CELLS = 1 << 21, 1 << 20
_BYTES_A_TOKEN, _ANY = 4, 1 << 40
# What an answer begins with, and a prompt ends with.
_BEGINS = np.array([1, 2, 3, 4], np.int32)


def tokenized(messages: Sequence[Mapping[str, Any]]) -> TokenizedChat:
    """Return the messages of a request as tokens, one for every four bytes of text."""
    parts, ends, starts, at = list[Tokens](), list[int](), list[int](), 0
    for message in messages:
        content = message.get("content", "")
        if not isinstance(content, str):
            content = "".join(part.get("text", "[image]") for part in content)
        text = content.encode() or b"none"
        padded = text + b" " * (-len(text) % _BYTES_A_TOKEN)
        ids = (np.frombuffer(padded, "<u4") % 100_000 + 10).astype(np.int32)
        if message.get("role") == "assistant":
            ids = np.concatenate([_BEGINS, ids])
        stops = np.flatnonzero(np.frombuffer(padded, np.uint8) == ord(".")) // _BYTES_A_TOKEN
        starts += (at + stops[stops > 0]).tolist()
        parts.append(ids)
        at += len(ids)
        ends.append(at)
    roles = [str(message.get("role", "user")) for message in messages]
    tokens = np.concatenate([*parts, _BEGINS])
    return TokenizedChat(tokens, ends, roles, np.array(starts, np.int64))


class SilentLlama:
    """The one slot of the server, with a context of `n_ctx` tokens, and the saved copies."""

    def __init__(self, n_ctx: int = N_CTX) -> None:
        self._n_ctx = n_ctx
        self._copies: dict[str, Json] = {}
        self._version = 1  # that of the latest copy
        self._tokens: Tokens = np.zeros(0, np.int32)
        self._rows: Rows = np.zeros(0, np.bool_)
        self._stream: Mapping[str, Any] = {}
        self._tenant = ""
        # Rows that were loaded since the latest chat, and the most tokens that it may continue.
        self._loaded: Rows = np.zeros(0, np.bool_)
        self._reuse = _ANY

    def props(self) -> Json:
        """The answer to GET /props."""
        evoke = {"features": _FEATURES, "limits": {"n_ctx_logical": self._n_ctx}}
        return {"evoke": evoke, "total_slots": 1}

    def slot(self, query: Mapping[str, str]) -> Json:
        """The answer to GET /slots/0/blocks."""
        tenant, since = query.get("tenant", ""), query.get("since") or "0"
        least = self._version if since == "latest" else int(since)
        changed = islice(reversed(self._copies.values()), max(0, self._version - least))
        copies = [copy for copy in changed if copy["tenant"] == tenant and copy["v"] > least]
        listed = {"blocks": copies[::-1], "version": self._version}
        return self._state() | {"tokens_hash": ""} | listed

    def _state(self) -> Json:
        resident = [(span.start, span.end) for span in spans_of(self._rows)]
        n_free = _N_CELLS - int(self._rows.sum())
        slot = {"id": 0, "epoch": 1, "n_tokens": len(self._tokens), "n_free": n_free}
        return slot | {"resident": resident}

    def render(self, call: Mapping[str, Any]) -> Json:
        """The answer to POST /evoke/render."""
        chat = tokenized(call["body"].get("messages", ()))
        made = rendering(chat, call["known"], partial(_hashes, chat.tokens))
        return made | {"slots": [self._state() | {"n_common": self._n_common(chat.tokens)}]}

    def act(self, action: str, call: Mapping[str, Any]) -> Json:
        """The answer to a block call."""
        if action == "block-drop":
            self._run({"op": "drop", **call})
        if action == "block-adopt":
            self._tokens = np.array(call["tokens"], np.int32)
            self._rows, self._loaded = np.zeros((2, len(self._tokens)), np.bool_)
            self._run({"op": "load", **call})
        if action == "block-plan":
            self._tenant = call.get("tenant", "")
            for op in call["ops"]:
                self._run(op)
        return {"epoch": 1, "results": []}

    def _run(self, op: Mapping[str, Any]) -> None:
        if op["op"] == "save":
            self._keep(op["name"], op["p0"], op["p1"])
        elif op["op"] == "evict":
            self._rows[op["p0"] : op["p1"]] = False
        elif op["op"] == "stream":
            self._stream = op
        elif op["op"] == "reuse":
            self._reuse = op["n_tokens"]
        elif op["op"] == "drop":
            for name in op.get("names", ()):
                self._copies.pop(name, None)
        elif op["op"] == "load":
            for copy in (self._copies[name] for name in op["names"]):
                self._rows[copy["p0"] : copy["p1"]] = True
                self._loaded[copy["p0"] : copy["p1"]] = True

    def _keep(self, name: str, start: int, end: int) -> None:
        self._version += 1
        copy = {"name": name, "p0": start, "p1": end, "tenant": self._tenant, "v": self._version}
        self._copies.pop(name, None)  # the latest is the last one
        self._copies[name] = copy

    def chat(self, body: Mapping[str, Any]) -> Json:
        """The answer to a chat, with the token counts of its prompt."""
        kind, _, size = str(body.get("model", "")).partition("-")
        text = "a" * int(size) if kind == "bytes" else "Yes."
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        if body.get("stream"):
            choice["delta"] = choice.pop("message")
        timings = {"evoke": self._decoded(tokenized(body.get("messages", ())).tokens)}
        return {"choices": [choice], "usage": usage, "timings": timings}

    def _decoded(self, prompt: Tokens) -> Json:
        """Decode a prompt at once; return its token counts."""
        n_past = min(self._n_common(prompt), len(prompt) - 1)
        rows = np.ones(len(prompt), np.bool_)
        rows[:n_past] = self._rows[:n_past]
        resident = int(rows[:n_past].sum())
        recovered = int((rows[:n_past] & self._loaded[:n_past]).sum())
        evicted = self._evict_to_budget(rows)
        n_said = len(prompt) - len(_BEGINS)
        self._tokens, self._rows = prompt[:n_said], rows[:n_said].copy()
        self._loaded, self._reuse = np.zeros(len(self._rows), np.bool_), _ANY
        usage = {"marker": "ok", "n_prompt": len(prompt), "decoded": len(prompt) - n_past}
        usage |= {"recovered": recovered, "resident_before": resident - recovered, "epoch": 1}
        n_rows = int(rows.sum())
        usage |= {"omitted": n_past - resident, "auto_evicted": evicted}
        return usage | {"n_resident": n_rows, "n_resident_peak": n_rows}

    def _n_common(self, prompt: Tokens) -> int:
        return min(common_prefix(prompt, self._tokens), self._reuse)

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
                self._keep(entry["name"], start, end)
                over -= end - start
        return evicted


def _hashes(tokens: Tokens, ends: Iterable[int]) -> dict[int, str]:
    """Return the hash of the tokens up to each of these ends."""
    hashed, at, found = hashlib.blake2b(digest_size=8), 0, {}
    for end in sorted(ends):
        hashed.update(tokens[at:end].tobytes())
        at, found[end] = end, hashed.copy().hexdigest()
    return found


def _answering(
    answer: Callable[[web.Request, Any], Json],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that answers from the request and its parsed body."""

    async def handle(request: web.Request) -> web.Response:
        call = orjson.loads(await request.read() or b"{}")
        data = orjson.dumps(answer(request, call))
        if call.get("stream"):
            events = b"data: %s\n\ndata: [DONE]\n\n" % data
            return web.Response(body=events, content_type="text/event-stream")
        return web.Response(body=data, content_type="application/json")

    return handle


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(text="# none\n")


async def _unread(request: web.Request) -> web.Response:
    async for _ in request.content.iter_any():
        pass
    return web.Response(body=b'{"tokens":[1]}', content_type="application/json")


@contextmanager
def silent_llama(n_ctx: int = N_CTX) -> Iterator[int]:
    """The port of such a server in a process of its own, which ends with the block."""
    port = free_port()
    command = [sys.executable, "-m", "bench.silent_llama", str(port), str(n_ctx)]
    with tempfile.TemporaryDirectory() as folder:
        with serving(command, port, Path(folder) / "server.log"):
            yield port


def main() -> None:
    """Serve on a port with a context of so many tokens, the two words of the command line."""
    port, n_ctx = map(int, sys.argv[1:])
    os.nice(5)
    llama = SilentLlama(n_ctx)
    app = web.Application(client_max_size=1 << 30)
    act = _answering(lambda got, call: llama.act(got.query["action"], call))
    routes = [
        web.get("/health", _answering(lambda *_: {"status": "ok"})),
        web.get("/metrics", _metrics),
        web.get("/props", _answering(lambda *_: llama.props())),
        web.get("/slots/{id}/blocks", _answering(lambda got, _: llama.slot(got.query))),
        web.post("/slots/{id}", act),
        web.post("/evoke/render", _answering(lambda _, call: llama.render(call))),
        web.post("/v1/chat/completions", _answering(lambda _, call: llama.chat(call))),
        web.route("*", "/{path:.*}", _unread),
    ]
    app.add_routes(routes)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main()
