"""Sealed snapshot files are verified before they are used."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from state_file_fixtures import cache, file

from evoke_proxy.adapters.snapshot_files import Sealed, SnapshotFiles
from evoke_proxy.errors import SnapshotUnusable

NAME, DATA = "one.evoke-kv", b"rows" * 100


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    ("changed", "reason"), [(b"Rows" * 100, "checksum"), (DATA[:-1], "size"), (None, "missing")]
)
def test_a_changed_file_is_refused(
    tmp_path: Path, changed: bytes | None, reason: str, follow: bool
) -> None:
    path, files = tmp_path / NAME, SnapshotFiles(tmp_path)
    path.write_bytes(DATA)
    sealed = Sealed(len(DATA), files.checksum(NAME))
    files.verify(NAME, sealed, follow)
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    with pytest.raises(SnapshotUnusable) as raised:
        files.verify(NAME, sealed, follow)
    assert raised.value.reason == reason


def test_only_rows_may_change_in_a_file_that_is_read_before_it_is_verified(tmp_path: Path) -> None:
    tokens = np.zeros(2, np.int32)
    data = file(cache(range(40), False, (4,), version=4), version=4)
    (tmp_path / "one.evoke-part").write_bytes(data)
    files = SnapshotFiles(tmp_path)
    sealed = files.seal("one.evoke-part", NAME, len(data), tokens)
    files.verify(NAME, sealed)
    assert sealed.of_frame and files.has_sound_frame(NAME, sealed)
    assert not files.has_sound_frame(NAME, Sealed(len(data), sealed.of_file))
    rows = {*range(len(data) - 160, len(data)), *range(len(data) - 332, len(data) - 172)}
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x10
        (tmp_path / NAME).write_bytes(changed)
        assert files.has_sound_frame(NAME, sealed) is (at in rows), at
        with pytest.raises(SnapshotUnusable):
            files.verify(NAME, sealed)


def test_the_checksum_of_earlier_versions_is_still_verified(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    sealed = Sealed(len(DATA), hashlib.sha256(DATA).hexdigest())
    files = SnapshotFiles(tmp_path)
    files.verify(NAME, sealed)
    (tmp_path / NAME).write_bytes(b"Rows" * 100)
    with pytest.raises(SnapshotUnusable):
        files.verify(NAME, sealed)
