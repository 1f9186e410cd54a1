"""Fixtures of the proxy tests: llama-servers, proxies in front of them, a fake server, the soak."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_upstream import FakeUpstream, answer_ok, fake_upstream
from harness import RunningProxy, llama_server, proxy, server_binary, until

from evoke_proxy.web.endpoints import ANSWER_PATHS

Json = dict[str, Any]
_SOAK_S, _SOAK_TIMEOUT_S = 30, 500
# The name of this pytest-xdist worker process; empty without workers.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
_soak: list[subprocess.Popen[bytes]] = []


def _soak_folder(base: Path) -> Path:
    """Return the folder of the soak's result, the same for all worker processes."""
    return (base.parent if _WORKER else base) / "soak"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the soak before the tests if it is selected, because it takes a minute."""
    selected = [item.name for item in session.items]
    if "test_mixed_agents_run_for_a_minute_without_faults" not in selected:
        return
    if session.config.option.collectonly:
        return
    if _WORKER not in ("", "gw0"):
        return
    server_binary(patched=True)
    server_binary(patched=False)
    folder = _soak_folder(session.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    folder.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("soak_runner.py")), str(folder)]
    command += ["--seconds", str(_SOAK_S), "--agents", "3", "--pause", "0.5"]
    root = Path(__file__).parents[2]
    _soak.append(
        subprocess.Popen(
            ["nice", "-n", "10", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
        )
    )


def pytest_sessionfinish(exitstatus: int) -> None:
    """Stop the soak, unless another worker process may still wait for its result."""
    for process in _soak:
        if not _WORKER or exitstatus == pytest.ExitCode.INTERRUPTED:
            process.send_signal(signal.SIGINT)  # it then stops the processes that it started
        try:
            process.wait(_SOAK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def soak_result(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """Wait for the result of the soak: its exit `code` and its output."""
    folder = _soak_folder(tmp_path_factory.getbasetemp())
    until((folder / "code").exists, "the soak ends", _SOAK_TIMEOUT_S)
    result = json.loads((folder / "soak.json").read_text())
    return {"code": int((folder / "code").read_text()), **result}


@pytest.fixture(scope="session")
def stock_port() -> Iterator[int]:
    """The port of a stock llama-server with one slot and metrics."""
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
    """A new proxy in front of the patched server."""
    with proxy(patched_port) as running:
        yield running


@pytest.fixture(scope="session")
def two_slots_port() -> Iterator[int]:
    """The port of a patched llama-server with two slots, each with its own cells."""
    binary = server_binary(patched=True)
    with llama_server(binary, "-np", "2", "-no-kvu", "--evoke-ram", "64") as port:
        yield port


@pytest.fixture
def recording_proxy(patched_port: int) -> Iterator[tuple[RunningProxy, list[Json]]]:
    """A new proxy, and the bodies of the chat requests of any dialect that it forwards."""
    bodies: list[Json] = []
    with proxy(patched_port) as running:
        upstream = running.gateway.upstream
        original = upstream.open

        def recording_open(method: str, target: str, headers: Any, body: Any = None) -> Any:
            if target in ANSWER_PATHS and isinstance(body, bytes):
                bodies.append(json.loads(body))
            return original(method, target, headers, body)

        upstream.open = recording_open  # type: ignore[method-assign]
        yield running, bodies


@pytest.fixture
def echo() -> Iterator[FakeUpstream]:
    """A fake llama-server that answers every request with `ok`."""
    with fake_upstream(answer_ok) as fake:
        yield fake
