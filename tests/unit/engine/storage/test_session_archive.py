"""Archives of sessions: complete, verified before use, bounded."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository_fixtures import write_block_file

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


def record(session: str = "s1") -> Record:
    state = Session(session, "team", PolicyConfig())
    view = SlotView(id=0, epoch=1, n_tokens=0, n_common=0, resident=(), n_free=0)
    packed = zlib.compress(encode(SessionRecord(state.state(view), None, (0, 0, 0), 0, 1)))
    return Record(session, "team", 5.0, packed)


def machine(folder: Path, key: bytes = KEY) -> SessionArchives:
    for name in ("index", "blocks"):
        (folder / name).mkdir(parents=True)
    return SessionArchives(folder / "index", folder / "blocks", EncryptedFormat(key))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    one, target = machine(tmp_path / "one"), tmp_path / "chat.evoke"
    for number in range(3):
        write_block_file(one.blocks, number, "team", {f"s1/{number}": "s1"})
    records = [record(), Record("s1#7", "team", 5.0, b"vectors")]
    one.write(target, ORIGIN, records, list(block_files(one.blocks)))
    assert not list(one.directory.iterdir())
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
    assert len(list(other.blocks.iterdir())) == 3 and not list(other.directory.iterdir())


def test_a_block_that_exists_is_left_as_it_is(archive: Path, tmp_path: Path) -> None:
    other = machine(tmp_path / "two")
    existing = write_block_file(other.blocks, 1, "team", {"t/1": "t"})
    before = existing.read_bytes()
    (other.blocks / "import-left").mkdir()
    assert other.read(archive, "model", {"t"}).n_existing == 1
    assert existing.read_bytes() == before and not (other.blocks / "import-left").exists()


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
    assert not list(other.blocks.iterdir()) and not list(other.directory.iterdir())


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


def _replace_record(entries: Entries) -> None:
    entries["record-0"] = data = record("other").packed

    def note(value: dict[str, Any]) -> None:
        value["entries"][0] |= {"n_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    manifest(note)(entries)


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
        (_replace_record, "record of its session is missing"),
    ],
)
def test_an_archive_that_is_not_as_it_was_written_is_refused(
    archive: Path, tmp_path: Path, change: Callable[[Entries], None], expected: str
) -> None:
    other = machine(tmp_path / "two")
    with pytest.raises(ConfigError, match=expected):
        other.read(changed(archive, tmp_path / "changed", change), "model", set())
    assert not list(other.blocks.iterdir()) and not list(other.directory.iterdir())


def test_sizes_are_limited(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = machine(tmp_path / "two")
    for name, value, expected in (
        ("_MAX_RECORD_BYTES", 10, "more than 10 bytes"),
        ("_MAX_MANIFEST_BYTES", 10, "more than 10 bytes"),
        ("_MAX_ENTRIES", 2, "not expected"),
        ("_MAX_UNPACKED_BYTES", 10, "more than 10 bytes"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=expected):
            patch.setattr(session_archive, name, value)
            other.read(archive, "model", set())
    assert not list(other.blocks.iterdir())


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
    one = SessionArchives(tmp_path / "one/index", tmp_path / "one/blocks", EncryptedFormat(KEY))
    blocks = list(block_files(one.blocks))
    blocks[1].path.unlink()
    with pytest.raises(OSError):
        one.write(archive, ORIGIN, [record()], blocks)
    assert archive.read_bytes() == before
    assert not list(one.directory.iterdir())
