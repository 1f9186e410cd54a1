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

from evoke_proxy.server_build.build import BuildSpec, build_spec, ensure_server, n_cores, prepare
from evoke_proxy.server_build.cache import cache_dir, locked
from evoke_proxy.server_build.cmake import BuildTree, Progress, build_server
from evoke_proxy.server_build.fetch import pristine_source
from evoke_proxy.server_build.series import patches_dir
from evoke_proxy.server_build.toolchain import find_toolchain

_INCLUDES = ("src", "include", "ggml/include", "common", "vendor", "tools/server", "tools/mtmd")
_HEADERS = ("*.h", "*.hpp")
# Directories of the patched source in which our own files are, by the start of a file's name.
_HOMES = {"llama": "src", "server": "tools/server"}


@dataclass(frozen=True)
class NativeLibraries:
    """What a test program of the patched server is compiled and linked with.

    Attributes:
        key: Differs between any two builds of the libraries.
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


def native_libraries() -> NativeLibraries:
    """Returns the libraries of the patched server; builds them if they are not kept.

    They are copied from the build tree if it has the patched source, which takes a second. If not,
    the tree is built from it again, which takes minutes.
    """
    cache, tools = cache_dir(), find_toolchain()
    spec = build_spec(True, tools, None, patches_dir(), cache)
    root = cache / "tests" / f"libraries-{spec.key}"
    if not root.is_dir():
        _keep(spec, root, cache)
    return NativeLibraries(spec.key, root, spec.tools.libraries)


def _keep(spec: BuildSpec, root: Path, cache: Path) -> None:
    ensure_server()
    progress = Progress(sys.stderr)
    tree = BuildTree(cache / "trees" / spec.tree_key)
    with locked(cache, lambda pid: progress.say(f"waiting for the build of process {pid}")):
        if root.is_dir():
            return
        if not _is_patched(tree):
            prepare(spec, pristine_source(spec.pin, cache, progress.say), tree)
            progress.begin("building the patched server's libraries for the tests")
            build_server(tree, spec.tools, n_cores(), progress)
        _copy(tree, root)


def _is_patched(tree: BuildTree) -> bool:
    """Whether the tree was built from our sources as they are now."""
    return (tree.build / "src/libllama.a").exists() and all(
        (copy := tree.source / _HOMES[path.name.split("-")[0]] / path.name).exists()
        and copy.read_bytes() == path.read_bytes()
        for path in (patches_dir() / "src").iterdir()
    )


def _copy(tree: BuildTree, root: Path) -> None:
    """Copies libraries and headers of the tree to `root` in one step; deletes earlier copies."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=".libraries-") as scratch:
        draft = Path(scratch) / "draft"
        for name in _INCLUDES:
            for pattern in _HEADERS:
                _copy_files(tree.root, draft, f"src/{name}/**/{pattern}")
        _copy_files(tree.root, draft, "build/**/lib*.a")
        for earlier in root.parent.glob("libraries-*"):
            shutil.rmtree(earlier, ignore_errors=True)
        os.rename(draft, root)


def _copy_files(origin: Path, target: Path, pattern: str) -> None:
    for path in origin.glob(pattern):
        copy = target / path.relative_to(origin)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


if __name__ == "__main__":
    native_libraries()
