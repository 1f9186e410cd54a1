"""Fixtures of the proxy tests: one stock llama-server, and a proxy in front of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_upstream import FakeUpstream, fake_upstream, says_ok
from running import RunningProxy, llama_server, proxy, server_binary

from evoke_proxy.web.dialects import ANSWER_PATHS

Json = dict[str, Any]
_SOAK_S = 30
_soak: dict[str, Any] = {}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the soak, if it is to be run, at once: it takes a minute whatever else is done."""
    named = [item.name for item in session.items]
    if "test_a_minute_of_mixed_agents" not in named or session.config.option.collectonly:
        return
    server_binary(patched=True)
    server_binary(patched=False)
    _soak["folder"] = tempfile.TemporaryDirectory()
    out = Path(_soak["folder"].name) / "soak.json"
    command = [sys.executable, "-m", "bench.soak", "--seconds", str(_SOAK_S), "--out", str(out)]
    command += ["--agents", "3", "--pause", "0.5"]
    _soak["process"] = subprocess.Popen(
        ["nice", "-n", "10", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    _soak["out"] = out


def pytest_sessionfinish() -> None:
    """Nothing of it outlives the tests."""
    if _soak:
        _soak["process"].send_signal(signal.SIGINT)  # so that it ends what it has started
        _soak["process"].wait()
        _soak["folder"].cleanup()


@pytest.fixture
def soaking() -> tuple[Any, Path]:
    """The soak that was begun, and where it says what came of it."""
    return _soak["process"], _soak["out"]


@pytest.fixture(scope="session")
def stock_port() -> Iterator[int]:
    """The port of a stock llama-server with metrics and slots."""
    with llama_server(server_binary(patched=False), "-np", "1", "--metrics") as port:
        yield port


@pytest.fixture(scope="session")
def stock_proxy(stock_port: int) -> Iterator[RunningProxy]:
    """A proxy with default settings in front of the stock server."""
    with proxy(stock_port) as running:
        yield running


@pytest.fixture(scope="session")
def patched_port() -> Iterator[int]:
    """The port of a patched llama-server with one slot."""
    binary = server_binary(patched=True)
    with llama_server(binary, "-np", "1", "--evoke-ram", "64", "--metrics") as port:
        yield port


@pytest.fixture
def patched_proxy(patched_port: int) -> Iterator[RunningProxy]:
    """A proxy of its own in front of the patched server."""
    with proxy(patched_port) as running:
        yield running


@pytest.fixture(scope="session")
def two_slots_port() -> Iterator[int]:
    """The port of a patched llama-server with two slots, each with cells of its own."""
    binary = server_binary(patched=True)
    with llama_server(binary, "-np", "2", "-no-kvu", "--evoke-ram", "64") as port:
        yield port


@pytest.fixture
def noting(patched_port: int) -> Iterator[tuple[RunningProxy, list[Json]]]:
    """A proxy of its own, and the bodies it forwards to a chat of any dialect."""
    sent: list[Json] = []
    with proxy(patched_port) as running:
        upstream = running.engine.upstream
        opened = upstream.open

        def noted(method: str, target: str, headers: Any, body: Any = None) -> Any:
            if target in ANSWER_PATHS and isinstance(body, bytes):
                sent.append(json.loads(body))
            return opened(method, target, headers, body)

        upstream.open = noted  # type: ignore[method-assign]
        yield running, sent


@pytest.fixture
def echo() -> Iterator[FakeUpstream]:
    with fake_upstream(says_ok) as fake:
        yield fake
