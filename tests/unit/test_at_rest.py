"""What is kept on disk, encrypted: nothing of it to be read, moved, cut or changed unnoticed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from damage import DAMAGES, damage, in_memory
from test_vault import TOKENS, kept, vault

from evoke_proxy.adapters.cipher import Cipher
from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.core.snapshots.at_rest import Plain
from evoke_proxy.engine.storage.encryption import at_rest
from evoke_proxy.errors import ConfigError, SnapshotUnusable

KEY, OTHER = bytes(range(32)), bytes(32)
PIECE = 1024 * 1024


def _key_file(folder: Path, key: bytes = KEY) -> str:
    path = folder / f"key-{key[1]}"
    write_secret(path, key.hex() + "\n")
    return str(path)


def _three(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "plain", folder / "sealed", folder / "again"


@pytest.mark.parametrize("size", [0, 1, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_a_file_comes_back_and_is_as_long_as_was_said(size: int, tmp_path: Path) -> None:
    plain, sealed, again = _three(tmp_path)
    data = random.Random(size).randbytes(size)
    plain.write_bytes(data)
    Cipher(KEY).write(str(plain), str(sealed), b"name")
    assert sealed.stat().st_size == Cipher(KEY).size(size)
    assert sealed.stat().st_mode & 0o777 == 0o600
    Cipher(KEY).read(str(sealed), str(again), b"name")
    assert again.read_bytes() == data
    assert size < 64 or data[:64] not in sealed.read_bytes()


def test_whatever_is_done_to_a_file_is_noticed(tmp_path: Path) -> None:
    plain, sealed, again = _three(tmp_path)
    plain.write_bytes(random.Random(1).randbytes(2 * PIECE + 77))
    Cipher(KEY).write(str(plain), str(sealed), b"name")
    whole, how = sealed.read_bytes(), random.Random(2)
    first, second = whole[24 : 24 + PIECE + 16], whole[24 + PIECE + 16 : 24 + 2 * (PIECE + 16)]
    harmed = [whole + b"x", whole[: 24 + PIECE + 16], b"", plain.read_bytes()]
    harmed.append(whole[:24] + second + first + whole[24 + 2 * (PIECE + 16) :])
    for _ in range(20):
        data = bytearray(whole)
        data[how.randrange(len(data))] ^= 1 << how.randrange(8)
        harmed += [bytes(data), whole[: how.randrange(len(whole))]]
    for data in harmed:
        sealed.write_bytes(data)
        with pytest.raises(SnapshotUnusable):
            Cipher(KEY).read(str(sealed), str(again), b"name")
    sealed.write_bytes(whole)
    for cipher, name in ((Cipher(OTHER), b"name"), (Cipher(KEY), b"another")):
        with pytest.raises(SnapshotUnusable):
            cipher.read(str(sealed), str(again), name)


@pytest.mark.parametrize("form", [Plain(), Cipher(KEY)], ids=["plain", "encrypted"])
def test_a_row_is_about_what_it_was_about(form: Plain) -> None:
    closed = form.close(b"the tokens", b"alice's")
    assert form.open(closed, b"alice's") == b"the tokens"
    for wrong, about in ((closed, b"bob's"), (closed[:-1], b"alice's"), (b"", b"alice's")):
        with pytest.raises(ValueError):
            form.open(wrong, about)


def test_nothing_of_a_conversation_is_to_be_read_and_everything_comes_back(tmp_path: Path) -> None:
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
        lent = second.files.lend(f"{again.id}.evoke-kv")
        assert lent.endswith(".evoke-part") and listed in (folder / lent).read_bytes()
        assert (folder / lent).stat().st_mode & 0o777 == 0o600
        assert second.files.lend(f"{again.id}.evoke-kv") != lent, "each restore deletes its own"
    with vault(folder, key_file=key):
        assert not list(folder.glob("*.evoke-part")), (
            "what a crash leaves in the clear goes at start"
        )


@pytest.mark.parametrize("then", [None, OTHER])
def test_another_key_or_none_ends_the_start_and_loses_nothing(
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


def test_a_key_that_is_damaged_ends_the_start_and_loses_nothing() -> None:
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


def test_a_key_of_no_use_is_refused(tmp_path: Path) -> None:
    for text in ("abcdefghijklmnopqrstuv", KEY.hex()[:-2], KEY.hex() + "00"):
        write_secret(tmp_path / "key", text)
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            at_rest(str(tmp_path / "key"))
