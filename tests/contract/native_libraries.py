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

    If the latest build in the tree was that of the patched server, this takes seconds. If not, the
    tree is built from the patched source again, which takes minutes.
    """
    cache, tools = cache_dir(), find_toolchain()
    spec = build_spec(True, tools, None, patches_dir(), cache)
    root = cache / "tests" / f"libraries-{spec.key}"
    if not root.is_dir():
        _keep(spec, root, cache)
    return NativeLibraries(spec.key, root, spec.tools.libraries)


def _keep(spec: BuildSpec, root: Path, cache: Path) -> None:
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
