"""`evoke-proxy sessions export` and `import`: a session goes on on another machine."""

from __future__ import annotations

import copy
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conversation import ChatClient
from harness import RunningProxy, llama_server, proxy, server_binary
from restartable import BUDGET, KINDS, TURNS, turn

from bench.random_models import SHAPES, ensure
from evoke_proxy.adapters.block_files import block_files
from evoke_proxy.cli.main import main
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.engine.storage.session_archive import unpacked
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository

KEY = "1f" * 32
QUESTION = "What is my favorite number?"


@dataclass(frozen=True, slots=True)
class Machine:
    """The folders of one machine."""

    folder: Path

    @contextmanager
    def server(self, shape: str = "") -> Iterator[int]:
        """A patched server with a disk tier; yields its port."""
        (self.folder / "index").mkdir(parents=True, exist_ok=True)
        options = ["-np", "1", "--evoke-ram", "64", "--evoke-disk", str(self.folder / "blocks")]
        options += ["--slot-save-path", str(self.folder / "index")]
        model = ensure(SHAPES[shape]) if shape else None
        with llama_server(server_binary(patched=True), *options, model=model) as port:
            yield port

    @contextmanager
    def proxy(self, port: int) -> Iterator[RunningProxy]:
        """The proxy in front of the server; its background tasks end before it does."""
        directory = str(self.folder / "index")
        with proxy(port, snapshots__directory=directory, policy__budget=BUDGET) as running:
            yield running
            running.wait_for_background()

    def sessions(self, port: int, *words: str) -> int:
        """Run the command; returns its exit status."""
        places = ["--directory", str(self.folder / "index")]
        places += ["--blocks", str(self.folder / "blocks")]
        return main(["sessions", *words, *places, "--upstream", f"http://127.0.0.1:{port}"])


@dataclass(frozen=True, slots=True)
class Moved:
    """A session of the first machine: its id, its client, its file, the key, the next turn."""

    id: str
    client: ChatClient
    file: Path
    key: Path
    expected: dict[str, Any]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    """A session that was exported, and then continued where it was after a restart."""
    folder = tmp_path_factory.mktemp("one")
    machine, key, file = Machine(folder), folder / "key", folder / "chat.evoke"
    key.write_text(KEY)
    key.chmod(0o600)
    client = ChatClient(0, "moves")
    with machine.server() as port:
        with machine.proxy(port) as running:
            for text in TURNS:
                turn(client, running.port, text)
        (id,) = _sessions(machine)
        assert machine.sessions(port, "export", id, str(file), "--key-file", str(key)) == 0
    before = copy.deepcopy(client)
    with machine.server() as port, machine.proxy(port) as running:
        expected = turn(client, running.port, QUESTION)
    return Moved(id, before, file, key, expected)


def _sessions(machine: Machine) -> dict[str, str]:
    """The names that clients gave to the recorded sessions, by session."""
    repository = SnapshotRepository(SnapshotsConfig(directory=str(machine.folder / "index")))
    repository.open(claim=False)
    try:
        records = [record for record in repository.records() if not record.is_part]
        hints = {record.id: unpacked(record).hint for record in records}
        return {id: hint.text if hint is not None else "" for id, hint in hints.items()}
    finally:
        repository.close()


def test_a_session_goes_on_on_another_machine_by_copies(moved: Moved, tmp_path: Path) -> None:
    machine, client = Machine(tmp_path), copy.deepcopy(moved.client)
    words = ("import", str(moved.file), "--key-file", str(moved.key))
    with machine.server() as port:
        assert machine.sessions(port, *words) == 0
        assert machine.sessions(port, *words) == 2  # the session exists
        with machine.proxy(port) as running:
            result = turn(client, running.port, QUESTION)
            assert running.metric("evoke_plan_failures_total") == 0
    assert {kind: result[kind] for kind in KINDS} == {kind: moved.expected[kind] for kind in KINDS}
    assert result["recovered"] > 0 and result["decoded"] < 100
    assert result["text"] == moved.expected["text"] and result["likely"] == moved.expected["likely"]


def test_blocks_that_another_session_has_here_serve_the_moved_one(
    moved: Moved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, client = Machine(tmp_path), copy.deepcopy(moved.client)
    other = ChatClient(0, "other")
    with machine.server() as port:
        with machine.proxy(port) as running:
            for text in TURNS[:3]:
                turn(other, running.port, text)
        words = ("import", str(moved.file), "--key-file", str(moved.key))
        assert machine.sessions(port, *words) == 0
        assert "of which were there" in capsys.readouterr().err
        with machine.proxy(port) as running:
            result = turn(client, running.port, QUESTION)
    assert {kind: result[kind] for kind in KINDS} == {kind: moved.expected[kind] for kind in KINDS}
    assert result["text"] == moved.expected["text"]


def test_a_block_of_two_sessions_moves_with_the_names_of_one(tmp_path: Path) -> None:
    one, two = Machine(tmp_path / "one"), Machine(tmp_path / "two")
    file, key = tmp_path / "chat.evoke", tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    clients = [ChatClient(0, "moves"), ChatClient(0, "stays")]
    with one.server() as port:
        with one.proxy(port) as running:
            for client in clients:
                for text in TURNS:
                    turn(client, running.port, text)
                running.wait_for_background()
        (id,) = (id for id, name in _sessions(one).items() if name == "moves")
        assert one.sessions(port, "export", id, str(file), "--key-file", str(key)) == 0
    assert any(len(set(block.names.values())) > 1 for block in block_files(one.folder / "blocks"))
    with two.server() as port:
        assert two.sessions(port, "import", str(file), "--key-file", str(key)) == 0
        blocks = list(block_files(two.folder / "blocks"))
        assert blocks and all(set(block.names.values()) == {id} for block in blocks)
        with two.proxy(port) as running:
            result = turn(clients[0], running.port, QUESTION)
            assert running.metric("evoke_plan_failures_total") == 0
    assert result["recovered"] > 0 and result["decoded"] < 100
    assert not list((two.folder / "blocks").glob("*.bad"))


def test_an_import_into_another_folder_than_the_servers_says_so(
    moved: Moved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, other = Machine(tmp_path / "two"), Machine(tmp_path / "three")
    (other.folder / "index").mkdir(parents=True)
    (other.folder / "blocks").mkdir()
    words = ("import", str(moved.file), "--key-file", str(moved.key))
    with machine.server() as port:
        assert other.sessions(port, *words) == 0
    message = capsys.readouterr().err
    assert "llama-server does not find the blocks" in message
    assert f"If {other.folder / 'blocks'} is the directory of its --evoke-disk" in message


def test_the_file_is_encrypted_and_only_for_its_owner(moved: Moved) -> None:
    assert stat.S_IMODE(moved.file.stat().st_mode) == 0o600
    data = moved.file.read_bytes()
    assert b"manifest" not in data and b"favorite" not in data and moved.id.encode() not in data
    assert not list(moved.file.parent.glob("**/session-*"))


def test_a_file_of_another_key_or_model_or_a_changed_one_is_refused(
    moved: Moved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, other, changed = Machine(tmp_path), tmp_path / "key", tmp_path / "changed"
    other.write_text("2e" * 32)
    other.chmod(0o600)
    data = bytearray(moved.file.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    with machine.server("tiny-dense") as port:
        assert machine.sessions(port, "import", str(moved.file), "--key-file", str(moved.key)) == 2
        assert "another model" in capsys.readouterr().err
    with machine.server() as port:
        assert machine.sessions(port, "import", str(moved.file), "--key-file", str(other)) == 2
        assert "cannot be decrypted" in capsys.readouterr().err
        assert machine.sessions(port, "import", str(changed), "--key-file", str(moved.key)) == 2
        assert "cannot be decrypted" in capsys.readouterr().err
        words = ("import", str(moved.file), "--key-file", str(moved.key))
        with machine.proxy(port):
            assert machine.sessions(port, *words) == 2
            assert "another evoke-proxy uses" in capsys.readouterr().err
    assert not list((tmp_path / "blocks").glob("*.kvb"))
    assert not list((tmp_path / "blocks").glob(".evoke-import-*"))
    assert not list((tmp_path / "index").glob("session-*"))


def test_a_session_can_only_move_between_servers_with_a_disk_tier(
    moved: Moved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "index").mkdir()
    (tmp_path / "blocks").mkdir()
    words = ("import", str(moved.file), "--key-file", str(moved.key))
    with llama_server(server_binary(patched=False), "-np", "1") as port:
        assert machine.sessions(port, *words) == 2
        assert "no disk tier for a dense model" in capsys.readouterr().err
    assert machine.sessions(port, *words) == 2
    assert "cannot be asked which model it serves" in capsys.readouterr().err
