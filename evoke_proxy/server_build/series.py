"""Applies the patch series to llama.cpp, and keeps the compiled tree equal to the result.

A series is applied to copies of the files that it changes, with exact context. Only if it applies
completely is the compiled tree updated, and only files whose content differs are written there:
ninja and make decide by modification times, so the stock and the patched server can share a build
tree. What was applied is not recorded. The tree is compared with its target each time, so that the
next run repairs an incomplete update.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError
from .fetch import PINS

# The directory of llama.cpp in which one of our C++ files is compiled, by the first word of its
# name.
SOURCE_HOMES = {"llama": "src", "server": "tools/server"}
_SOURCE_SUFFIXES = (".h", ".cpp")


@dataclass(frozen=True, slots=True)
class Series:
    """A patch series.

    Attributes:
        patches: The numbered patches, in order.
        sources: Our own C++ files, each with its path in the llama.cpp tree.
    """

    patches: tuple[Path, ...] = ()
    sources: tuple[tuple[Path, str], ...] = ()

    @property
    def digest(self) -> str:
        """A SHA-256 over the names and contents of all files of the series."""
        digest = hashlib.sha256()
        for path in (*self.patches, *(source for source, _ in self.sources)):
            data = path.read_bytes()
            digest.update(f"{path.name}\0{len(data)}\0".encode() + data)
        return digest.hexdigest()


STOCK = Series()


@dataclass(frozen=True, slots=True)
class Overlay:
    """The files that a series changes.

    Attributes:
        directory: Where the changed and new files are.
        files: Their paths, relative to `directory`.
        removed: Paths of deleted files.
    """

    directory: Path
    files: frozenset[str]
    removed: frozenset[str]


def patches_dir() -> Path:
    """Return the directory of the patches: in an installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "_patches"
    return shipped if shipped.is_dir() else package.parent / "patches"


def read_series(directory: Path) -> Series:
    """Read the series in `directory`; BuildError without patches or for a misnamed source.

    The directory of a further pin (`pins/NAME` below another series) has only what differs: its
    patches are added to those of the other series, and replace those with the same number.
    """
    base = directory.parent.parent if directory.parent.name == PINS else directory
    numbered = {path.name[:4]: path for path in (*_patches(base), *_patches(directory))}
    if not numbered:
        raise BuildError(f"no NNNN-*.patch in {directory}: incomplete checkout or installation")
    patches = tuple(path for _, path in sorted(numbered.items()))
    sources = sorted(path for path in base.glob("src/*") if path.suffix in _SOURCE_SUFFIXES)
    return Series(patches, tuple((path, _home(path)) for path in sources))


def _patches(directory: Path) -> Iterator[Path]:
    return directory.glob("[0-9][0-9][0-9][0-9]-*.patch")


def _home(source: Path) -> str:
    home = SOURCE_HOMES.get(source.name.split("-")[0])
    if home is None:
        names = " or ".join(f"{word}-*" for word in SOURCE_HOMES)
        raise BuildError(
            f"{source}: its name must begin with {names}, which selects the upstream directory"
        )
    return f"{home}/{source.name}"


def make_overlay(series: Series, source: Path, scratch: Path, git: str) -> Overlay:
    """Apply `series` to copies of the files it changes, under the empty directory `scratch`.

    `source` is only read. Raises BuildError naming the patch that does not apply.
    """
    names = {name for patch in series.patches for name in touched(patch, scratch, git)}
    for name in names:
        if (source / name).is_file():
            _copy(source / name, scratch / name)
    for own, name in series.sources:
        _copy(own, scratch / name)
        names.add(name)
    for patch in series.patches:
        apply_patch(patch, scratch, git)
    files = frozenset(name for name in names if (scratch / name).is_file())
    return Overlay(scratch, files, frozenset(names) - files)


def _copy(origin: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(origin, target)


def touched(patch: Path, tree: Path, git: str) -> list[str]:
    """Return the files that `patch` changes; BuildError when it cannot be read."""
    done = git_apply(git, tree, "--numstat", "-z", str(patch))
    if done.returncode != 0:
        raise BuildError(f"{patch.name} is not a readable patch:\n{done.stderr.strip()}")
    return [entry.split("\t", 2)[2] for entry in done.stdout.split("\0") if entry]


def apply_patch(patch: Path, tree: Path, git: str) -> bool:
    """Apply one patch to `tree` completely; returns False if `tree` already contains it.

    Raises BuildError, and changes nothing, when it does not apply. The context must match exactly,
    because an inexact match can put a hook into another function; one line of it shows that a
    release contains the change.
    """
    if git_apply(git, tree, "--reverse", "--check", str(patch)).returncode == 0:
        return False
    done = git_apply(git, tree, str(patch))
    if done.returncode != 0:
        if git_apply(git, tree, "-C1", "--reverse", "--check", str(patch)).returncode == 0:
            return False
        raise BuildError(
            f"{patch.name} does not apply to this llama.cpp and was not applied before:\n"
            f"{done.stderr.strip()}\n"
            f"The patches are written for the pin in LLAMA_CPP_VERSION; "
            f"patches/README.md says how to refresh them for another version."
        )
    return True


def git_apply(git: str, tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `git apply` in `tree`, treated as a plain directory."""
    command = [git, "apply", "--whitespace=nowarn", *arguments]
    return subprocess.run(
        command, cwd=tree, env=plain_git_environment(tree), capture_output=True, text=True
    )


def plain_git_environment(tree: Path) -> dict[str, str]:
    """An environment in which git treats `tree` as a plain directory, outside any repository.

    Inside a repository `git apply` skips every file and reports success, and cmake writes that
    repository's commit into the server's version. The user's git settings may also relax how
    patches apply.
    """
    others = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    ceiling = os.pathsep.join({str(tree.parent), str(tree.parent.resolve())})
    quiet = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    return {**others, **quiet, "GIT_CEILING_DIRECTORIES": ceiling}


# Files that a build of the server never reads: two thirds of the bytes of llama.cpp, other build
# trees, and files of other tools.
_SKIPPED_TOP = frozenset({"docs", "models", "media", "out"})
_SKIPPED = frozenset({".git", "__pycache__", "node_modules", ".venv"})


def source_files(root: Path) -> Iterator[str]:
    """Relative paths of the files in a llama.cpp tree that a build may read, sorted."""
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


def mirror(
    source: Path, overlay: Overlay | None, tree: Path, added: Mapping[str, Path] | None = None
) -> int:
    """Make `tree` equal to `source` with the changes of `overlay`; returns how many files changed.

    `added` maps paths in the tree to further files to copy there. The first copy keeps modification
    times, which makes later comparisons cheap. A file that is written later gets the current time,
    so that everything compiled from its earlier content is rebuilt.
    """
    fresh = not tree.exists()
    origins = {name: source / name for name in source_files(source)}
    if overlay is not None:
        origins |= {name: overlay.directory / name for name in overlay.files}
        for name in overlay.removed:
            origins.pop(name, None)
    origins |= added or {}
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
