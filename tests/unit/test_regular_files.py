"""Pipes and sockets in place of files are errors, never a wait; directories are synced."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from evoke_proxy.adapters.llama.stock_api import ModelFiles
from evoke_proxy.adapters.secret_files import KeyFile
from evoke_proxy.config import SnapshotsConfig, load, loader
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.errors import ConfigError
from evoke_proxy.regular_files import sync_directory

LIMIT_S = 30.0


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        previous = os.getcwd()
        os.chdir(path.parent)  # a socket's path has a small length limit
        try:
            server.bind(path.name)
        finally:
            os.chdir(previous)


KINDS = {"pipe": _fifo, "socket": _socket}


def error_in_time(work: Callable[[], object]) -> BaseException | None:
    """Runs `work` in a thread; returns what it raises, or None. Fails if it does not end."""
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
    assert raised, "the call blocks"
    return raised[0]


def files_after_opening(folder: Path) -> list[str]:
    """Opens and closes a repository in `folder`; returns the names of its files."""
    repository = SnapshotRepository(SnapshotsConfig(directory=str(folder), min_free_mib=0))
    repository.open()
    assert not repository.snapshots
    repository.close()
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lock", "index.sqlite", "quarantine", ""])
def test_a_pipe_or_socket_in_place_of_a_repository_file_is_refused(
    kind: str, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "slots"
    if name:
        folder.mkdir()
    KINDS[kind](folder / name if name else folder)
    error = error_in_time(lambda: files_after_opening(folder))
    assert isinstance(error, ConfigError) and "slots" in str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["probe.evoke-part", "left.evoke-part", "left.evoke-kv"])
def test_a_pipe_or_socket_with_a_snapshot_name_is_moved_away(
    kind: str, name: str, tmp_path: Path
) -> None:
    KINDS[kind](tmp_path / name)
    remaining: list[str] = []
    assert error_in_time(lambda: remaining.extend(files_after_opening(tmp_path))) is None
    assert name not in remaining


@pytest.mark.parametrize("kind", KINDS)
def test_reading_a_pipe_or_socket_does_not_block(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_PIPE_TIMEOUT_S", 0.1)
    path = tmp_path / "odd"
    KINDS[kind](path)
    path.chmod(0o600)
    assert isinstance(error_in_time(lambda: load(path)), ConfigError)
    assert isinstance(error_in_time(lambda: KeyFile(path)), ConfigError)
    assert error_in_time(lambda: ModelFiles().identify(str(path))) is None


def test_settings_are_read_from_a_pipe_with_a_writer() -> None:
    read, write = os.pipe()
    os.write(write, b"limits: {sessions: 7}\n")
    os.close(write)
    assert load(Path(f"/dev/fd/{read}")).limits.sessions == 7
    os.close(read)


def test_syncing_a_directory_writes_its_entries_and_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def fsync(handle: int) -> None:
        assert stat.S_ISDIR(os.fstat(handle).st_mode)
        assert os.fstat(handle).st_ino == tmp_path.stat().st_ino
        synced.append(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    sync_directory(tmp_path)
    assert len(synced) == 1
    with pytest.raises(OSError):
        os.fstat(synced[0])


@pytest.mark.parametrize("kind", [*KINDS, "file", "none"])
def test_what_is_no_directory_cannot_be_synced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    if kind == "file":
        path.touch()
    elif kind != "none":
        KINDS[kind](path)
    assert isinstance(error_in_time(lambda: sync_directory(path)), OSError)
