"""Starts the processes of the proxy tests: a llama-server, a proxy in a thread."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from evoke_proxy.config import Config, load
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.engine.parsing.body_budget import BodyBudget
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.server.server import Server
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server
from evoke_proxy.web.request_bodies import BODY_BUDGET
from evoke_proxy.web.serve import listen_for_clients, make_runner

# What takes milliseconds has so long on a machine that does other things.
PATIENCE_S = 60.0
_taken: list[socket.socket] = []


def until(
    holds: Callable[[], object], what: str = "what is waited for", limit_s: float = PATIENCE_S
) -> None:
    """Wait until a condition is true; fails after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not in {limit_s:g} s: {what}"
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer as its client received it."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes
    chunks: tuple[bytes, ...] = field(default=())


def ask(
    port: int,
    method: str,
    target: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request on a connection of its own; no header is added but Host and framing."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        chunks = tuple(iter(lambda: response.read1(65536), b""))
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, response.reason, named, b"".join(chunks), chunks)
    finally:
        connection.close()


def counted(port: int, name: str) -> int:
    """The value of a counter of llama-server's own metrics."""
    lines = ask(port, "GET", "/metrics").body.decode().splitlines()
    (total,) = [line for line in lines if line.startswith(f"llamacpp:{name} ")]
    return int(float(total.split()[1]))


@contextmanager
def llama_server(
    binary: str, *options: str, port: int = 0, model: Path | None = None
) -> Iterator[int]:
    """A llama-server, with the bundled model and on a free port unless others are given."""
    named = str(model or bundled_model())
    with any_server(binary, "-m", named, "-t", "1", "-c", "8192", *options, port=port) as served:
        yield served


@contextmanager
def any_server(binary: str, *options: str, port: int = 0) -> Iterator[int]:
    """A llama-server with these options and no other, on a free port unless one is given."""
    port = port or free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "llama-server.log"
        with serving([binary, "--port", str(port), *options], port, log):
            yield port


def unused_port() -> int:
    """A reserved port without a listener: connections to it are refused."""
    if not _taken:
        _taken.append(socket.socket())
        _taken[0].bind(("127.0.0.1", 0))
    return int(_taken[0].getsockname()[1])


def process_on(port: int) -> int:
    """The process id of the server on a port."""
    named = (b"--port", str(port).encode())
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it is no process, or has ended meanwhile
            continue
        if words[0].endswith(b"llama-server") and named in zip(words, words[1:], strict=False):
            return int(folder.name)
    raise AssertionError(f"no llama-server on {port}")


class ThreadedLoop:
    """An event loop in a thread, for servers that sync tests talk to over sockets."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> ThreadedLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


@dataclass(frozen=True, slots=True)
class RunningProxy:
    """A proxy and the objects behind it."""

    port: int
    engine: ModelRouter
    loop: asyncio.AbstractEventLoop
    bodies: BodyBudget

    @property
    def engines(self) -> list[Server]:
        """Of every server, and of every model of one that routes."""
        return [served.server for served in self.engine.served_models]

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample; 0 when it was never touched.

        Waits for what follows the last byte of an answer: the client is faster than the books.
        """
        self.quiet()
        return self.engine.metrics.registry.get_sample_value(name, labels) or 0.0

    def quiet(self) -> None:
        """Wait until no request runs and no conversation is in use."""
        until(lambda: self._in_loop(self._is_quiet), "no request is under way")

    def settled(self) -> None:
        """Wait until nothing goes on behind the answers either: copies, what is decoded ahead,
        files that are written or go."""
        until(lambda: self._in_loop(self._is_settled), "nothing is under way")

    def _in_loop(self, look: Callable[[], bool]) -> bool:
        # What ends a request and begins what follows is one step there.
        async def looked() -> bool:
            return look()

        return asyncio.run_coroutine_threadsafe(looked(), self.loop).result(PATIENCE_S)

    def _is_quiet(self) -> bool:
        # Whoever listens to events does so for ever.
        asking = self.engine.metrics.in_flight._value.get() - len(self.engine.feed)
        in_use = any(known.in_use for engine in self.engines for known in engine.conversations)
        return asking <= 0 and not in_use

    def _is_settled(self) -> bool:
        busy = any(_is_busy(server) for server in self.engines)
        return self._is_quiet() and not busy


def _is_busy(server: Server) -> bool:
    snapshots = server.strategies.snapshots
    return server.resources.background.busy or getattr(snapshots, "is_busy", False)


@contextmanager
def proxy(upstream_port: int, **overrides: object) -> Iterator[RunningProxy]:
    """The real proxy in front of a port; keyword `policy__budget=...` sets `policy.budget`."""
    with _in_front({"upstream.url": f"http://127.0.0.1:{upstream_port}"}, overrides) as running:
        yield running


@contextmanager
def pool(ports: Mapping[str, int], **overrides: object) -> Iterator[RunningProxy]:
    """As `proxy`, in front of several ports by name."""
    several = [f"{name}=http://127.0.0.1:{port}" for name, port in ports.items()]
    with _in_front({"pool.upstreams": several}, overrides) as running:
        yield running


@contextmanager
def _in_front(
    settings: Mapping[str, object], overrides: Mapping[str, object]
) -> Iterator[RunningProxy]:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    config = load(None, {}, {**settings, **dotted})
    with ThreadedLoop() as thread:
        started: asyncio.Future[RunningProxy] = asyncio.Future(loop=thread.loop)
        stop = asyncio.Event()
        ended = asyncio.run_coroutine_threadsafe(_serve(config, started, stop), thread.loop)
        try:
            yield asyncio.run_coroutine_threadsafe(_first(started), thread.loop).result(PATIENCE_S)
        finally:
            thread.loop.call_soon_threadsafe(stop.set)
            ended.result(2 * PATIENCE_S)


async def _first(started: asyncio.Future[RunningProxy]) -> RunningProxy:
    return await started


async def _serve(
    config: Config, started: asyncio.Future[RunningProxy], stop: asyncio.Event
) -> None:
    async with build_gateway(config) as engine:
        runner = make_runner(engine)
        await runner.setup()
        try:
            await listen_for_clients(runner, engine, ["127.0.0.1:0"])
            port = runner.addresses[0][1]
            own = cast(ModelRouter, engine)
            started.set_result(
                RunningProxy(port, own, asyncio.get_running_loop(), runner.app[BODY_BUDGET])
            )
            await stop.wait()
        finally:
            await runner.cleanup()


def server_binary(*, patched: bool) -> str:
    """The server to test: what the environment names, else what `make build` has built."""
    named = os.environ.get("EVOKE_PATCHED_SERVER" if patched else "EVOKE_STOCK_SERVER")
    return named or str(ensure_server(patched=patched, progress=False))
