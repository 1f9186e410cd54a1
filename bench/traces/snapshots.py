"""An unpatched llama-server behind the proxy, which saves slots to files and restores them.

The files have the format of llama-server, with few bytes for each token. The engine runs in this
process; its clocks run in virtual time."""

from __future__ import annotations

import asyncio
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import orjson

from bench.engine_in_process import DEFAULT_OPTIONS, LocalReply, body_of, reply_of
from bench.traces.proxied import ProxiedServer, proxied
from bench.traces.replay import Counts
from bench.traces.stock import Started, StockServer
from bench.traces.texts import ANSWER, Prompt, Scale, Tokens, numbers, words_of
from evoke_proxy.adapters import clock
from evoke_proxy.adapters.llama.client import CallOptions
from evoke_proxy.adapters.llama.transport import Reply
from evoke_proxy.engine.storage.threads import OrderedThread
from evoke_proxy.errors import UpstreamRejected

# Bytes of K and of V of a token in the files.
_ROW = 24
_ANSWER_WORD = "<answer>"
# Tokens that were decoded for the request of the current task.
_DECODED: ContextVar[list[int]] = ContextVar("_DECODED")


def file_bytes_of(tokens: int) -> int:
    """Return the bytes of a file with this many tokens, without its head."""
    return tokens * (4 + 12 + 2 * _ROW)


class FileServer(StockServer):
    """The calls of an unpatched server, with `--slot-save-path`.

    Attributes:
        folder: Where it saves slots.
    """

    folder = Path()

    async def start(self, prompt: Tokens, number: int | None = None) -> Started:
        """See StockServer; counts the tokens for the request of the task, if it has one."""
        started = await super().start(prompt, number)
        counted = _DECODED.get(None)
        if counted is not None:
            counted[0] += started.decoded
        return started

    async def call(
        self, method: str, target: str, body: object = None, options: CallOptions = DEFAULT_OPTIONS
    ) -> dict[str, Any]:
        """Replaces `LlamaClient.call`."""
        await asyncio.sleep(self.costs.call_s)
        if target == "/props":
            return {"total_slots": len(self.slots), "build_info": "replay"}
        if target == "/v1/models":
            return {"data": [{"id": "replay", "meta": {}}]}
        request = orjson.loads(body_of(body))
        if target == "/apply-template":
            return {"prompt": text_of(request)}
        if target == "/tokenize":
            return {"tokens": _tokens(request["content"]).tolist()}
        if target == "/completion":
            return await self._prefill(request)
        slot = int(target.split("/")[2].partition("?")[0])
        return await self._file(slot, target.partition("action=")[2], request)

    async def _prefill(self, request: Mapping[str, Any]) -> dict[str, Any]:
        prompt = np.array(request["prompt"], np.int32)
        began = asyncio.get_running_loop().time()
        started = await self.start(prompt, request.get("id_slot"))
        seconds = asyncio.get_running_loop().time() - began
        self._free(started.slot)
        timings: dict[str, float] = {"prompt_n": started.decoded, "prompt_ms": seconds * 1000}
        timings |= {"cache_n": len(prompt) - started.decoded}
        return {"id_slot": self.slots.index(started.slot), "timings": timings}

    async def _file(self, number: int, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        slot = self.slots[number]
        while slot.is_busy:
            await asyncio.sleep(0.01)
        if action == "erase":
            slot.tokens = slot.tokens[:0]
            return {"n_erased": 0}
        path = self.folder / Path(str(request["filename"])).name
        if action == "save":
            content = _file_of(slot.tokens)
            path.write_bytes(content)
        elif not path.exists():
            raise UpstreamRejected(400, b"{}")
        else:
            content = path.read_bytes()
            slot.tokens = np.frombuffer(content, "<i4", int.from_bytes(content[8:12], "little"), 12)
        n_bytes = len(slot.tokens) / self._scale.factor * self.costs.row_bytes
        seconds = n_bytes / self.costs.disk
        await asyncio.sleep(seconds)
        counts = {"n_saved": len(slot.tokens), "n_written": len(content)}
        counts |= {"n_restored": len(slot.tokens), "n_read": len(content)}
        return counts | {"timings": {f"{action}_ms": seconds * 1000}}

    @asynccontextmanager
    async def open(
        self, method: str, target: str, headers: Mapping[str, str], body: Any = None
    ) -> AsyncIterator[Reply]:
        """Replaces `LlamaClient.open`."""
        if method == "GET":
            yield reply_of(content=orjson.dumps(self._listed() if target == "/slots" else []))
            return
        request = orjson.loads(body_of(body))
        started = await self.start(_tokens(text_of(request)), request.get("id_slot"))
        counted = _DECODED.get()[0]  # with what was decoded to bring the conversation back
        yield reply_of((started, counted))

    def expect(self) -> None:
        """See AnsweringServer."""
        _DECODED.set([0])

    async def answered(self, reply: LocalReply, prompt: Prompt) -> tuple[Counts, dict[str, Any]]:
        """See AnsweringServer."""
        started, n_decoded = reply.decoded
        await self.finish(started.slot, prompt.answer)
        message = {"role": "assistant", "content": f"x {words_of(prompt.answer)}"}
        n_prompt, n_answer = len(prompt.tokens), len(prompt.answer)
        timings = {"cache_n": n_prompt - started.decoded, "prompt_n": started.decoded}
        timings |= {"predicted_n": n_answer}
        body = {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_answer},
            "timings": timings | {"prompt_ms": started.decoded / self.costs.prefill * 1000},
        }
        return Counts(n_decoded, started.copied), body

    def decoded_beside(self, session: str) -> int:
        """See AnsweringServer."""
        return 0

    def _listed(self) -> list[dict[str, Any]]:
        return [
            {"id": number, "id_task": slot.task, "is_processing": slot.is_busy}
            | {"n_prompt_tokens": len(slot.tokens)}
            for number, slot in enumerate(self.slots)
        ]


@asynccontextmanager
async def with_snapshots(
    server: FileServer, max_tokens: int, scale: Scale
) -> AsyncIterator[ProxiedServer]:
    """Run the proxy with snapshots of at most this many tokens."""
    with tempfile.TemporaryDirectory() as folder, _virtual_clocks():
        server.folder = Path(folder)
        limit = max(1, round(file_bytes_of(max_tokens) / (1 << 20)))
        settings = {"snapshots.directory": folder, "snapshots.max_mib": limit}
        settings |= {"snapshots.min_tokens": scale.tokens(256)}
        async with proxied(server, settings, server.costs) as arm:
            yield arm


@contextmanager
def _virtual_clocks() -> Iterator[None]:
    """Have the clocks of the engine run in virtual time, which must not pass in its own threads."""
    loop = asyncio.get_running_loop()
    times = mock.patch.object(time, "monotonic", loop.time)
    with times, mock.patch.object(clock, "uptime_s", loop.time):
        with mock.patch.object(OrderedThread, "_queue", _run_now):
            yield


def _run_now(thread: OrderedThread, work: Callable[[], Any]) -> Future[Any]:
    """Replaces `OrderedThread._queue`: waits for the call."""
    future = thread._thread.submit(work)
    wait([future])
    return future


def text_of(request: Mapping[str, Any]) -> str:
    """Return the text of a chat request as the template writes it."""
    parts = []
    for message in request["messages"]:
        text = str(message["content"])
        if message["role"] == "assistant":
            text = f"{_ANSWER_WORD} {text.partition(' ')[2]}"
        parts.append(text)
    if request.get("add_generation_prompt", True):
        parts.append(_ANSWER_WORD)
    return " ".join(parts)


def _tokens(text: str) -> Tokens:
    table = numbers()
    return np.array(
        [
            ANSWER if word == _ANSWER_WORD else table.get(word, ANSWER + 1 + len(word))
            for word in text.split()
        ],
        np.int32,
    )


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
