"""The processes of `bench.stall`: the proxy with its probe, and a client of small requests.

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
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from evoke_proxy.adapters.embedders.word_vectors import WordVectorEncoder
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
_DIMENSIONS = 384
_ENCODING_S = 0.0005


class Delays:
    """Delays of things that are due every `interval_s`; percentiles over time."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.reset()

    def reset(self) -> None:
        """Discard the measurements."""
        self._delays = array("d")

    def late(self, due: float, now: float) -> float:
        """Record what was due until now; return when the next is due."""
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
        # A list: nothing can be appended to an array while numpy looks at it.
        ms = np.array(self._delays.tolist()) * 1000
        found = np.percentile(ms, [50, 99, 99.9, 100]).tolist()
        return dict(zip(("p50", "p99", "p99.9", "worst"), found, strict=True))


class LoopProbe:
    """Measures the event loop it runs in: its lag, and the longest of its callbacks."""

    def __init__(self) -> None:
        self._due = 0.0
        self._thread = threading.get_ident()
        self.reset()

    def reset(self) -> None:
        """Discard the measurements."""
        self._lags = Delays(TICK_S)
        self._processor_s = self._collecting_s = 0.0

    def start(self) -> None:
        """Begin; called in the loop."""
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + TICK_S
        self._loop.call_at(self._due, self._tick)
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            if threading.get_ident() == self._thread:
                self._processor_s = max(self._processor_s, time.thread_time() - began)

        gc.callbacks.append(self._collected)
        asyncio.Handle._run = timed  # type: ignore[method-assign,assignment]

    def row(self) -> dict[str, Any]:
        """The lag, and the processor time of the longest callback and garbage collection, in ms."""
        longest = {"callback_cpu_ms": self._processor_s, "collection_ms": self._collecting_s}
        return {"lag": self._lags.row()} | {name: 1000 * s for name, s in longest.items()}

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


class NoEncoder:
    """Takes a while for the same vector of anything, and lets the others run meanwhile."""

    name = "none"
    is_immediate = is_english = False
    fingerprint = bytes(32)
    similar_words = WordVectorEncoder().similar_words

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

    def close(self) -> None:
        """End it, and wait until it has ended."""
        self._process.terminate()
        self._process.join(20)
        self._process.kill()
        self._process.join()
        self._commands.close()


def run_proxy(commands: Connection, settings: dict[str, Any]) -> None:
    """Serve with these settings, as `evoke-proxy serve` does, and measure the loop."""
    config = load(None, {}, settings)
    vars(shared)["EmbeddingService"] = partial(EmbeddingService, load=NoEncoder)
    logging.basicConfig(level=logging.ERROR)
    probe = LoopProbe()

    async def served() -> None:
        probe.start()
        await serve(config, lambda: config)

    _measure_on_command(commands, probe.reset, probe.row)
    event_loop.run(served())


def run_client(commands: Connection, port: int) -> None:
    """Send a small request every few milliseconds, and measure how long each answer takes."""
    delays = Delays(ASK_S)
    _measure_on_command(commands, delays.reset, delays.row)
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
