"""Keeps the libraries of the patched server, for test programs that are linked with them.

The stock server is built in the same tree later and replaces them there, so `make build` runs this
between the two builds: `python tests/contract/native_libraries.py`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from evoke_proxy.server_build.build import BuildSpec, build_spec, n_cores, prepare
from evoke_proxy.server_build.cache import cache_dir, locked
from evoke_proxy.server_build.cmake import BuildTree, Progress, build_server
from evoke_proxy.server_build.fetch import pristine_source
from evoke_proxy.server_build.series import patches_dir
from evoke_proxy.server_build.toolchain import find_toolchain
from evoke_proxy.server_build.ui import built_ui, should_build_ui

_INCLUDES = ("src", "include", "ggml/include", "common", "vendor", "tools/server", "tools/mtmd")
_HEADERS = ("*.h", "*.hpp")
# Copies that are kept, each of 50 MB.
_N_KEPT = 3


@dataclass(frozen=True)
class NativeLibraries:
    """What a test program of the patched server is compiled and linked with.

    Attributes:
        key: Names what the libraries are built from: source, patches, compiler and flags.
        root: The directory with the libraries and headers.
        system: Further libraries, as options of the linker.
    """

    key: str
    root: Path
    system: tuple[str, ...]

    @property
    def includes(self) -> list[str]:
        """The directories of headers, as options of the compiler."""
        return [f"-I{self.root / 'src' / name}" for name in _INCLUDES]

    def linked(self, common: bool) -> list[Path]:
        """The libraries in the order of the linker; `common` adds those of `common/`."""
        build = self.root / "build"
        found = [build / "src/libllama.a", *sorted(build.glob("ggml/**/lib*.a"))]
        found += sorted(build.glob("vendor/**/lib*.a"))
        return found + (sorted(build.glob("common/lib*.a")) if common else [])


def native_libraries() -> NativeLibraries | None:
    """Returns the libraries of the patched server; None if they are not kept."""
    spec, root = _kept()
    return NativeLibraries(spec.key, root, spec.tools.libraries) if root.is_dir() else None


def _kept() -> tuple[BuildSpec, Path]:
    cache = cache_dir()
    spec = build_spec(True, find_toolchain(), None, patches_dir(), cache)
    return spec, cache / "tests" / f"libraries-{spec.key}"


def keep_native_libraries() -> None:
    """Keeps the libraries of the patched server, if they are not kept yet.

    If the latest build in the tree was that of the patched server, this takes seconds. If not, the
    tree is built from the patched source again, which takes minutes.
    """
    spec, root = _kept()
    if root.is_dir():
        return
    cache = cache_dir()
    progress = Progress(sys.stderr)
    with locked(cache, lambda pid: progress.say(f"waiting for the build of process {pid}")):
        if root.is_dir():
            return
        source = pristine_source(spec.pin, cache, progress.say)
        tree = BuildTree(cache / "trees" / spec.tree_key)
        # As for the server, which would be linked again without the web UI.
        ui = built_ui(source, cache, progress) if should_build_ui(cache) else None
        prepare(spec, source, tree, ui)
        progress.begin("libraries of the patched server, for tests")
        build_server(tree, spec.tools, n_cores(), progress)
        _copy(tree, root)


def _copy(tree: BuildTree, root: Path) -> None:
    """Copies libraries and headers of the tree to `root` in one step; deletes old copies."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=".new-") as scratch:
        draft = Path(scratch) / "draft"
        for name in _INCLUDES:
            for pattern in _HEADERS:
                _copy_files(tree.root, draft, f"src/{name}/**/{pattern}")
        _copy_files(tree.root, draft, "build/**/lib*.a")
        os.rename(draft, root)
    # Other checkouts may have other patches.
    latest_first = sorted(root.parent.glob("libraries-*"), key=lambda kept: -kept.stat().st_mtime)
    for earlier in latest_first[_N_KEPT:]:
        shutil.rmtree(earlier, ignore_errors=True)


def _copy_files(origin: Path, target: Path, pattern: str) -> None:
    for path in origin.glob(pattern):
        copy = target / path.relative_to(origin)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


if __name__ == "__main__":
    keep_native_libraries()
