"""Rows on disk without encryption: a changed row or another owner is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.snapshots.disk_format import DiskFormat

FORMAT = DiskFormat()


@given(st.binary(max_size=200), st.binary(max_size=30))
def test_a_row_is_decoded_as_it_was_encoded(data: bytes, aad: bytes) -> None:
    stored = FORMAT.encode_row(data, aad)
    assert FORMAT.decode_row(stored, aad) == data
    assert len(stored) == len(data) + 16


@given(st.binary(min_size=1, max_size=60), st.integers(0), st.integers(1, 255))
def test_a_changed_byte_is_noticed(data: bytes, at: int, change: int) -> None:
    stored = bytearray(FORMAT.encode_row(data, b"owner"))
    stored[at % len(stored)] ^= change
    with pytest.raises(ValueError):
        FORMAT.decode_row(bytes(stored), b"owner")


@pytest.mark.parametrize("stored", [b"", b"short", FORMAT.encode_row(b"data", b"a")[:-1]])
def test_a_cut_row_is_noticed(stored: bytes) -> None:
    with pytest.raises(ValueError):
        FORMAT.decode_row(stored, b"a")


def test_a_row_of_another_owner_is_refused() -> None:
    with pytest.raises(ValueError):
        FORMAT.decode_row(FORMAT.encode_row(b"data", b"one"), b"two")
    # A border between owner and data that moves makes another row.
    with pytest.raises(ValueError):
        FORMAT.decode_row(FORMAT.encode_row(b"ta", b"a" * 3), b"a" * 3 + b"t")


def test_files_are_stored_as_they_are(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"rows")
    assert not FORMAT.encode_file(str(source), str(target), b"a")
    assert not FORMAT.decode_file(str(source), str(target), b"a")
    assert not target.exists() and source.read_bytes() == b"rows"
    assert (FORMAT.key_id, FORMAT.former_key_id) == (0, None)
