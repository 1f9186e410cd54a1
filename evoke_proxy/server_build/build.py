"""Builds a llama-server: fetches the source, patches and compiles it, stores it in the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from .cache import cache_dir, finished_server, locked, remove_drafts, store_server
from .cmake import BuildTree, Progress, build_server
from .errors import BuildError
from .fetch import Pin, pristine_source, read_pin
from .series import STOCK, Series, content_hash, make_overlay, mirror, patches_dir, read_series
from .toolchain import Toolchain, find_toolchain
from .ui import built_ui, has_ui, should_build_ui, ui_files

# Hexadecimal digits of a key in the cache.
_KEY_LENGTH = 20
# Minutes of processor time for one build; see `first_build_notice`.
_BUILD_CORE_MINUTES = (8, 20)
_CUDA_CORE_MINUTES = (45, 110)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build a server.

    Attributes:
        backend: One of `toolchain.BACKENDS`; empty for the CPU.
        sanitize: Sanitizer for our own code, "address" or "thread"; empty for none.
        flags: Further flags of cmake.
        source: A llama.cpp checkout to build instead of the pinned source; None for the pin.
        patches: Directory of the patch series and its pin; None for those of this package.
        cache: Directory of the cache; None for `cache_dir()`.
        ui: Whether to embed the web UI if npm can build it. If false, a finished server with the
            UI is used if there is one.
        retry_ui: Whether to try to build the UI even if that failed less than an hour ago.
    """

    backend: str = ""
    sanitize: str = ""
    flags: tuple[str, ...] = ()
    source: Path | None = None
    patches: Path | None = None
    cache: Path | None = None
    ui: bool = True
    retry_ui: bool = False

    @property
    def is_default(self) -> bool:
        """Whether these are the options of the server in the package evoke-proxy-server."""
        chosen = (self.backend, self.sanitize, self.flags, self.source, self.patches)
        return not any(chosen)


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """Everything that a server is built from; it decides the keys in the cache.

    Attributes:
        variant: "stock" or "patched".
        series: The patches to apply; empty for a stock server.
        pin: The pinned llama.cpp.
        source: A checkout to build instead of the pin; None for the pin.
        tools: The compilers and flags.
        key: Name in the cache of the finished server without the web UI.
        tree_key: Name in the cache of the build tree, which the stock and the patched server of the
            same source, flags and machine share.
    """

    variant: str
    series: Series
    pin: Pin
    source: Path | None
    tools: Toolchain
    key: str
    tree_key: str

    def server_key(self, ui: bool) -> str:
        """Name in the cache of the finished server with the web UI, or without it."""
        return _key(self.key, "ui") if ui else self.key


def ensure_server(
    *,
    patched: bool = True,
    options: BuildOptions | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> Path:
    """Return the path of a llama-server, which is built first if it is not in the cache.

    `patched` selects the patched or the stock server. `jobs` is the number of parallel compilers,
    by default one per core. `progress` says whether to report progress to stderr; nothing is
    written to stdout. Raises BuildError when the server cannot be built.
    """
    options = options or BuildOptions()
    if patched and (found := finished_server_path(options)) is not None:
        return found
    spec = _spec_of(patched, options)
    server = _finished(spec, options)
    if server is not None:
        return server
    with open(os.devnull, "w", encoding="utf-8") as silence:
        stream: TextIO = sys.stderr if progress else silence
        return _build(spec, options, jobs or n_cores(), Progress(stream))


def finished_server_path(options: BuildOptions | None = None) -> Path | None:
    """Return the path of the patched server, None if it is not built yet; builds nothing.

    A server that was built on this machine is preferred to the one that the package
    evoke-proxy-server contains. Raises BuildError without either when the build tools are missing,
    because the key of a server depends on them.
    """
    options = options or BuildOptions()
    packaged = packaged_server(options.patches or patches_dir()) if options.is_default else None
    try:
        return _finished(_spec_of(True, options), options) or packaged
    except BuildError:
        if packaged is None:
            raise
        return packaged


def packaged_server(patches: Path, package: str = "evoke_proxy_server") -> Path | None:
    """Return the server that an installed package contains.

    None when it is not installed, or was built from another source or with other patches.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    server = Path(found.origin).with_name("bin") / "llama-server"
    try:
        stamp = json.loads(server.with_name("stamp.json").read_text("utf-8"))
        built_from = (stamp["pin"], stamp["series"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_current = built_from == (read_pin(patches).sha256, read_series(patches).digest)
    return server if is_current and os.access(server, os.X_OK) else None


def _spec_of(patched: bool, options: BuildOptions) -> BuildSpec:
    tools = find_toolchain(options.backend, options.sanitize).with_flags(*options.flags)
    patches = options.patches or patches_dir()
    return build_spec(patched, tools, options.source, patches, options.cache or cache_dir())


def _finished(spec: BuildSpec, options: BuildOptions) -> Path | None:
    cache = options.cache or cache_dir()
    server = finished_server(cache, spec.server_key(ui=True))
    if server is None and not _wants_ui(spec, options):
        server = finished_server(cache, spec.server_key(ui=False))
    return server


def build_spec(
    patched: bool, tools: Toolchain, source: Path | None, patches: Path, cache: Path
) -> BuildSpec:
    """Compute the specification of a server and its keys in the cache."""
    pin = read_pin(patches)
    series = read_series(patches) if patched else STOCK
    origin, content = _identity(pin, source)
    tools = tools.with_flags(f"-DLLAMA_BUILD_COMMIT={'source' if source else pin.commit}")
    machine = (*tools.flags, tools.compiler, tools.cpu)
    return BuildSpec(
        variant="patched" if patched else "stock",
        series=series,
        pin=pin,
        source=source,
        tools=tools,
        key=_key(content, series.digest, *machine),
        tree_key=_key(origin, tools.generator, str(cache), *machine),
    )


def _identity(pin: Pin, source: Path | None) -> tuple[str, str]:
    """Return two keys of the source; only the second one changes with its content."""
    if source is None:
        return pin.sha256, pin.sha256
    require_checkout(source)
    return str(source.resolve()), content_hash(source)


def require_checkout(source: Path) -> None:
    """Raise BuildError unless the directory `source` is a llama.cpp checkout with the server."""
    if not (source / "tools" / "server" / "CMakeLists.txt").is_file():
        raise BuildError(f"{source} is not a llama.cpp checkout: it has no tools/server")


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_LENGTH]


def n_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _build(spec: BuildSpec, options: BuildOptions, jobs: int, progress: Progress) -> Path:
    cache = options.cache or cache_dir()

    def report_wait(pid: str) -> None:
        progress.say(f"another build is running (started by process {pid}): waiting for it")

    with locked(cache, report_wait):
        remove_drafts(cache)
        source = spec.source or pristine_source(spec.pin, cache, progress.say)
        ui = built_ui(source, cache, progress) if _wants_ui(spec, options) else None
        server = finished_server(cache, spec.server_key(ui is not None))
        if server is not None:
            return server
        started = time.monotonic()
        tree = BuildTree(cache / "trees" / spec.tree_key)
        for note in spec.tools.notes:
            progress.say(note)
        if not tree.build.exists():
            progress.say(first_build_notice(jobs, n_cores(), options.backend))
        prepare(spec, source, tree, ui)
        progress.begin(f"building llama-server ({spec.variant}, -j{jobs})")
        built = build_server(tree, spec.tools, jobs, progress)
        _check_starts(built, spec)
        stamp = _stamp(spec, time.monotonic() - started) | {"ui": ui is not None}
        return store_server(cache, spec.server_key(ui is not None), built, stamp)


def _wants_ui(spec: BuildSpec, options: BuildOptions) -> bool:
    if not options.ui or not (spec.source is None or has_ui(spec.source)):
        return False
    return options.retry_ui or should_build_ui(options.cache or cache_dir())


def first_build_notice(jobs: int, cores: int, backend: str = "") -> str:
    """Return a message with the expected duration of the first build on this machine.

    It is derived from the measured processor time of one build with g++ 12: 8 minutes on a recent
    server core, 20 minutes on a slow or shared one. With CUDA 13 the kernels for one architecture
    took 36 minutes more on a recent core; for a slow one the same ratio is assumed.
    """
    parallel = min(jobs, cores)
    least, most = _CUDA_CORE_MINUTES if backend == "cuda" else _BUILD_CORE_MINUTES
    low, high = (max(1, round(minutes / parallel)) for minutes in (least, most))
    return (
        f"compiling llama.cpp takes {least} to {most} minutes of"
        f" processor time, once: {low} to {high} minutes with {_count(parallel, 'core')} of this"
        f" machine, longer while other programs use them"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def prepare(spec: BuildSpec, source: Path, tree: BuildTree, ui: Path | None = None) -> None:
    """Make the tree equal to the patched source, with the finished web UI in the directory `ui`.

    Raises BuildError, and changes nothing, when a patch does not apply.
    """
    added = ui_files(ui) if ui is not None else {}
    tree.root.mkdir(parents=True, exist_ok=True)
    if not spec.series.patches:
        mirror(source, None, tree.source, added)
        return
    with tempfile.TemporaryDirectory(dir=tree.root, prefix=".overlay-") as scratch:
        overlay = make_overlay(spec.series, source, Path(scratch), spec.tools.git)
        mirror(source, overlay, tree.source, added)


def _check_starts(server: Path, spec: BuildSpec) -> None:
    """Raise BuildError when the new server cannot print its version."""
    if {"-DGGML_CUDA=ON", "-DGGML_HIP=ON"} & set(spec.tools.flags):
        return  # needs the driver, which a build machine may lack
    done = subprocess.run([server, "--version"], capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise BuildError(
            f"the new {server} does not start (exit status {done.returncode}):\n"
            f"{(done.stdout + done.stderr).strip()}"
        )


def _stamp(spec: BuildSpec, seconds: float) -> dict[str, object]:
    return {
        "variant": spec.variant,
        "source": str(spec.source or spec.pin.requirement),
        "commit": None if spec.source else spec.pin.commit,
        "patches": [path.name for path in spec.series.patches],
        "series": spec.series.digest,
        "flags": list(spec.tools.flags),
        "compiler": spec.tools.compiler,
        "cpu": spec.tools.cpu,
        "build_seconds": round(seconds, 1),
    }
