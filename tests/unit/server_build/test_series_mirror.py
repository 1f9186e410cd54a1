"""Updating the compiled source tree: exact contents, with as few files written as possible."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from server_build_project import write_llama

from evoke_proxy.server_build.series import Overlay, content_hash, mirror, source_files

MAIN = "tools/server/main.cpp"
LONG_AGO = 1_600_000_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = write_llama(tmp_path / "pristine")
    for name in source_files(root):
        os.utime(root / name, (LONG_AGO, LONG_AGO))
    return root


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    for name in (MAIN, "tools/server/server-own.h"):
        path = tmp_path / "overlay" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("patched\n")
    return Overlay(
        tmp_path / "overlay",
        frozenset({MAIN, "tools/server/server-own.h"}),
        frozenset({"src/calm.cpp"}),
    )


def snapshot(tree: Path) -> dict[str, tuple[bytes, int]]:
    return {
        name: ((tree / name).read_bytes(), (tree / name).stat().st_mtime_ns)
        for name in source_files(tree)
    }


def contents(tree: Path) -> dict[str, bytes]:
    return {name: data for name, (data, _) in snapshot(tree).items()}


def test_the_first_copy_keeps_times_and_skips_unread_files(source: Path, tmp_path: Path) -> None:
    mirror(source, None, tmp_path / "tree")
    assert snapshot(tmp_path / "tree") == snapshot(source)
    assert not (tmp_path / "tree" / "docs").exists()


def test_a_second_copy_writes_nothing(source: Path, tmp_path: Path) -> None:
    mirror(source, None, tmp_path / "tree")
    before = snapshot(tmp_path / "tree")
    assert mirror(source, None, tmp_path / "tree") == 0
    assert snapshot(tmp_path / "tree") == before


def test_patching_rewrites_only_changed_files(
    source: Path, overlay: Overlay, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    mirror(source, None, tree)
    before, switched = snapshot(tree), time.time_ns() - 1_000_000_000
    assert mirror(source, overlay, tree) == 3
    after = snapshot(tree)
    assert after[MAIN][0] == b"patched\n" and after[MAIN][1] > switched
    assert "src/calm.cpp" not in after
    untouched = before.keys() - {MAIN, "src/calm.cpp"}
    assert all(after[name] == before[name] for name in untouched)


def test_a_return_to_stock_restores_the_original_content_with_new_times(
    source: Path, overlay: Overlay, tmp_path: Path
) -> None:
    """An old time would leave the objects of the patched file in place."""
    tree = tmp_path / "tree"
    mirror(source, None, tree)
    mirror(source, overlay, tree)
    patched = snapshot(tree)
    assert mirror(source, None, tree) == 3
    assert contents(tree) == contents(source)
    for name in (MAIN, "src/calm.cpp"):
        assert snapshot(tree)[name][1] >= patched[MAIN][1]


def test_a_restored_file_is_newer_than_its_old_objects(
    source: Path, overlay: Overlay, tmp_path: Path
) -> None:
    tree, own = tmp_path / "tree", "tools/server/server-own.h"
    os.utime(overlay.directory / own, (LONG_AGO, LONG_AGO))
    mirror(source, overlay, tree)
    mirror(source, None, tree)
    mirror(source, overlay, tree)
    assert (tree / own).stat().st_mtime > LONG_AGO + 1


def test_a_partially_edited_tree_is_repaired(
    source: Path, overlay: Overlay, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    mirror(source, overlay, tree)
    expected = contents(tree)
    (tree / MAIN).write_text("patch")  # truncated by a crash
    (tree / "CMakeLists.txt").unlink()
    (tree / "src").mkdir()
    (tree / "tools/server/stray.cpp").write_text("from another series")
    (tree / "src" / "calm.cpp.evoke-new").write_text("draft of a killed run")
    assert mirror(source, overlay, tree) == 4
    assert contents(tree) == expected


def test_files_of_the_same_size_are_compared_by_content(source: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    mirror(source, None, tree)
    text = (tree / MAIN).read_text()
    (tree / MAIN).write_text(text.replace("stock", "stick"))
    assert mirror(source, None, tree) == 1
    assert (tree / MAIN).read_text() == text


def test_executable_files_stay_executable(source: Path, tmp_path: Path) -> None:
    (source / "script.sh").write_text("#!/bin/sh\n")
    (source / "script.sh").chmod(0o755)
    mirror(source, None, tmp_path / "tree")
    assert os.access(tmp_path / "tree" / "script.sh", os.X_OK)


def test_the_content_hash_covers_names_and_bytes_but_not_times_or_unread_files(
    source: Path,
) -> None:
    first = content_hash(source)
    os.utime(source / MAIN)
    (source / "docs/long.md").write_text("changed")
    (source / ".git").write_text("gitdir: ../nowhere")
    (source / "build-cpu").mkdir()
    (source / "build-cpu/huge.o").write_text("object")
    assert content_hash(source) == first
    (source / "src/calm.cpp").rename(source / "src/storm.cpp")
    renamed = content_hash(source)
    (source / "src/storm.cpp").write_text("int calm() { return 1; }\n")
    assert len({first, renamed, content_hash(source)}) == 3
