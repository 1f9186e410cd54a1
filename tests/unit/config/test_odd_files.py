"""Pipes and sockets where files or directories should be: an error at once, never a wait."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from evoke_proxy.adapters.llama.stock_api import ModelFiles
from evoke_proxy.adapters.secret_files import KeyFile
from evoke_proxy.config import SnapshotsConfig, load, loader
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.errors import ConfigError

LIMIT_S = 30.0


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


KINDS = {"pipe": _fifo, "socket": _socket}


def in_time(work: Callable[[], object]) -> BaseException | None:
    """What is raised; an AssertionError when it does not end."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            raised.append(None)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert raised, "it waits"
    return raised[0]


def opened(folder: Path) -> list[str]:
    """Open the snapshots there; what is left in it."""
    vault = SnapshotRepository(SnapshotsConfig(directory=str(folder), min_free_mib=0))
    vault.open()
    assert not vault.snapshots
    vault.close()
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lock", "index.sqlite", "quarantine", ""])
def test_start_refuses_paths_that_are_not_regular_files(
    kind: str, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "slots"
    if name:
        folder.mkdir()
    KINDS[kind](folder / name if name else folder)
    error = in_time(lambda: opened(folder))
    assert isinstance(error, ConfigError) and "slots" in str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["probe.evoke-part", "left.evoke-part", "left.evoke-kv"])
def test_other_files_in_the_snapshot_directory_are_renamed(
    kind: str, name: str, tmp_path: Path
) -> None:
    KINDS[kind](tmp_path / name)
    left: list[str] = []
    assert in_time(lambda: left.extend(opened(tmp_path))) is None
    assert name not in left


@pytest.mark.parametrize("kind", KINDS)
def test_pipes_and_sockets_as_files_do_not_block(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_PIPE_TIMEOUT_S", 0.1)
    path = tmp_path / "odd"
    KINDS[kind](path)
    path.chmod(0o600)
    assert isinstance(in_time(lambda: load(path)), ConfigError)
    assert isinstance(in_time(lambda: KeyFile(path)), ConfigError)
    assert in_time(lambda: ModelFiles().identify(str(path))) is None


def test_settings_are_read_from_a_pipe_with_a_writer() -> None:
    read, write = os.pipe()
    os.write(write, b"limits: {sessions: 7}\n")
    os.close(write)
    assert load(Path(f"/dev/fd/{read}")).limits.sessions == 7
    os.close(read)
