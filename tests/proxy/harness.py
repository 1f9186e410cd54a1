"""Starts llama-server as a process and the proxy in a thread, and sends requests to them."""

from __future__ import annotations

import asyncio
import functools
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

from aiohttp import web_app

from evoke_proxy.adapters.embedders import word_vectors
from evoke_proxy.config import Config, load
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.engine.parsing.body_budget import BodyBudget
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.server.server import Server
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server
from evoke_proxy.web.event_loop import new_event_loop
from evoke_proxy.web.request_bodies import BODY_BUDGET
from evoke_proxy.web.serve import listen_for_clients, make_runner

# Time limit for things that take milliseconds on an idle machine.
TIMEOUT_S = 60.0
_reserved: list[socket.socket] = []
# The tables of the built-in encoder are most of a proxy's start: those of the same file are parsed
# once per test process. Nothing changes them, and each proxy has an encoder of its own.
word_vectors._vectors_in = functools.cache(word_vectors._vectors_in)
word_vectors._similar_words_in = functools.cache(word_vectors._similar_words_in)


def until(
    condition: Callable[[], object], what: str = "the condition", limit_s: float = TIMEOUT_S
) -> None:
    """Wait until `condition()` is true; fails after `limit_s` seconds, naming `what`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete response as its client received it; header names are in lower case."""

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
    """Send one request on its own connection, with no added headers but Host and Content-Length."""
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
        received = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, response.reason, received, b"".join(chunks), chunks)
    finally:
        connection.close()


def server_counter(port: int, name: str, model: str = "") -> int:
    """Return the value of a counter in llama-server's own metrics; `model` is one of a router."""
    path = f"/metrics?model={model}" if model else "/metrics"
    lines = ask(port, "GET", path).body.decode().splitlines()
    (total,) = [line for line in lines if line.startswith(f"llamacpp:{name} ")]
    return int(float(total.split()[1]))


@contextmanager
def llama_server(
    binary: str, *options: str, port: int = 0, model: Path | None = None
) -> Iterator[int]:
    """Start a llama-server; by default with the bundled model and on a free port."""
    path = str(model or bundled_model())
    with bare_llama_server(
        binary, "-m", path, "-t", "1", "-c", "8192", *options, port=port
    ) as used:
        yield used


@contextmanager
def bare_llama_server(binary: str, *options: str, port: int = 0) -> Iterator[int]:
    """Start a llama-server with these options only; by default on a free port."""
    port = port or free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "llama-server.log"
        with serving([binary, "--port", str(port), *options], port, log):
            yield port


def unused_port() -> int:
    """Return a reserved port without a listener: connections to it are refused."""
    if not _reserved:
        _reserved.append(socket.socket())
        _reserved[0].bind(("127.0.0.1", 0))
    return int(_reserved[0].getsockname()[1])


def process_on(port: int) -> int:
    """Return the process id of the llama-server on a port."""
    option = (b"--port", str(port).encode())
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # not a process, or it has just ended
            continue
        if words[0].endswith(b"llama-server") and option in zip(words, words[1:], strict=False):
            return int(folder.name)
    raise AssertionError(f"no llama-server on port {port}")


class ThreadedLoop:
    """An event loop in a thread, for servers that synchronous tests connect to."""

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> ThreadedLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(TIMEOUT_S)
        self.loop.close()


@dataclass(frozen=True, slots=True)
class RunningProxy:
    """A proxy that runs in a thread, and its internal objects.

    Attributes:
        port: Where clients connect.
        gateway: The gateway that answers their requests.
        loop: The event loop that the proxy runs in.
        bodies: The memory budget of request bodies.
    """

    port: int
    gateway: ModelRouter
    loop: asyncio.AbstractEventLoop
    bodies: BodyBudget

    @property
    def servers(self) -> list[Server]:
        """All servers; a llama-server in router mode has one for each model."""
        return [served.server for served in self.gateway.served_models]

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one sample; 0 if it was never set.

        Waits until the proxy is idle, because requests are counted after their last byte is sent.
        """
        self.wait_until_idle()
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0

    def wait_until_idle(self) -> None:
        """Wait until no request runs and no conversation is in use."""
        until(lambda: self._in_loop(self._is_idle), "no request runs")

    def wait_for_background(self) -> None:
        """Wait until no request and no background task runs.

        Background tasks are write-back, look-ahead, and the writing and deletion of files.
        """
        until(lambda: self._in_loop(self._is_background_idle), "no background task runs")

    def _in_loop(self, check: Callable[[], bool]) -> bool:
        # In the event loop no state between a request and its background tasks can be observed.
        async def checked() -> bool:
            return check()

        return asyncio.run_coroutine_threadsafe(checked(), self.loop).result(TIMEOUT_S)

    def _is_idle(self) -> bool:
        # Requests for the event stream never end, so they do not count.
        n_requests = self.gateway.metrics.in_flight._value.get() - len(self.gateway.feed)
        conversations = [each for server in self.servers for each in server.conversations]
        return n_requests <= 0 and not any(each.in_use for each in conversations)

    def _is_background_idle(self) -> bool:
        busy = any(_has_background_tasks(server) for server in self.servers)
        return self._is_idle() and not busy


def _has_background_tasks(server: Server) -> bool:
    snapshots = server.strategies.snapshots
    return server.resources.background.busy or getattr(snapshots, "is_busy", False)


@contextmanager
def proxy(upstream_port: int, **overrides: object) -> Iterator[RunningProxy]:
    """Start a proxy in front of a port; keyword `policy__budget=...` sets `policy.budget`."""
    with _start_proxy({"upstream.url": f"http://127.0.0.1:{upstream_port}"}, overrides) as running:
        yield running


@contextmanager
def pool(ports: Mapping[str, int], **overrides: object) -> Iterator[RunningProxy]:
    """Start a proxy in front of several named ports; keywords as for `proxy`."""
    upstreams = [f"{name}=http://127.0.0.1:{port}" for name, port in ports.items()]
    with _start_proxy({"pool.upstreams": upstreams}, overrides) as running:
        yield running


@contextmanager
def _start_proxy(
    settings: Mapping[str, object], overrides: Mapping[str, object]
) -> Iterator[RunningProxy]:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    config = load(None, {}, {**settings, **dotted})
    with ThreadedLoop() as thread:
        started: asyncio.Future[RunningProxy] = asyncio.Future(loop=thread.loop)
        stop = asyncio.Event()
        serving_task = asyncio.run_coroutine_threadsafe(_serve(config, started, stop), thread.loop)
        try:
            yield asyncio.run_coroutine_threadsafe(_await(started), thread.loop).result(TIMEOUT_S)
        finally:
            thread.loop.call_soon_threadsafe(stop.set)
            serving_task.result(2 * TIMEOUT_S)


async def _await(started: asyncio.Future[RunningProxy]) -> RunningProxy:
    return await started


async def _serve(
    config: Config, started: asyncio.Future[RunningProxy], stop: asyncio.Event
) -> None:
    async with build_gateway(config) as gateway:
        runner = make_runner(gateway)
        await runner.setup()
        try:
            await listen_for_clients(runner, gateway, ["127.0.0.1:0"])
            port = runner.addresses[0][1]
            router = cast(ModelRouter, gateway)
            started.set_result(
                RunningProxy(port, router, asyncio.get_running_loop(), runner.app[BODY_BUDGET])
            )
            await stop.wait()
        finally:
            await runner.cleanup()
            # aiohttp keeps its last 1024 applications in this cache, each with all of its proxy.
            web_app._cached_build_middleware.cache_clear()


def server_binary(*, patched: bool) -> str:
    """Return the path of llama-server: from the environment, or built by `make build`."""
    path = os.environ.get("EVOKE_PATCHED_SERVER" if patched else "EVOKE_STOCK_SERVER")
    return path or _built_server(patched)


@functools.cache
def _built_server(patched: bool) -> str:
    return str(ensure_server(patched=patched, progress=False))
