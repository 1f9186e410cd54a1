"""`evoke-proxy sessions`: list, show, pin, delete and export in a snapshot directory."""

from __future__ import annotations

import json
import stat
import tarfile
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from repository_fixtures import TOKENS, add_snapshot, open_repository

from evoke_proxy.adapters.cipher import EncryptedFormat
from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.cli.main import main
from evoke_proxy.config import Config, PolicyConfig
from evoke_proxy.config.schema import SnapshotsConfig
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.request.look_ahead import STEP
from evoke_proxy.core.session.codec import SessionRecord, encode
from evoke_proxy.core.session.session import Session
from evoke_proxy.engine.storage.session_archive import Origin, SessionArchives
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with two conversations, one of which has two snapshots."""
    directory = tmp_path / "slots"
    with open_repository(directory) as repository:
        add_snapshot(repository, branch="aaaa1111")
        add_snapshot(
            repository, np.append(TOKENS, 5).astype(np.int32), branch="aaaa1111", kind=STEP
        )
        add_snapshot(repository, branch="bbbb2222")
    return directory


def _run(folder: Path, *words: str) -> int:
    return main(["sessions", *words, "--directory", str(folder)])


def test_list_and_show_print_sessions_without_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(folder, "list") == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "session"
    assert sorted(line.split()[:3] for line in lines) == [
        ["aaaa1111", "2", "400"],
        ["bbbb2222", "1", "399"],
    ]
    assert _run(folder, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["sessions"]
    assert {row["id"]: row["snapshots"] for row in listed} == {"aaaa1111": 2, "bbbb2222": 1}
    assert _run(folder, "show", "aa", "--json") == 0
    snapshots = json.loads(capsys.readouterr().out)["snapshots"]
    assert {item["kind"] for item in snapshots} == {"user", "step"}
    assert all("tokens" not in item for item in snapshots)
    assert _run(folder, "show", "bbbb") == 0
    assert "user" in capsys.readouterr().out


def test_sessions_with_a_record_and_no_snapshot_are_listed_and_deleted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_repository(folder) as repository:
        repository.put_record(Record("cccc3333", "me", time.time(), b"of another version"))
        repository.put_record(Record("cccc3333#7", "me", time.time(), b"vectors"))
        repository.put_record(Record("bbbb2222", "t", time.time(), b"of one that has a snapshot"))
    assert _run(folder, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["sessions"]
    (row,) = [row for row in listed if row["id"] == "cccc3333"]
    assert (row["snapshots"], row["tenant"], row["bytes"]) == (0, "me", 25)
    assert len(listed) == 3
    assert _run(folder, "delete", "cccc") == 0
    with open_repository(folder) as repository:
        assert [record.id for record in repository.records()] == ["bbbb2222"] and len(
            repository.snapshots
        ) == 3


def test_pin_and_delete_change_the_index_and_the_files(folder: Path) -> None:
    assert _run(folder, "pin", "aaaa") == 0
    assert _run(folder, "delete", "bbbb") == 0
    with open_repository(folder) as repository:
        assert {(item.branch, item.pinned) for item in repository.snapshots} == {("aaaa1111", True)}
    assert len(list(folder.glob("*.evoke-kv"))) == 2
    assert _run(folder, "unpin", "aaaa") == 0
    with open_repository(folder) as repository:
        assert not any(item.pinned for item in repository.snapshots)


def test_an_export_is_complete_and_readable_only_by_its_owner(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "chat.tar"
    assert _run(folder, "export", "aaaa", str(out)) == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    with tarfile.open(out) as archive:
        manifest = archive.extractfile("manifest.json")
        assert manifest is not None
        listed = json.loads(manifest.read())["snapshots"]
        for item in listed:
            member = archive.getmember(f"{item['id']}.evoke-kv")
            assert member.size == item["n_bytes"]
        assert sorted(len(item["tokens"]) for item in listed) == [399, 400]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["show", "x"], "no session"),
        (["show"], "show: name the session; evoke-proxy sessions list prints the ids"),
        (["delete"], "delete: name the session"),
        (["pin", ""], "no session"),
        (["export", "aaaa"], "name the session and the file"),
        (["export", "aaaa", "out", "--blocks", "{folder}"], "--key-file"),
        (["export", "aaaa", "out", "--key-file", "{key}"], "--blocks"),
        (["import"], "name the file, and its key with --key-file"),
        (["import", "{key}"], "name the file, and its key with --key-file"),
        (["import", "missing", "--key-file", "{key}"], "missing is not a file"),
        (["import", "aaaa", "{key}", "--key-file", "{key}"], "name only the file"),
        (["import", "{key}", "--key-file", "{key}"], "--blocks"),
        (["import", "{key}", "--key-file", "{key}", "--blocks", "missing"], "--blocks"),
    ],
)
def test_an_impossible_action_prints_the_reason(
    folder: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.parent / "key").write_text("1f" * 32)
    named = [word.format(key=folder.parent / "key", folder=folder) for word in words]
    assert _run(folder, *named) == 2
    assert expected in capsys.readouterr().err


def test_an_import_with_wrong_arguments_creates_nothing(tmp_path: Path) -> None:
    assert _run(tmp_path / "new", "import", "missing", "--key-file", "key") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_key_file_is_named_by_its_option(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("no hexadecimal digits".replace(" ", "-"))
    key.chmod(0o600)
    words = ("import", str(key), "--key-file", str(key), "--blocks", str(folder))
    assert _run(folder, *words) == 2
    message = capsys.readouterr().err
    assert "--key-file" in message and "64 hexadecimal digits" in message
    assert "snapshots.key_file" not in message


def test_an_import_into_the_folder_of_another_user_is_refused(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = folder.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    words = ("import", str(folder / "index.sqlite"), "--key-file", "key", "--blocks", str(folder))
    assert _run(folder, *words) == 2
    assert "belongs to another user" in capsys.readouterr().err


def test_an_import_is_refused_while_a_proxy_uses_a_shared_directory(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVOKE_SNAPSHOTS_SHARED", "true")
    running = SnapshotRepository(SnapshotsConfig(directory=str(folder), shared=True))
    running.open()
    try:
        words = ("--key-file", "key", "--blocks", str(folder))
        assert _run(folder, "import", str(folder / "index.sqlite"), *words) == 2
    finally:
        running.close()
    assert "another evoke-proxy uses" in capsys.readouterr().err


def test_an_export_that_cannot_be_written_prints_the_reason(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(folder, "export", "aaaa", str(tmp_path / "missing" / "chat.tar")) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["pin", "unpin"])
def test_a_session_without_snapshots_is_pinned_on_the_page(
    folder: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_repository(folder) as repository:
        repository.put_record(Record("cccc3333", "me", time.time(), b"record"))
    assert _run(folder, action, "cccc") == 2
    message = capsys.readouterr().err
    assert "no snapshots that could be pinned" in message
    assert "on its page, http://127.0.0.1:18090/evoke/" in message


def test_an_export_without_snapshots_names_the_options_for_a_record(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_repository(folder) as repository:
        repository.put_record(Record("cccc3333", "me", time.time(), b"record"))
    assert _run(folder, "export", "cccc", str(tmp_path / "chat.tar")) == 2
    message = capsys.readouterr().err
    assert "--key-file" in message and "--blocks" in message
    assert not (tmp_path / "chat.tar").exists()


def test_a_directory_without_snapshots_is_refused_and_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, "list") == 2
    assert "contains no snapshots" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_a_directory_the_page_of_a_running_proxy_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sessions", "list"]) == 2
    message = capsys.readouterr().err
    assert "snapshots.directory is not set" in message
    assert "http://127.0.0.1:18090/evoke/" in message and "evoke-proxy up" in message


@pytest.mark.parametrize(
    ("listen", "page"),
    [
        ("0.0.0.0:9000", "127.0.0.1:9000"),
        (":9000", "127.0.0.1:9000"),
        ("[::]:9000", "localhost:9000"),
        ("[::1]:9000", "[::1]:9000"),
        ("gpu-1:9000", "gpu-1:9000"),
    ],
)
def test_the_page_of_a_proxy_at_all_addresses_is_named_with_one_of_them(
    listen: str, page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, token = tmp_path / "evoke.yaml", tmp_path / "token"
    write_secret(token, "0123456789abcdef-token\n")
    path.write_text(f'security: {{admin_listen: ["{listen}"], admin_token_file: {token}}}\n')
    assert main(["sessions", "list", "--config", str(path)]) == 2
    assert f"http://{page}/evoke/," in capsys.readouterr().err


def test_an_import_that_was_ended_after_a_part_of_the_record_can_be_repeated(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def model(config: Config) -> str:
        return "model"

    monkeypatch.setattr("evoke_proxy.cli.sessions._model", model)
    key, blocks, source = tmp_path / "key", tmp_path / "blocks", tmp_path / "chat.evoke"
    blocks.mkdir()
    key.write_text("1f" * 32)
    key.chmod(0o600)
    view = SlotView(id=0, epoch=1, n_tokens=0, n_common=0, resident=(), n_free=0)
    state = Session("cccc3333", "me", PolicyConfig()).state(view)
    packed = zlib.compress(encode(SessionRecord(state, None, (0, 0, 0), 0, 1)))
    part = Record("cccc3333#7", "me", time.time(), b"vectors")
    records = [Record("cccc3333", "me", time.time(), packed), part]
    archives = SessionArchives(blocks, EncryptedFormat(bytes.fromhex("1f" * 32)))
    archives.write(source, Origin("cccc3333", "me", "model"), records, [])
    with open_repository(folder) as repository:
        repository.put_record(part)
    words = ("import", str(source), "--key-file", str(key), "--blocks", str(blocks))
    assert _run(folder, *words) == 0
    assert "imported with 0 blocks\n" in capsys.readouterr().err
    with open_repository(folder) as repository:
        assert {record.id for record in repository.records()} == {"cccc3333", "cccc3333#7"}
    assert _run(folder, *words) == 2
    assert "session cccc3333 exists here" in capsys.readouterr().err


def test_a_session_without_snapshots_says_where_its_blocks_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_repository(folder) as repository:
        repository.put_record(Record("cccc3333", "me", time.time(), b"record"))
    assert _run(folder, "show", "cccc") == 0
    assert "no snapshots: a patched llama-server keeps the blocks" in capsys.readouterr().out
