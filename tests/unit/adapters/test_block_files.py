"""Heads of the block files of llama-server."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from repository_fixtures import write_block_file

from evoke_proxy.adapters.block_files import (
    block_files,
    checksum,
    parse_head,
    read_head,
    read_own_head,
)


def test_owner_and_names_of_each_readable_block_file_are_found(tmp_path: Path) -> None:
    path = write_block_file(tmp_path, 1, "team", {"s/0-64-a": "s", "t/0-64-a": "täst"})
    write_block_file(tmp_path, 2, "", {"x": "y"}).write_bytes(b"damaged")
    (tmp_path / "notes.txt").write_text("no block")
    found = list(block_files(tmp_path))
    assert [(block.path, block.tenant) for block in found] == [(path, "team")]
    assert found[0].names == {"s/0-64-a": "s", "t/0-64-a": "täst"}


@pytest.mark.parametrize("end", [0, 20, 48, 60, 88, 96, 104, 110])
def test_a_head_that_ends_early_is_refused(tmp_path: Path, end: int) -> None:
    path = write_block_file(tmp_path, 1, "team", {"s/0-64-a": "s"})
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(ValueError, match=r"damaged|not a block file"):
        read_head(path)


def test_a_length_beyond_the_head_is_refused(tmp_path: Path) -> None:
    path = write_block_file(tmp_path, 1, "team", {"s": "s"})
    data = bytearray(path.read_bytes())
    data[88:96] = struct.pack("<Q", 1 << 62)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        read_head(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = write_block_file(tmp_path, 1, "team", {"s": "s"})
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    with pytest.raises(ValueError, match="version 3"):
        read_head(path)


def test_a_head_is_written_with_the_names_of_one_session(tmp_path: Path) -> None:
    names = {"s/0-64-a": "s", "t/0-64-a": "t", "st/0-64-a": "s", "s/0-64-b": "s"}
    path = write_block_file(tmp_path, 1, "team", names)
    with path.open("rb") as file:
        head, start = read_own_head(file, "s")
        assert file.seek(start) == start and file.read() == b"rows"
    assert parse_head(head) == ("team", {"s/0-64-a": "s", "s/0-64-b": "s"})
    assert len(head) % 64 == 0 and struct.unpack_from("<4Q", head, 16)[:2] == (len(head), 4)
    assert checksum(head[:40] + bytes(8) + head[48:]) == struct.unpack_from("<Q", head, 40)[0]
    with path.open("rb") as file:
        assert parse_head(read_own_head(file, "other")[0]) == ("team", {})


def test_a_head_with_the_names_of_one_session_stays_as_it_is(tmp_path: Path) -> None:
    path = write_block_file(tmp_path, 1, "team", {"s/0-64-a": "s"})
    with path.open("rb") as file:
        head, start = read_own_head(file, "s")
    assert path.read_bytes() == head + b"rows" and start == len(head)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:40],
        lambda data: data[:-20],
        lambda data: data[:16] + struct.pack("<Q", 10) + data[24:],
        lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:],
    ],
)
def test_a_head_of_another_size_is_not_written(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    path = write_block_file(tmp_path, 1, "team", {"s/0-64-a": "s", "t/0-64-a": "t"})
    path.write_bytes(change(path.read_bytes()))
    with path.open("rb") as file, pytest.raises(ValueError, match="head|damaged"):
        read_own_head(file, "s")


def test_the_checksum_is_that_of_llama_server() -> None:
    """The values are those of the C++ function."""
    data = bytes((i * 37 + 11) % 256 for i in range(64))
    assert checksum(data) == 0x155CCCE4BF32BEFC
    assert checksum(data[:32]) == 0xCC6B8AAADA790B2D
