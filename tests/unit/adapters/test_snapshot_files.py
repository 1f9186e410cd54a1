"""Sealed snapshot files are verified before they are used."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from evoke_proxy.adapters.snapshot_files import SnapshotFiles
from evoke_proxy.errors import SnapshotUnusable

PART_BYTES = 8 << 20
NAME = "one.evoke-kv"


@pytest.mark.parametrize("size", [1, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 5])
def test_a_checksum_is_that_of_the_digests_of_all_parts(tmp_path: Path, size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    (tmp_path / NAME).write_bytes(data[:size])
    parts = [data[:size][at : at + PART_BYTES] for at in range(0, size, PART_BYTES)]
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    files = SnapshotFiles(tmp_path)
    checksum = files.checksum(NAME)
    assert checksum == "parts:" + hashlib.sha256(digests).hexdigest()
    files.verify(NAME, size, checksum)


@pytest.mark.parametrize("at", [0, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 4])
def test_a_changed_byte_of_any_part_is_found(tmp_path: Path, at: int) -> None:
    path, size = tmp_path / NAME, 2 * PART_BYTES + 5
    path.write_bytes(bytes(size))
    files = SnapshotFiles(tmp_path)
    checksum = files.checksum(NAME)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"x")
    with pytest.raises(SnapshotUnusable) as raised:
        files.verify(NAME, size, checksum)
    assert raised.value.reason == "checksum"


def test_exchanged_parts_are_found(tmp_path: Path) -> None:
    path = tmp_path / NAME
    first, second = b"a" * PART_BYTES, b"b" * PART_BYTES
    path.write_bytes(first + second)
    files = SnapshotFiles(tmp_path)
    checksum = files.checksum(NAME)
    path.write_bytes(second + first)
    with pytest.raises(SnapshotUnusable):
        files.verify(NAME, 2 * PART_BYTES, checksum)


def test_the_checksum_of_earlier_versions_is_still_verified(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"rows" * 100)
    checksum = hashlib.sha256(b"rows" * 100).hexdigest()
    files = SnapshotFiles(tmp_path)
    files.verify(NAME, 400, checksum)
    path.write_bytes(b"Rows" * 100)
    with pytest.raises(SnapshotUnusable):
        files.verify(NAME, 400, checksum)
