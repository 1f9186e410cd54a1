"""Encryption at rest: files and rows cannot be read, and every change is detected."""

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
from repository_fixtures import TOKENS, add_snapshot, open_repository

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


def _paths(folder: Path) -> tuple[Path, Path, Path]:
    """Paths for a plain file, its encrypted form, and the decrypted file."""
    return folder / "plain", folder / "encrypted", folder / "decrypted"


@pytest.mark.parametrize("size", [0, 1, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_a_decrypted_file_is_the_original(size: int, tmp_path: Path) -> None:
    plain, encrypted, decrypted = _paths(tmp_path)
    data = random.Random(size).randbytes(size)
    plain.write_bytes(data)
    EncryptedFormat(KEY).encode_file(str(plain), str(encrypted), b"name")
    assert encrypted.stat().st_mode & 0o777 == 0o600
    EncryptedFormat(KEY).decode_file(str(encrypted), str(decrypted), b"name")
    assert decrypted.read_bytes() == data
    assert size < 64 or data[:64] not in encrypted.read_bytes()


def test_every_change_of_an_encrypted_file_is_detected(tmp_path: Path) -> None:
    plain, encrypted, decrypted = _paths(tmp_path)
    plain.write_bytes(random.Random(1).randbytes(3 * PIECE + 77))
    EncryptedFormat(KEY).encode_file(str(plain), str(encrypted), b"name")
    whole, rng = encrypted.read_bytes(), random.Random(2)
    # Segments have one size in the encrypted file; the first one includes the header.
    second, third = whole[PIECE : 2 * PIECE], whole[2 * PIECE : 3 * PIECE]
    changed = [whole + b"x", whole[:PIECE], b"", plain.read_bytes()]
    changed.append(whole[:PIECE] + third + second + whole[3 * PIECE :])
    for _ in range(20):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        changed += [bytes(data), whole[: rng.randrange(len(whole))]]
    for data in changed:
        encrypted.write_bytes(data)
        with pytest.raises(SnapshotUnusable):
            EncryptedFormat(KEY).decode_file(str(encrypted), str(decrypted), b"name")
    encrypted.write_bytes(whole)
    for cipher, name in ((EncryptedFormat(OTHER), b"name"), (EncryptedFormat(KEY), b"another")):
        with pytest.raises(SnapshotUnusable):
            cipher.decode_file(str(encrypted), str(decrypted), name)


@pytest.mark.parametrize("capacity", [0, 100, PIECE, 3 * PIECE])
def test_a_full_disk_is_reported_while_a_file_is_encrypted(
    capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() + memoryview(data).nbytes > capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    plain, encrypted, _ = _paths(tmp_path)
    plain.write_bytes(bytes(3 * PIECE))
    monkeypatch.setattr(cipher_module, "_created", lambda path: FullDisk(path, "wb"))
    with pytest.raises(SnapshotUnusable) as caught:
        EncryptedFormat(KEY).encode_file(str(plain), str(encrypted), b"name")
    assert caught.value.reason == "disk"


@pytest.mark.parametrize("form", [DiskFormat(), EncryptedFormat(KEY)], ids=["plain", "encrypted"])
def test_a_row_is_decoded_only_with_its_associated_data(form: DiskFormat) -> None:
    encoded = form.encode_row(b"the tokens", b"alice's")
    assert form.decode_row(encoded, b"alice's") == b"the tokens"
    for wrong, associated in ((encoded, b"bob's"), (encoded[:-1], b"alice's"), (b"", b"alice's")):
        with pytest.raises(ValueError):
            form.decode_row(wrong, associated)


def test_an_encrypted_directory_has_no_plaintext_and_can_be_reopened(tmp_path: Path) -> None:
    folder, key = tmp_path / "slots", _key_file(tmp_path)
    packed_tokens = TOKENS.astype("<i4").tobytes()
    with open_repository(folder, key_file=key) as first:
        item = add_snapshot(first)
    for path in folder.rglob("*"):
        assert path.is_dir() or (
            packed_tokens not in path.read_bytes() and b"qsgg" not in path.read_bytes()
        )
    with open_repository(folder, key_file=key) as second:
        (found,) = second.snapshots
        assert found == item and list(found.tokens) == list(TOKENS)
        decrypted = second.files.decrypt(f"{found.id}.evoke-kv")
        path = folder / decrypted
        assert decrypted.endswith(".evoke-part") and packed_tokens in path.read_bytes()
        assert path.stat().st_mode & 0o777 == 0o600
        # each restore gets a file of its own, because it deletes it
        assert second.files.decrypt(f"{found.id}.evoke-kv") != decrypted
    with open_repository(folder, key_file=key):
        assert not list(folder.glob("*.evoke-part")), (
            "decrypted files left by a crash are deleted at start"
        )


@pytest.mark.parametrize("other_key", [None, OTHER])
def test_another_key_is_refused_at_start_and_deletes_nothing(
    tmp_path: Path, other_key: bytes | None
) -> None:
    folder, key = tmp_path / "slots", _key_file(tmp_path)
    with open_repository(folder, key_file=key) as first:
        add_snapshot(first)
    other = _key_file(tmp_path, other_key) if other_key is not None else ""
    with pytest.raises(ConfigError, match="another key"), open_repository(folder, key_file=other):
        pass
    with open_repository(folder, key_file=key) as second:
        assert len(second.snapshots) == 1


def test_a_damaged_key_is_refused_at_start_and_deletes_nothing() -> None:
    rng = random.Random(5)
    with in_memory() as memory:
        folder, key = memory / "slots", Path(_key_file(memory))
        with open_repository(folder, key_file=str(key)) as first:
            item = add_snapshot(first)
        whole, refused = key.read_bytes(), 0
        for _ in range(DAMAGES):
            key.write_bytes(whole)
            damage(key, rng)
            try:
                # some damage does not change the key: white space, or a letter's case
                with open_repository(folder, key_file=str(key)) as second:
                    assert [found.id for found in second.snapshots] == [item.id]
            except ConfigError as error:
                assert "key" in str(error)
                refused += 1
        key.write_bytes(whole)
        with open_repository(folder, key_file=str(key)) as third:
            assert [found.id for found in third.snapshots] == [item.id]
            asyncio.run(third.verify(item))
        assert DAMAGES / 2 < refused < DAMAGES


def test_a_key_file_without_64_hexadecimal_digits_is_refused(tmp_path: Path) -> None:
    for text in ("abcdefghijklmnopqrstuv", KEY.hex()[:-2], KEY.hex() + "00"):
        write_secret(tmp_path / "key", text)
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            disk_format(str(tmp_path / "key"))


def test_an_index_in_the_former_encryption_is_quarantined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, key = tmp_path / "slots", _key_file(tmp_path)
    with open_repository(folder, key_file=key) as first:
        add_snapshot(first)
    former_key_id = EncryptedFormat(KEY).former_key_id
    assert former_key_id is not None
    with sqlite3.connect(folder / "index.sqlite") as index:
        (version,) = index.execute("PRAGMA user_version").fetchone()
        index.execute(f"PRAGMA user_version={version & 0xFF | former_key_id << 8}")
    index.close()
    with open_repository(folder, key_file=key) as second:
        assert not second.snapshots
    assert "encrypted in the format of an earlier version" in caplog.text
    assert (folder / "quarantine/index.sqlite").exists()
