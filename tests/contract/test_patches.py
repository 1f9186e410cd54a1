"""The patch series: it is small, only adds to upstream, and applies without offsets."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from llama import binary

from evoke_proxy.server_build.cache import cache_dir
from evoke_proxy.server_build.fetch import (
    pin_directories,
    pin_directory,
    pristine_source,
    read_pin,
)
from evoke_proxy.server_build.series import git_apply, make_overlay, patches_dir, read_series

MAX_HOOK_LINES = 150
MAX_CHANGED_LINES = 2  # of lines of upstream


def changes(patch: Path) -> Iterator[str]:
    """The added and removed lines of a patch, without the headers that name files."""
    for hunks in patch.read_text("utf-8").split("\ndiff --git ")[1:]:
        inside = False
        for line in hunks.splitlines():
            inside = inside or line.startswith("@@")
            if inside and line[:1] in ("+", "-"):
                yield line


@pytest.fixture(scope="module")
def pinned() -> Path:
    """The unpacked source of the pinned llama.cpp; building a server downloads it."""
    assert binary(patched=False).is_file()
    return pristine_source(read_pin(patches_dir()), cache_dir(), print)


@pytest.mark.parametrize("pin", pin_directories(patches_dir()))
def test_the_hooks_are_few_and_remove_almost_nothing(pin: str) -> None:
    series = read_series(pin_directory(patches_dir(), pin))
    lines = [line for patch in series.patches for line in changes(patch)]
    added = [line for line in lines if line.startswith("+")]
    assert 0 < len(added) <= MAX_HOOK_LINES
    assert len(lines) - len(added) <= MAX_CHANGED_LINES


def test_every_hunk_applies_to_the_pin_at_its_line(pinned: Path, tmp_path: Path) -> None:
    git = shutil.which("git")
    assert git is not None
    series = read_series(patches_dir())
    tree = tmp_path / "tree"
    for patch in series.patches:
        named = git_apply(git, tmp_path, "--numstat", str(patch)).stdout.splitlines()
        for name in (line.split("\t")[2] for line in named):
            if not (tree / name).exists():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(pinned / name, tree / name)
        done = git_apply(git, tree, "--verbose", str(patch))
        assert done.returncode == 0, done.stderr
        assert "offset" not in done.stderr, done.stderr
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    made = make_overlay(series, pinned, overlay, git)
    own = {place for _, place in series.sources}
    assert not made.removed and own < made.files
    for name in made.files - own:
        assert (overlay / name).read_bytes() == (tree / name).read_bytes()
