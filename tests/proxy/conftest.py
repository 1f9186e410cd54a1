"""Fixtures of the proxy tests: one stock llama-server, and a proxy in front of it."""

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
_SOAK_S, _SOAK_ENDS_S = 30, 500
# Which of the processes that share the tests this is, empty when there is one.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
_soak: list[subprocess.Popen[bytes]] = []


def _soak_folder(base: Path) -> Path:
    """The folder of the soak's result, the same for all test processes."""
    return (base.parent if _WORKER else base) / "soak"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the soak first if it is selected, because it takes a minute."""
    named = [item.name for item in session.items]
    if "test_a_minute_of_mixed_agents" not in named or session.config.option.collectonly:
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
    """End the soak; another test process may still wait for its result."""
    for process in _soak:
        if not _WORKER or exitstatus == pytest.ExitCode.INTERRUPTED:
            process.send_signal(signal.SIGINT)  # so that it ends what it has started
        try:
            process.wait(_SOAK_ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def soaked(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """The result of the soak: its exit `code` and its output."""
    folder = _soak_folder(tmp_path_factory.getbasetemp())
    until((folder / "code").exists, "the soak ends", _SOAK_ENDS_S)
    written = json.loads((folder / "soak.json").read_text())
    return {"code": int((folder / "code").read_text()), **written}


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
    with fake_upstream(answer_ok) as fake:
        yield fake
