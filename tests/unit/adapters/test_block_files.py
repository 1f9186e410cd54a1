"""Heads of the block files of llama-server."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from repository_fixtures import write_block_file

from evoke_proxy.adapters.block_files import block_files, read_head


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
