"""The processes of `bench.stall`: the proxy with its probe, a server, a client of small requests.

Proxy and client measure between the commands `begin` and `end`. Percentiles are over time, not over
samples: while the event loop is blocked, every sample that was due counts with its own waiting
time."""

from __future__ import annotations

import asyncio
import gc
import http.client
import logging
import multiprocessing
import os
import signal
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from bench.growth_server import SilentServer, Tokens
from evoke_proxy.config import EmbedderConfig, load
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.engine import shared
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.web import event_loop
from evoke_proxy.web.serve import serve

TICK_S = 0.002
ASK_S = 0.005
# The client's small request; its answer is relayed without being read.
SMALL = ("POST", "/tokenize", b'{"content":"hello"}')
# Callbacks whose lines are listed take longer; the interval of the samples.
_LONG_S = 0.008
_SAMPLE_S = 0.001
_BYTES_A_TOKEN = 4
_BEGINS = np.array([1, 2, 3, 4], np.int32)
_DIMENSIONS = 384
_ENCODING_S = 0.0005


class Delays:
    """Delays of things that are due every `interval_s`; percentiles over time."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._delays = array("d")

    def late(self, due: float, now: float) -> float:
        """Record all that was due until now; when the next is due."""
        while due <= now:
            self._delays.append(now - due)
            due += self._interval_s
        return due

    def row(self) -> dict[str, float]:
        """Milliseconds: median, 99 and 99.9 percent, the worst.

        Raises ValueError when nothing was recorded: no delays are not short ones.
        """
        if not self._delays:
            raise ValueError("no delay was recorded: the probe does not run")
        ms = np.array(self._delays.tolist()) * 1000  # an export would block appending meanwhile
        p50, p99, p999 = np.percentile(ms, [50, 99, 99.9])
        return {
            "p50": float(p50),
            "p99": float(p99),
            "p99.9": float(p999),
            "worst": float(ms.max()),
        }


class LoopProbe:
    """Measures the event loop it runs in: its lag, and the longest of its callbacks.

    With `where` a timer of the process samples the lines at which long callbacks spend their time.
    """

    def __init__(self, where: bool = False) -> None:
        self._where = where
        self._due = 0.0
        self._thread = threading.get_ident()
        self.reset()

    def reset(self) -> None:
        """Discard the measurements."""
        self._lags = Delays(TICK_S)
        self._processor_s = self._wall_s = self._collecting_s = 0.0
        self._lines = Counter[str]()
        # Lines of the callback that runs now.
        self._samples: list[str] = []

    def start(self) -> None:
        """Begin; called in the loop."""
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + TICK_S
        self._loop.call_at(self._due, self._tick)
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            wall, processor = time.perf_counter(), time.thread_time()
            run(handle)
            if threading.get_ident() == self._thread:
                taken_s = time.thread_time() - processor
                self._processor_s = max(self._processor_s, taken_s)
                self._wall_s = max(self._wall_s, time.perf_counter() - wall)
                if self._where:
                    self._note_lines(taken_s)

        gc.callbacks.append(self._collected)
        asyncio.Handle._run = timed  # type: ignore[method-assign,assignment]
        if self._where:
            signal.signal(signal.SIGPROF, self._sample)
            signal.setitimer(signal.ITIMER_PROF, _SAMPLE_S, _SAMPLE_S)

    def row(self) -> dict[str, Any]:
        """The lag in ms; processor and wall time of the longest callback."""
        row: dict[str, Any] = {"lag": self._lags.row()}
        row |= {"callback_cpu_ms": self._processor_s * 1000, "callback_ms": self._wall_s * 1000}
        row["collection_ms"] = self._collecting_s * 1000
        if self._where:
            row["where"] = self._lines.most_common(16)
        return row

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        """Note how long the longest garbage collection takes."""
        if phase == "start":
            self._collection_began = time.thread_time()
        else:
            taken = time.thread_time() - self._collection_began
            self._collecting_s = max(self._collecting_s, taken)

    def _tick(self) -> None:
        try:
            self._due = self._lags.late(self._due, self._loop.time())
        finally:
            self._loop.call_at(self._due, self._tick)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        """Note the line at which the event loop is; runs in its thread."""
        names: list[str] = []
        while frame is not None and len(names) < 7:
            code = frame.f_code
            names.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        self._samples.append(" < ".join(names))

    def _note_lines(self, taken_s: float) -> None:
        """Count the lines of a callback that has taken long, and begin the next one's."""
        if taken_s > _LONG_S:
            self._lines.update(self._samples)
        self._samples.clear()


class NoEncoder:
    """Takes a while for the same vector of anything, and lets the others run meanwhile."""

    name = "none"
    is_immediate = False
    fingerprint = bytes(32)

    def __init__(self, _: EmbedderConfig) -> None:
        vector = np.ones(_DIMENSIONS, np.float32)
        self._vector = vector / np.linalg.norm(vector)

    def describe(self) -> str:
        """One line for a person."""
        return "vectors without a model"

    def queries(self, texts: Sequence[str]) -> Vectors:
        """The same vector for each."""
        time.sleep(_ENCODING_S * len(texts))
        return np.tile(self._vector, (len(texts), 1))

    documents = queries


class Measured:
    """A process of its own that measures."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run `work`, with a connection for commands before these arguments."""
        context = multiprocessing.get_context("spawn")
        self._commands, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, command: str) -> dict[str, Any]:
        """Send `begin` or `end` and return the measurements; EOFError when it has ended."""
        self._commands.send(command)
        row: dict[str, Any] = self._commands.recv()
        return row

    def peak_mib(self) -> float:
        """The most memory that it has had."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) / 1024

    def close(self) -> None:
        """End it, and wait until it has ended."""
        self._process.terminate()
        self._process.join(20)
        self._process.kill()
        self._process.join()
        self._commands.close()


def run_proxy(commands: Connection, settings: dict[str, Any], where: bool) -> None:
    """Serve with these settings, as `evoke-proxy serve` does, and measure the loop."""
    config = load(None, {}, settings)
    vars(shared)["EmbeddingService"] = partial(EmbeddingService, load=NoEncoder)
    logging.basicConfig(level=logging.ERROR)
    probe = LoopProbe(where)

    async def served() -> None:
        probe.start()
        await serve(config, lambda: config)

    _measure_on_command(commands, probe.reset, probe.row)
    event_loop.run(served())


def run_client(commands: Connection, port: int) -> None:
    """Send a small request every few milliseconds, and measure how long each answer takes."""
    delays = Delays(ASK_S)

    def reset() -> None:
        nonlocal delays
        delays = Delays(ASK_S)

    _measure_on_command(commands, reset, lambda: delays.row())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    method, path, body = SMALL
    due = time.perf_counter()
    while True:
        time.sleep(max(0.0, due - time.perf_counter()))
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status}")
        due = delays.late(due, time.perf_counter())


def _measure_on_command(
    commands: Connection, reset: Callable[[], None], row: Callable[[], dict[str, Any]]
) -> None:
    def follow() -> None:
        try:
            while True:
                command = commands.recv()
                if command == "begin":
                    reset()
                commands.send(row() if command == "end" else {})
        except EOFError:
            os._exit(0)

    threading.Thread(target=follow, daemon=True).start()


class Said:
    """The messages of a request as tokens: one for every four bytes of text."""

    def __init__(self, messages: Sequence[dict[str, Any]]) -> None:
        self.messages = [{"role": str(message.get("role", "user"))} for message in messages]
        self.ends: list[int] = []
        self.stops: list[int] = []
        parts, at = [np.zeros(0, np.int32)], 0
        for message in messages:
            content = message.get("content", "")
            text = (content if isinstance(content, str) else "[image]").encode() or b"none"
            padded = text + b" " * (-len(text) % _BYTES_A_TOKEN)
            ids = (np.frombuffer(padded, "<u4") % 100_000 + 10).astype(np.int32)
            if message.get("role") == "assistant":
                ids = np.concatenate([_BEGINS, ids])
            ends = np.flatnonzero(np.frombuffer(padded, np.uint8) == ord(".")) // _BYTES_A_TOKEN
            self.stops += (at + ends[ends > 0]).tolist()
            parts.append(ids)
            at += len(ids)
            self.ends.append(at)
        self.tokens: Tokens = np.concatenate(parts)


class SilentLlama(SilentServer):
    """A SilentServer for any request; remembers the names of saved copies."""

    n_ctx = 1 << 21

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[str, dict[str, Any]] = {}

    def render(self, data: bytes) -> bytes:
        """The answer to /evoke/render."""
        self._ask(orjson.loads(data)["body"])
        return self._answer("/evoke/render", data)

    def act(self, target: str, data: bytes) -> bytes:
        """The answer to a block call."""
        call = orjson.loads(data or b"{}")
        for op in call.get("ops", ()):
            if op["op"] == "save":
                tenant = call.get("tenant", "")
                copy = {"name": op["name"], "p0": op["p0"], "p1": op["p1"], "tenant": tenant}
                self.copies[op["name"]] = copy
        if "block-drop" in target:
            for name in call.get("names", ()):
                self.copies.pop(name, None)
        if "action=block-plan" in target:
            return self._answer(target, data)
        return orjson.dumps({"epoch": self._epoch})

    def slot(self, query: Mapping[str, str]) -> bytes:
        """The answer to GET /slots/0/blocks."""
        tenant, latest = query.get("tenant", ""), query.get("since") == "latest"
        copies = [] if latest else [c for c in self.copies.values() if c["tenant"] == tenant]
        return orjson.dumps(self._slot() | {"tokens_hash": "", "blocks": copies})

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """The timings of an answer to a chat."""
        self._ask(body)
        prompt = self._prompt()
        n = min(len(prompt), len(self._tokens))
        differs = prompt[:n] != self._tokens[:n]
        common = min(int(differs.argmax()) if differs.any() else n, len(prompt) - 1)
        self._tokens, self._rows = self._tokens[:common], self._rows[:common]
        resident = int(self._rows.sum())
        recovered = min(self._before[1], resident)
        self._before = (resident - recovered, recovered)
        timings = self.decode()
        self._before = (0, 0)
        return timings

    def _ask(self, body: dict[str, Any]) -> None:
        self.talk = Said(body.get("messages", ()))  # type: ignore[assignment]


def run_server(_: Connection, port: int) -> None:
    """Serve as a llama-server that computes nothing.

    A chat whose `model` is `bytes-N` is answered with N bytes of text.
    """
    os.nice(5)
    llama = SilentLlama()
    app = web.Application(client_max_size=1 << 30)
    for method, path, answer in (
        ("GET", "/health", lambda _: b'{"status":"ok"}'),
        ("GET", "/props", lambda _: llama._answer("/props", b"{}")),
        ("GET", "/metrics", lambda _: b"# none\n"),
        ("GET", "/slots/{id}/blocks", lambda request: llama.slot(request.query)),
    ):
        app.router.add_route(method, path, partial(_answered, answer))
    for path, answer_to in (
        ("/slots/{id}", llama.act),
        ("/evoke/render", lambda _, data: llama.render(data)),
        ("/v1/chat/completions", lambda _, data: _chat(llama, orjson.loads(data))),
    ):
        app.router.add_post(path, partial(_answered_to, answer_to))
    app.router.add_route("*", "/{path:.*}", _small)
    web.run_app(app, host="127.0.0.1", port=port, print=lambda *_: None)


async def _answered(answer: Callable[[web.Request], bytes], request: web.Request) -> web.Response:
    return web.Response(body=answer(request), content_type="application/json")


async def _answered_to(answer: Callable[[str, bytes], bytes], request: web.Request) -> web.Response:
    data = await request.read()
    return await _answered(lambda request: answer(request.path_qs, data), request)


async def _small(request: web.Request) -> web.Response:
    async for _ in request.content.iter_any():
        pass
    return web.Response(body=b'{"tokens":[1]}', content_type="application/json")


def _chat(llama: SilentLlama, body: dict[str, Any]) -> bytes:
    timings = llama.reply(body)
    kind, _, size = str(body.get("model", "")).partition("-")
    text = "a" * int(size) if kind == "bytes" else "Yes."
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choices = [{"index": 0, "finish_reason": "stop", "message": message}]
    return orjson.dumps({"choices": choices, "usage": usage, "timings": timings})
