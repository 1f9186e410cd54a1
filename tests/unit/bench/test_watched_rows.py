"""Rows of slot files, and the witness that compares rows that return."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from bench.watched import Witness, rows

MAGIC = 0x67677371


def slot_file(path: Path, contents: dict[int, bytes], version: int = 4) -> Path:
    """Writes a slot file as llama.cpp does: one layer, keys and values of two bytes per row."""
    data = struct.pack("<III2i", MAGIC, version, 2, 7, 8) + struct.pack("<II", 1, len(contents))
    data += b"".join(struct.pack("<iI", at, 1) + struct.pack("<i", 0) for at in contents)
    data += struct.pack("<II", 0, 1) + (bytes(8) if version > 3 else b"")
    for part in (slice(0, 2), slice(2, 4)):
        data += struct.pack("<iQ", 1, 2) + b"".join(row[part] for row in contents.values())
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [3, 4])
def test_rows_of_a_slot_file_are_read_by_position(version: int, tmp_path: Path) -> None:
    contents = {5: b"kKvV", 3: b"abcd"}
    path = slot_file(tmp_path / "slot", contents, version)
    assert rows(path) == contents
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="no slot file"):
        rows(path)


def test_the_witness_counts_rows_that_return_with_other_contents() -> None:
    witness = Witness()
    first = {0: b"a", 1: b"b", 2: b"c"}
    assert witness.look(first, 0, 3) == frozenset()
    witness.look({0: b"a"}, 3, 3)
    assert witness.look(first, 3, 3) == {1, 2}
    assert (witness.n_returned, witness.differ) == (2, 0)
    witness.look({0: b"a", 1: b"B", 4: b"!"}, 5, 5)
    assert (witness.unseen, witness.differ) == (1, 1)
    # Rows that are decoded again may differ.
    witness.look({0: b"x"}, 0, 5)
    assert witness.differ == 1
