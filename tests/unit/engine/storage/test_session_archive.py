"""Archives of sessions: complete, verified before use, bounded."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from repository_fixtures import write_block_file
from session_fixtures import session_record

from evoke_proxy.adapters.block_files import block_files
from evoke_proxy.adapters.cipher import EncryptedFormat
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.session.codec import SessionRecord, encode
from evoke_proxy.core.session.session import Session
from evoke_proxy.engine.storage import session_archive
from evoke_proxy.engine.storage.session_archive import Origin, SessionArchives, unpacked
from evoke_proxy.errors import ConfigError

ORIGIN = Origin("s1", "team", "model")
KEY = bytes(range(32))
Entries = dict[str, bytes]


def record(session: str = "s1", tenant: str = "team") -> Record:
    state = Session(session, tenant, PolicyConfig())
    view = SlotView(id=0, epoch=1, n_tokens=0, n_common=0, resident=(), n_free=0)
    packed = zlib.compress(encode(SessionRecord(state.state(view), None, (0, 0, 0), 0, 1)))
    return Record(session, "team", 5.0, packed)


def machine(folder: Path, key: bytes = KEY) -> SessionArchives:
    (folder / "blocks").mkdir(parents=True)
    return SessionArchives(folder / "blocks", EncryptedFormat(key))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    one, target = machine(tmp_path / "one"), tmp_path / "chat.evoke"
    for number in range(3):
        write_block_file(one.blocks, number, "team", {f"s1/{number}": "s1"})
    records = [record(), Record("s1#7", "team", 5.0, b"vectors")]
    one.write(target, ORIGIN, records, list(block_files(one.blocks)))
    assert not list(tmp_path.glob("*.evoke-part"))
    return target


def test_everything_arrives_as_it_was(archive: Path, tmp_path: Path) -> None:
    other = machine(tmp_path / "two")
    found = other.read(archive, "model", set())
    assert (found.origin, found.n_blocks, found.n_existing) == (ORIGIN, 3, 0)
    assert found.name in {f"s1/{number}" for number in range(3)}
    assert [(item.id, item.packed) for item in found.records] == [
        ("s1", record().packed),
        ("s1#7", b"vectors"),
    ]
    for path in (tmp_path / "one" / "blocks").iterdir():
        assert (other.blocks / path.name).read_bytes() == path.read_bytes()
    assert len(list(other.blocks.iterdir())) == 3


def test_a_block_that_exists_is_left_as_it_is(archive: Path, tmp_path: Path) -> None:
    other = machine(tmp_path / "two")
    existing = write_block_file(other.blocks, 0, "team", {"t/0": "t"})
    before = existing.read_bytes()
    found = other.read(archive, "model", {"t"})
    assert (found.n_blocks, found.n_existing, found.name) == (3, 1, "s1/1")
    assert existing.read_bytes() == before
    assert other.read(archive, "model", {"t"}).name == ""  # no file is new


def test_names_of_other_sessions_neither_leave_nor_arrive(archive: Path, tmp_path: Path) -> None:
    one, other = SessionArchives(tmp_path / "one/blocks", EncryptedFormat(KEY)), tmp_path / "two"
    shared = {"t/0": "t", "s1/0": "s1", "t/1": "s1"}
    write_block_file(one.blocks, 0, "team", shared)
    one.write(archive, ORIGIN, [record()], list(block_files(one.blocks)))
    machine(other).read(archive, "model", set())
    hostile = changed(archive, tmp_path / "hostile", block("team", shared))
    third = machine(tmp_path / "three")
    assert third.read(hostile, "model", set()).name in {f"s1/{number}" for number in range(3)}
    for folder in (other / "blocks", third.blocks):
        names = [found.names for found in block_files(folder)]
        assert names == [{f"s1/{number}": "s1"} for number in range(3)]
        assert {path.suffix for path in folder.iterdir()} == {".kvb"}


def test_only_what_an_import_left_is_deleted(archive: Path, tmp_path: Path) -> None:
    other = machine(tmp_path / "two")
    left, own = other.blocks / ".evoke-import-x", other.blocks / "import-photos"
    for folder in (left, own):
        folder.mkdir()
        (folder / "file").write_text("content")
    linked = other.blocks / ".evoke-import-link"
    linked.symlink_to(own)
    other.read(archive, "model", set())
    assert not left.exists() and linked.is_symlink()
    assert (own / "file").read_text() == "content"


def test_another_model_a_session_that_exists_and_another_key_are_refused(
    archive: Path, tmp_path: Path
) -> None:
    other = machine(tmp_path / "two")
    with pytest.raises(ConfigError, match="another model"):
        other.read(archive, "other", set())
    with pytest.raises(ConfigError, match="session s1 exists here"):
        other.read(archive, "model", {"s1"})
    with pytest.raises(ConfigError, match="cannot be decrypted"):
        machine(tmp_path / "three", bytes(32)).read(archive, "model", set())
    assert not list(other.blocks.iterdir())


def changed(source: Path, target: Path, change: Callable[[Entries], None]) -> Path:
    """Write an archive with the entries of another one after a change, with the right key."""
    sealer = EncryptedFormat(KEY)
    plain = target.with_suffix(".plain")
    sealer.decode_file(str(source), str(plain), session_archive._AAD)
    with tarfile.open(plain) as archive:
        entries = {item.name: archive.extractfile(item).read() for item in archive}  # type: ignore[union-attr]
    change(entries)
    with tarfile.open(plain, "w") as archive:
        for name, data in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    sealer.encode_file(str(plain), str(target), session_archive._AAD)
    return target


def manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Entries], None]:
    def apply(entries: Entries) -> None:
        value = json.loads(entries["manifest.json"])
        change(value)
        entries["manifest.json"] = json.dumps(value).encode()

    return apply


def replaced(name: str, data: bytes) -> Callable[[Entries], None]:
    """Replace an entry, and what the manifest says about it."""

    def note(value: dict[str, Any]) -> None:
        (entry,) = (entry for entry in value["entries"] if entry["name"] == name)
        entry |= {"n_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def apply(entries: Entries) -> None:
        entries[name] = data
        manifest(note)(entries)

    return apply


def block(tenant: str, names: dict[str, str]) -> Callable[[Entries], None]:
    """Replace the first block by one with this head."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_block_file(Path(folder), 0, tenant, names)
        return replaced(path.name, path.read_bytes())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda entries: entries.pop("manifest.json"), "list of its entries is missing"),
        (lambda entries: entries.update({"../evil": b"x"}), "not those that were written"),
        (lambda entries: entries.update({"record-0": b"x"}), "not those that were written"),
        (lambda entries: entries.pop("record-1"), "not those that were written"),
        (lambda entries: entries.update({f"evoke-{9:032x}.kvb": b"x"}), "block file|damaged"),
        (manifest(lambda value: value.update(version=2)), "version is not 1"),
        (manifest(lambda value: value.pop("tenant")), "damaged"),
        (manifest(lambda value: value.update(entries=[1])), "damaged"),
        (manifest(lambda value: value.update(session="s2")), "record of another session"),
        (replaced("record-0", record("other").packed), "record of its session is missing"),
        (replaced("record-0", record(tenant="b").packed), "record is of another tenant"),
        (block("b", {"s1/0": "s1"}), "block of another tenant"),
        (block("team", {"t/0": "t"}), "block of another tenant or session"),
        (lambda entries: entries.update({"manifest.json": b"[" * 200_000}), "nested too deeply"),
    ],
)
def test_an_archive_that_is_not_as_it_was_written_is_refused(
    archive: Path, tmp_path: Path, change: Callable[[Entries], None], expected: str
) -> None:
    other = machine(tmp_path / "two")
    with pytest.raises(ConfigError, match=expected):
        other.read(changed(archive, tmp_path / "changed", change), "model", set())
    assert not list(other.blocks.iterdir())


@pytest.mark.parametrize("function", ["asdict", "_verified"])
def test_the_text_of_a_record_is_never_in_a_file_unencrypted(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Near the end of an export and of an import; a kill there leaves no such file."""
    original, files = getattr(session_archive, function), list[bytes]()

    def spied(*arguments: Any) -> Any:
        files.extend(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        return original(*arguments)

    monkeypatch.setattr(session_archive, function, spied)
    one, other = SessionArchives(tmp_path / "one/blocks", EncryptedFormat(KEY)), tmp_path / "two"
    part = Record("s1#7", "team", 5.0, b"vectors" * 100_000)
    one.write(tmp_path / "again", ORIGIN, [record(), part], list(block_files(one.blocks)))
    machine(other).read(tmp_path / "again", "model", set())
    assert len(files) > 3 and not any(b"vectors" * 1000 in content for content in files)


def test_an_archive_without_its_end_is_refused(archive: Path, tmp_path: Path) -> None:
    other, cut = machine(tmp_path / "two"), tmp_path / "cut"
    data = archive.read_bytes()
    for n_bytes in (len(data) - 1, len(data) // 2, 100, 0):
        cut.write_bytes(data[:n_bytes])
        with pytest.raises(ConfigError, match="cannot be decrypted"):
            other.read(cut, "model", set())
    assert not list(other.blocks.iterdir())


def test_sizes_are_limited(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = machine(tmp_path / "two")
    for name, value, expected in (
        ("_MAX_RECORD_BYTES", 10, "more than 10 bytes"),
        ("_MAX_MANIFEST_BYTES", 10, "more than 10 bytes"),
        ("_MAX_ENTRIES", 2, "not expected"),
        ("_MAX_TEXT_BYTES", 10, "records have more than 10 bytes"),
        ("_MAX_UNPACKED_BYTES", 10, "more than 10 bytes"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=expected):
            patch.setattr(session_archive, name, value)
            other.read(archive, "model", set())
    assert not list(other.blocks.iterdir())


@pytest.mark.parametrize("own", ["s/0-4-a", "s/4-9-b", "s/9-12-t2/gen", "s/1-2-c"])
def test_a_record_with_names_of_another_session_is_refused(tmp_path: Path, own: str) -> None:
    """Its session would take the copies of these names, and delete them with its own."""
    one, origin = machine(tmp_path / "one"), Origin("s", "t", "model")
    path = write_block_file(one.blocks, 0, "t", {"s/0-4-a": "s"})
    for label, is_refused in ((own, False), (f"other{own[1:]}", True)):
        packed = zlib.compress(encode(session_record()).replace(own.encode(), label.encode()))
        file, other = tmp_path / label.replace("/", "-"), machine(tmp_path / f"{is_refused}")
        one.write(file, origin, [Record("s", "t", 5.0, packed)], list(block_files(one.blocks)))
        if is_refused:
            with pytest.raises(ConfigError, match="names blocks of another session"):
                other.read(file, "model", set())
            assert not list(other.blocks.iterdir())
        else:
            other.read(file, "model", set())
            assert (other.blocks / path.name).exists()


def _sparse() -> bytes:
    """An archive with one block that is a hole of 64 MiB, described in a few bytes."""
    info = tarfile.TarInfo(f"evoke-{9:032x}.kvb")
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1"}
    info.pax_headers |= {"GNU.sparse.map": f"{1 << 26},0", "GNU.sparse.size": str(1 << 26)}
    return info.tobuf(tarfile.PAX_FORMAT) + bytes(1024)


def _long_header() -> bytes:
    """An archive whose first header has 65 MiB."""
    info = tarfile.TarInfo("record-0")
    info.type, info.size = tarfile.XHDTYPE, 65 << 20
    return info.tobuf() + bytes(65 << 20)


def _many_headers() -> bytes:
    """An archive whose first entry has 3,000 headers, each with a name for it."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 512
    header = info.tobuf(tarfile.GNU_FORMAT) + b"a" * 512
    return header * 3000 + tarfile.TarInfo("record-0").tobuf() + bytes(1024)


def _long_name() -> bytes:
    """An archive with a directory whose name has a million characters."""
    info = tarfile.TarInfo("a" * 1_000_000)
    info.type = tarfile.DIRTYPE
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_sparse, "is not expected"),
        (_long_header, "a header has more than"),
        (_many_headers, "nested too deeply"),
        (_long_name, "the entry 'a{100}' is not expected"),
    ],
)
def test_a_small_archive_cannot_fill_the_disk_or_the_memory(
    tmp_path: Path, make: Callable[[], bytes], expected: str
) -> None:
    plain, target, other = tmp_path / "plain", tmp_path / "target", machine(tmp_path / "two")
    plain.write_bytes(make())
    EncryptedFormat(KEY).encode_file(str(plain), str(target), session_archive._AAD)
    with pytest.raises(ConfigError, match=expected):
        other.read(target, "model", set())
    assert not list(other.blocks.iterdir())


def test_the_disk_must_have_room_for_the_blocks(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, size = machine(tmp_path / "two"), archive.stat().st_size
    for free, fits in ((size - 1, False), (size, True)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda _, found=usage: found)
        if fits:
            assert other.read(archive, "model", set()).n_blocks == 3
        else:
            with pytest.raises(ConfigError, match="not enough free space"):
                other.read(archive, "model", set())


def test_a_session_that_could_not_be_imported_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, target = machine(tmp_path / "one"), tmp_path / "chat.evoke"
    for name, value, expected in (
        ("_MAX_RECORD_BYTES", 10, "more than 10 bytes"),
        ("_MAX_ENTRIES", 1, "records and blocks"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=expected):
            patch.setattr(session_archive, name, value)
            one.write(target, ORIGIN, [record()], [])
    assert not target.exists() and not list(tmp_path.glob("*.evoke-part"))


def test_a_record_that_unpacks_to_too_much_or_is_cut_is_refused() -> None:
    whole = record()
    assert unpacked(whole).session.id == "s1"
    with pytest.raises(ValueError, match="form"):
        unpacked(Record("s1", "", 0.0, whole.packed[:-20]))
    with pytest.raises(ValueError, match="incorrect header"):
        unpacked(Record("s1", "", 0.0, b"no zlib"))
    assert np.array_equal(unpacked(whole).session.layout.tokens, [])


def test_a_failed_export_leaves_the_earlier_file(archive: Path, tmp_path: Path) -> None:
    before = archive.read_bytes()
    one = SessionArchives(tmp_path / "one/blocks", EncryptedFormat(KEY))
    blocks = list(block_files(one.blocks))
    blocks[1].path.unlink()
    with pytest.raises(OSError):
        one.write(archive, ORIGIN, [record()], blocks)
    assert archive.read_bytes() == before
    assert not list(tmp_path.glob("*.evoke-part"))
