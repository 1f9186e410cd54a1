"""Sealed snapshot files are verified before they are used."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

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


def test_the_checksum_of_earlier_versions_is_still_verified(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    sealed = Sealed(len(DATA), hashlib.sha256(DATA).hexdigest())
    files = SnapshotFiles(tmp_path)
    files.verify(NAME, sealed)
    (tmp_path / NAME).write_bytes(b"Rows" * 100)
    with pytest.raises(SnapshotUnusable):
        files.verify(NAME, sealed)
