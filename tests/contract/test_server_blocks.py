"""C++ unit tests of the block store, built with sanitizers; no server runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from native import run_sanitized

PROGRAMS = Path(__file__).parents[1] / "server_blocks"
FILE_SOURCES = ("server-blocks-file.cpp", "server-blocks-history.cpp")
DISK_SOURCES = ("server-blocks-disk.cpp", *FILE_SOURCES)
SOURCES = {
    "arena": ("server-blocks-arena.cpp",),
    "file": FILE_SOURCES,
    "disk": DISK_SOURCES,
    "memory": ("server-blocks-memory.cpp", "server-blocks-arena.cpp", *DISK_SOURCES),
    "copy_files": ("server-blocks-copy-files.cpp", *DISK_SOURCES),
}


@pytest.mark.parametrize("part", SOURCES)
def test_a_part_of_the_block_store_passes_its_checks(part: str, tmp_path: Path) -> None:
    printed = run_sanitized(PROGRAMS / f"{part}.cpp", SOURCES[part], tmp_path)
    assert printed.startswith("ok: ") and "FAILED" not in printed
