"""Exported conversations: any reader of tar archives reads the manifest and the files."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from snapshot_fixtures import snapshot

from evoke_proxy.adapters.snapshot_files import SEALED
from evoke_proxy.engine.storage.export import archive


def _files(folder: Path, **sizes: int) -> list[bytes]:
    contents = []
    for number, (name, size) in enumerate(sizes.items()):
        contents.append(bytes([number + 1]) * size)
        (folder / (name + SEALED)).write_bytes(contents[-1])
    return contents


def test_the_archive_has_the_manifest_and_each_file(tmp_path: Path) -> None:
    first, second = _files(tmp_path, one=700, two=512)
    snapshots = [snapshot("one", [1, 2, 70_000]), snapshot("two", [1])]
    data = b"".join(archive(tmp_path, snapshots, {"name": "mine"}))
    assert len(data) % tarfile.BLOCKSIZE == 0
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["manifest.json", "one" + SEALED, "two" + SEALED]
        assert all(entry.mode == 0o600 and entry.isfile() for entry in tar)
        manifest, *files = [tar.extractfile(name) for name in tar.getnames()]
        assert manifest is not None and all(files)
        assert [file.read() for file in files if file is not None] == [first, second]
        stated = json.load(manifest)
    assert (stated["version"], stated["name"]) == (1, "mine")
    assert [item["tokens"] for item in stated["snapshots"]] == [[1, 2, 70_000], [1]]


def test_a_file_is_read_when_its_piece_is_requested_and_never_whole(tmp_path: Path) -> None:
    _files(tmp_path, one=24 << 20)
    tracemalloc.start()
    try:
        total = sum(len(piece) for piece in archive(tmp_path, [snapshot("one", [1])]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total > 24 << 20 and peak < 8 << 20


def test_a_missing_file_and_a_pipe_raise_an_error_and_do_not_block(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        list(archive(tmp_path, [snapshot("one", [1])]))
    os.mkfifo(tmp_path / ("one" + SEALED))
    with pytest.raises(OSError):
        list(archive(tmp_path, [snapshot("one", [1])]))


def test_a_file_that_becomes_shorter_raises_an_error(tmp_path: Path) -> None:
    _files(tmp_path, one=3 << 20)
    path = tmp_path / ("one" + SEALED)
    with pytest.raises(OSError, match="became shorter"):
        for piece in archive(tmp_path, [snapshot("one", [1])]):
            if len(piece) == 1 << 20:
                with path.open("r+b") as file:
                    file.truncate(1 << 20)
