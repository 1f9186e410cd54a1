"""Checksums of this and earlier versions find damage, and files are read once and in order."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from evoke_proxy.file_checksums import checksum, is_intact

PART_BYTES = 8 << 20
SIZES = [0, 1, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 5]


def whole_sha256(data: bytes) -> str:
    """The checksum of the first versions."""
    return hashlib.sha256(data).hexdigest()


def sha256_by_parts(data: bytes) -> str:
    """The checksum of later versions."""
    parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return "parts:" + hashlib.sha256(digests).hexdigest()


def xxh3(data: bytes) -> str:
    return "xxh3:" + xxhash.xxh3_128(data).hexdigest()


FORMS = [whole_sha256, sha256_by_parts, xxh3]


def write(folder: Path, size: int) -> tuple[Path, bytes]:
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    path = folder / "one.evoke-kv"
    path.write_bytes(data)
    return path, data


@pytest.mark.parametrize("size", SIZES)
def test_a_checksum_is_the_xxh3_of_the_file(tmp_path: Path, size: int) -> None:
    path, data = write(tmp_path, size)
    assert checksum(path) == checksum(path, sync=True) == xxh3(data)


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_the_checksums_of_all_versions_are_compared(
    tmp_path: Path, size: int, form: Callable[[bytes], str], follow: bool
) -> None:
    path, data = write(tmp_path, size)
    assert is_intact(path, form(data), follow)
    assert not is_intact(path, form(data + b"x"), follow)


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("at", [0, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 4])
def test_a_changed_byte_is_found(
    tmp_path: Path, at: int, form: Callable[[bytes], str], follow: bool
) -> None:
    path, data = write(tmp_path, 2 * PART_BYTES + 5)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    assert not is_intact(path, form(data), follow)


@pytest.mark.parametrize("stated", ["", "xxh3:", "blake9:00", "parts:zz"])
def test_an_unknown_checksum_matches_no_file(tmp_path: Path, stated: str) -> None:
    assert not is_intact(write(tmp_path, 10)[0], stated)


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_read_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Callable[[bytes], str], follow: bool
) -> None:
    path, data = write(tmp_path, 2 * PART_BYTES + 5)
    read, ranges = os.preadv, list[tuple[int, int]]()

    def recorded(handle: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        n_read = read(handle, buffers, at, flags)
        ranges.append((at, at + n_read))
        return n_read

    monkeypatch.setattr(os, "preadv", recorded)
    assert is_intact(path, form(data), follow)
    assert [end for _, end in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert ranges[0][0] == 0 and ranges[-1] == (len(data), len(data))


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_a_file_that_no_other_process_reads_is_read_by_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """It is not in the page cache, or the system cannot say whether it is."""
    path, data = write(tmp_path, PART_BYTES)
    read, n_refused = os.preadv, 0

    def cached_beginning(handle: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        nonlocal n_refused
        if flags and at >= PART_BYTES // 2:
            n_refused += 1
            raise OSError(error, "not now")
        return read(handle, buffers, at, flags)

    monkeypatch.setattr(os, "preadv", cached_beginning)
    assert is_intact(path, xxh3(data), follow=True) and n_refused
    assert not is_intact(path, xxh3(data + b"x"), follow=True)


def test_a_system_that_reports_the_end_too_early_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux 5.9 and 5.10 do that for reads of what is in the page cache."""
    path, data = write(tmp_path, PART_BYTES)
    read = os.preadv

    def ends_early(handle: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        return 0 if flags and at >= PART_BYTES // 2 else read(handle, buffers, at, flags)

    monkeypatch.setattr(os, "preadv", ends_early)
    assert is_intact(path, xxh3(data), follow=True)


def test_a_file_is_followed_while_another_process_reads_it_from_the_disk(tmp_path: Path) -> None:
    path, data = write(tmp_path, PART_BYTES)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pid = os.posix_spawn("/bin/cat", ["cat", str(path)], os.environ, file_actions=[
            (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)
        ])  # fmt: skip
        assert is_intact(path, xxh3(data), follow=True)
    os.waitpid(pid, 0)
