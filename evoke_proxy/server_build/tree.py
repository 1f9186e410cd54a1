"""Keeps one source tree equal to what shall be compiled, touching as few files as possible.

Ninja and make go by modification times, so a file is written only if its content differs; that is
what lets the stock and the patched server share one build tree. There is no record of what was
applied: the tree is compared with what it should be, so a half-edited one repairs itself.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .series import Overlay

# Never read by the build of the server: two thirds of the bytes, and other people's build trees.
_SKIPPED_TOP = frozenset({"docs", "models", "media", "out"})
_SKIPPED = frozenset({".git", "__pycache__", "node_modules", ".venv"})


def source_files(root: Path) -> Iterator[str]:
    """Relative paths of the files of a llama.cpp tree that a build may read, in sorted order."""
    for directory, names, files in os.walk(root):
        top = Path(directory) == root
        names[:] = sorted(name for name in names if not _skipped(name, top))
        base = os.path.relpath(directory, root)
        for name in sorted(files):
            if name not in _SKIPPED and os.path.isfile(os.path.join(directory, name)):
                yield os.path.normpath(os.path.join(base, name))


def _skipped(name: str, top: bool) -> bool:
    return name in _SKIPPED or (top and (name in _SKIPPED_TOP or name.startswith("build")))


def content_hash(root: Path) -> str:
    """A hash over the names and bytes of `source_files(root)`."""
    digest = hashlib.sha256()
    for name in source_files(root):
        with open(root / name, "rb") as file:
            digest.update(name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def mirror(source: Path, overlay: Overlay | None, tree: Path) -> int:
    """Makes `tree` equal to `source` with `overlay` on top; returns how many files it changed.

    The first copy keeps modification times, which makes every later comparison cheap. After that
    a written file is always newer than anything compiled from what it replaces.
    """
    fresh = not tree.exists()
    origins = {name: source / name for name in source_files(source)}
    if overlay is not None:
        origins |= {name: overlay.directory / name for name in overlay.files}
        for name in overlay.removed:
            origins.pop(name, None)
    tree.mkdir(parents=True, exist_ok=True)
    changed = sum(_refresh(origin, tree / name, fresh) for name, origin in origins.items())
    surplus = [name for name in source_files(tree) if name not in origins]
    for name in surplus:
        (tree / name).unlink()
    return changed + len(surplus)


def _refresh(origin: Path, target: Path, fresh: bool) -> bool:
    if not fresh and _same(origin, target):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.evoke-new")
    shutil.copy2(origin, draft)
    if not fresh:
        os.utime(draft)
    os.replace(draft, target)
    return True


def _same(origin: Path, target: Path) -> bool:
    try:
        have = target.stat()
    except FileNotFoundError:
        return False
    want = origin.stat()
    if have.st_size != want.st_size:
        return False
    return have.st_mtime_ns == want.st_mtime_ns or filecmp.cmp(origin, target, shallow=False)
