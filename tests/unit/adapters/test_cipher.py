"""What is kept on disk, encrypted: nothing of it to be read, moved, cut or changed unnoticed."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from damage import DAMAGES, damage, in_memory
from repository_fixtures import TOKENS, kept, vault

from evoke_proxy.adapters import cipher as cipher_module
from evoke_proxy.adapters.cipher import EncryptedFormat
from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.core.snapshots.disk_format import DiskFormat
from evoke_proxy.engine.storage.snapshot_repository import disk_format
from evoke_proxy.errors import ConfigError, SnapshotUnusable

KEY, OTHER = bytes(range(32)), bytes(32)
PIECE = 256 * 1024


def _key_file(folder: Path, key: bytes = KEY) -> str:
    path = folder / f"key-{key[1]}"
    write_secret(path, key.hex() + "\n")
    return str(path)


def _three(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "plain", folder / "sealed", folder / "again"


@pytest.mark.parametrize("size", [0, 1, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_a_decrypted_file_is_the_original(size: int, tmp_path: Path) -> None:
    plain, sealed, again = _three(tmp_path)
    data = random.Random(size).randbytes(size)
    plain.write_bytes(data)
    EncryptedFormat(KEY).encode_file(str(plain), str(sealed), b"name")
    assert sealed.stat().st_mode & 0o777 == 0o600
    EncryptedFormat(KEY).decode_file(str(sealed), str(again), b"name")
    assert again.read_bytes() == data
    assert size < 64 or data[:64] not in sealed.read_bytes()


def test_every_change_of_an_encrypted_file_is_detected(tmp_path: Path) -> None:
    plain, sealed, again = _three(tmp_path)
    plain.write_bytes(random.Random(1).randbytes(3 * PIECE + 77))
    EncryptedFormat(KEY).encode_file(str(plain), str(sealed), b"name")
    whole, how = sealed.read_bytes(), random.Random(2)
    # Segments have one size in the encrypted file; the first one includes the header.
    second, third = whole[PIECE : 2 * PIECE], whole[2 * PIECE : 3 * PIECE]
    harmed = [whole + b"x", whole[:PIECE], b"", plain.read_bytes()]
    harmed.append(whole[:PIECE] + third + second + whole[3 * PIECE :])
    for _ in range(20):
        data = bytearray(whole)
        data[how.randrange(len(data))] ^= 1 << how.randrange(8)
        harmed += [bytes(data), whole[: how.randrange(len(whole))]]
    for data in harmed:
        sealed.write_bytes(data)
        with pytest.raises(SnapshotUnusable):
            EncryptedFormat(KEY).decode_file(str(sealed), str(again), b"name")
    sealed.write_bytes(whole)
    for cipher, name in ((EncryptedFormat(OTHER), b"name"), (EncryptedFormat(KEY), b"another")):
        with pytest.raises(SnapshotUnusable):
            cipher.decode_file(str(sealed), str(again), name)


@pytest.mark.parametrize("room", [0, 100, PIECE, 3 * PIECE])
def test_a_full_disk_is_reported_while_a_file_is_encrypted(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() + memoryview(data).nbytes > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    plain, sealed, _ = _three(tmp_path)
    plain.write_bytes(bytes(3 * PIECE))
    monkeypatch.setattr(cipher_module, "_created", lambda path: FullDisk(path, "wb"))
    with pytest.raises(SnapshotUnusable) as caught:
        EncryptedFormat(KEY).encode_file(str(plain), str(sealed), b"name")
    assert caught.value.reason == "disk"


@pytest.mark.parametrize("form", [DiskFormat(), EncryptedFormat(KEY)], ids=["plain", "encrypted"])
def test_a_row_is_decoded_with_its_own_associated_data_only(form: DiskFormat) -> None:
    closed = form.encode_row(b"the tokens", b"alice's")
    assert form.decode_row(closed, b"alice's") == b"the tokens"
    for wrong, about in ((closed, b"bob's"), (closed[:-1], b"alice's"), (b"", b"alice's")):
        with pytest.raises(ValueError):
            form.decode_row(wrong, about)


def test_an_encrypted_directory_holds_no_plaintext_and_is_read_again(tmp_path: Path) -> None:
    folder, key = tmp_path / "slots", _key_file(tmp_path)
    listed = TOKENS.astype("<i4").tobytes()
    with vault(folder, key_file=key) as first:
        item = kept(first)
    for path in folder.rglob("*"):
        assert path.is_dir() or (
            listed not in path.read_bytes() and b"qsgg" not in path.read_bytes()
        )
    with vault(folder, key_file=key) as second:
        (again,) = second.snapshots
        assert again == item and list(again.tokens) == list(TOKENS)
        lent = second.files.decrypt(f"{again.id}.evoke-kv")
        assert lent.endswith(".evoke-part") and listed in (folder / lent).read_bytes()
        assert (folder / lent).stat().st_mode & 0o777 == 0o600
        assert second.files.decrypt(f"{again.id}.evoke-kv") != lent, "each restore deletes its own"
    with vault(folder, key_file=key):
        assert not list(folder.glob("*.evoke-part")), (
            "what a crash leaves in the clear goes at start"
        )


@pytest.mark.parametrize("then", [None, OTHER])
def test_another_key_is_refused_at_start_and_deletes_nothing(
    tmp_path: Path, then: bytes | None
) -> None:
    folder, key = tmp_path / "slots", _key_file(tmp_path)
    with vault(folder, key_file=key) as first:
        kept(first)
    other = _key_file(tmp_path, then) if then is not None else ""
    with pytest.raises(ConfigError, match="another key"), vault(folder, key_file=other):
        pass
    with vault(folder, key_file=key) as again:
        assert len(again.snapshots) == 1


def test_a_damaged_key_is_refused_at_start_and_deletes_nothing() -> None:
    how = random.Random(5)
    with in_memory() as memory:
        folder, key = memory / "slots", Path(_key_file(memory))
        with vault(folder, key_file=str(key)) as first:
            item = kept(first)
        whole, refused = key.read_bytes(), 0
        for _ in range(DAMAGES):
            key.write_bytes(whole)
            damage(key, how)
            try:
                with vault(folder, key_file=str(key)) as again:  # a space, or a letter's case
                    assert [found.id for found in again.snapshots] == [item.id]
            except ConfigError as error:
                assert "key" in str(error)
                refused += 1
        key.write_bytes(whole)
        with vault(folder, key_file=str(key)) as again:
            assert [found.id for found in again.snapshots] == [item.id]
            asyncio.run(again.verify(item))
        assert DAMAGES / 2 < refused < DAMAGES


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    for text in ("abcdefghijklmnopqrstuv", KEY.hex()[:-2], KEY.hex() + "00"):
        write_secret(tmp_path / "key", text)
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            disk_format(str(tmp_path / "key"))


def test_an_index_in_the_former_encryption_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, key = tmp_path / "slots", _key_file(tmp_path)
    with vault(folder, key_file=key) as first:
        kept(first)
    former = EncryptedFormat(KEY).former_key_id
    assert former is not None
    with sqlite3.connect(folder / "index.sqlite") as index:
        (version,) = index.execute("PRAGMA user_version").fetchone()
        index.execute(f"PRAGMA user_version={version & 0xFF | former << 8}")
    index.close()
    with vault(folder, key_file=key) as second:
        assert not second.snapshots
    assert "encrypted in the format of an earlier version" in caplog.text
    assert (folder / "quarantine/index.sqlite").exists()
