"""From nothing to a llama-server executable: fetch, patch, compile, keep."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from .cache import cache_dir, finished_server, locked, store_server, sweep
from .cmake import BuildTree, Progress, build_server
from .errors import BuildError
from .fetch import Pin, pristine_source, read_pin
from .series import STOCK, Series, content_hash, make_overlay, mirror, patches_dir, read_series
from .toolchain import Toolchain, find_toolchain

_KEY_LENGTH = 20
_BUILD_CORE_MINUTES = (8, 20)


@dataclass(frozen=True, slots=True)
class Order:
    """Which server is wanted: the key names the finished server, `tree_key` the objects it shares.

    Stock and patched servers of one source, flags and machine share a tree.
    """

    variant: str
    series: Series
    pin: Pin
    source: Path | None
    tools: Toolchain
    key: str
    tree_key: str


def ensure_server(
    *,
    patched: bool = True,
    cuda: bool = False,
    sanitize: str = "",
    flags: tuple[str, ...] = (),
    source: Path | None = None,
    jobs: int | None = None,
    progress: bool = True,
    patches: Path | None = None,
    cache: Path | None = None,
) -> Path:
    """The path of a finished llama-server, built first if the cache holds none.

    `source` builds another llama.cpp checkout instead of the pin. `sanitize` ("address"
    or "thread") builds what is ours and around it with that sanitizer, `flags` are more of cmake's:
    each in a tree of its own.
    `progress` writes to stderr; nothing is ever written to stdout. Raises BuildError with a message
    for a person.
    """
    cache = cache or cache_dir()
    tools = find_toolchain(cuda, sanitize).with_flags(*flags)
    order = place_order(patched, tools, source, patches or patches_dir(), cache)
    found = finished_server(cache, order.key)
    if found is not None:
        return found
    with open(os.devnull, "w", encoding="utf-8") as silence:
        stream: TextIO = sys.stderr if progress else silence
        return _build(order, cache, jobs or _cores(), Progress(stream))


def place_order(
    patched: bool, tools: Toolchain, source: Path | None, patches: Path, cache: Path
) -> Order:
    """Everything that decides the bytes of the server, and the keys made of it."""
    pin = read_pin(patches)
    series = read_series(patches) if patched else STOCK
    origin, content = _identity(pin, source)
    tools = tools.with_flags(f"-DLLAMA_BUILD_COMMIT={'source' if source else pin.commit}")
    machine = (*tools.flags, tools.compiler, tools.cpu)
    return Order(
        variant="patched" if patched else "stock",
        series=series,
        pin=pin,
        source=source,
        tools=tools,
        key=_key(content, series.digest, *machine),
        tree_key=_key(origin, tools.generator, str(cache), *machine),
    )


def _identity(pin: Pin, source: Path | None) -> tuple[str, str]:
    """What stays the same over edits of the source, and what does not."""
    if source is None:
        return pin.sha256, pin.sha256
    if not (source / "tools" / "server" / "CMakeLists.txt").is_file():
        raise BuildError(f"{source} is not a llama.cpp checkout: it has no tools/server")
    return str(source.resolve()), content_hash(source)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_LENGTH]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _build(order: Order, cache: Path, jobs: int, progress: Progress) -> Path:
    def waiting(holder: str) -> None:
        progress.say(f"another build is running (started by process {holder}): waiting for it")

    with locked(cache, waiting):
        found = finished_server(cache, order.key)
        if found is not None:
            return found
        sweep(cache)
        begun = time.monotonic()
        source = order.source or pristine_source(order.pin, cache, progress.say)
        tree = BuildTree(cache / "trees" / order.tree_key)
        if not tree.build.exists():
            progress.say(first_build_notice(jobs, _cores()))
        prepare(order, source, tree)
        progress.begin(f"building llama-server ({order.variant}, -j{jobs})")
        built = build_server(tree, order.tools, jobs, progress)
        _check_starts(built, order)
        return store_server(cache, order.key, built, _stamp(order, time.monotonic() - begun))


def first_build_notice(jobs: int, cores: int) -> str:
    """What the first build costs on this machine, before anything of it is measured.

    Measured processor time of one build with g++ 12: 8 minutes on a recent server core, 20 on a
    slow or shared one. The progress lines estimate the rest from the speed measured so far.
    """
    at_once = min(jobs, cores)
    low, high = (max(1, round(minutes / at_once)) for minutes in _BUILD_CORE_MINUTES)
    return (
        f"compiling llama.cpp takes {_BUILD_CORE_MINUTES[0]} to {_BUILD_CORE_MINUTES[1]} minutes of"
        f" processor time, once: {low} to {high} minutes with {_count(at_once, 'core')} of this"
        f" machine, longer while other programs use them"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def prepare(order: Order, source: Path, tree: BuildTree) -> None:
    """Makes the tree hold exactly the ordered source; nothing is edited if a patch fails."""
    tree.root.mkdir(parents=True, exist_ok=True)
    if not order.series.patches:
        mirror(source, None, tree.source)
        return
    with tempfile.TemporaryDirectory(dir=tree.root, prefix=".overlay-") as scratch:
        overlay = make_overlay(order.series, source, Path(scratch), order.tools.git)
        mirror(source, overlay, tree.source)


def _check_starts(server: Path, order: Order) -> None:
    """A server that cannot even tell its version must not reach the cache."""
    if "-DGGML_CUDA=ON" in order.tools.flags:
        return  # needs the driver, which a build machine may lack
    done = subprocess.run([server, "--version"], capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise BuildError(
            f"the new {server} does not start (exit status {done.returncode}):\n"
            f"{(done.stdout + done.stderr).strip()}"
        )


def _stamp(order: Order, seconds: float) -> dict[str, object]:
    return {
        "variant": order.variant,
        "source": str(order.source or order.pin.requirement),
        "commit": None if order.source else order.pin.commit,
        "patches": [path.name for path in order.series.patches],
        "series": order.series.digest,
        "flags": list(order.tools.flags),
        "compiler": order.tools.compiler,
        "cpu": order.tools.cpu,
        "build_seconds": round(seconds, 1),
    }
