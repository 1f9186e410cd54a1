"""Compiles C++ test programs and links them with the libraries of the patched server."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from llama import MODEL
from native_libraries import native_libraries

from evoke_proxy.server_build.cache import cache_dir
from evoke_proxy.server_build.series import patches_dir
from evoke_proxy.server_build.toolchain import compiler_accepts

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def run(source: Path, folder: Path) -> str:
    """Returns what the program prints for the bundled model."""
    return execute(build(source, folder), str(MODEL))


def run_sanitized(source: Path, sources: Sequence[str], folder: Path) -> str:
    """Compiles a program with files of the patches and runs it.

    All of it is compiled with sanitizers if the compiler has them.

    The program gets the path of an empty folder. Returns what it prints.
    """
    own = [patches_dir() / "src" / name for name in sources]
    flags = SANITIZERS if _links_sanitizers() else ()
    program = build(source, folder, own, ("-O1", "-g1", *flags))
    data = folder / "data"
    data.mkdir(mode=0o700)
    return execute(program, str(data))


def build(
    source: Path, folder: Path, sources: Sequence[Path] = (), flags: Sequence[str] = ()
) -> Path:
    """Compiles a program in `folder`, with the libraries of the patched server.

    A program whose sources, headers, libraries and command are those of an earlier test run is
    copied from the cache instead. Skips the test if the environment names another server to test.
    """
    if named := os.environ.get("EVOKE_PATCHED_SERVER"):
        pytest.skip(f"the libraries of {named} are not at hand")
    native = native_libraries()
    assert native is not None, "run `make build`: it keeps the libraries that this test needs"
    libraries = native.linked(common=bool(sources))
    command = ["g++", "-std=c++17", *flags, *native.includes]
    program = folder / source.stem
    linked = ["-Wl,--start-group", *map(str, libraries), "-Wl,--end-group"]
    linked += ["-fopenmp", "-lpthread", "-ldl", *native.system]
    texts = [source, *sources, *sorted(source.parents[1].glob("*/*.h"))]
    key = _digest([*command, *linked, native.key], texts, libraries)
    kept = cache_dir() / "tests" / f"{source.parent.name}-{source.stem}-{key}"
    if not kept.exists():
        objects = [str(_object(path, tuple(command))) for path in sources]
        subprocess.run([*command, str(source), *objects, "-o", str(program), *linked], check=True)
        _keep(program, kept)
    else:
        shutil.copy(kept, program)
    return program


def _digest(words: Sequence[str], texts: Sequence[Path], libraries: Sequence[Path]) -> str:
    """Returns a hash of everything that a program is made of.

    A library is hashed by its size and time: it changes only when a build writes it.
    """
    found = hashlib.sha256(_compiler_version())
    for word in words:
        found.update(word.encode() + b"\0")
    for path in texts:
        found.update(path.read_bytes() + b"\0")
    for path in libraries:
        found.update(f"{path.stat().st_size} {path.stat().st_mtime_ns}\0".encode())
    return found.hexdigest()[:20]


@functools.cache
def _compiler_version() -> bytes:
    return subprocess.run(["g++", "-v"], capture_output=True, check=True).stderr


def _keep(program: Path, kept: Path) -> None:
    """Puts a program into the cache and deletes its earlier versions there."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_name(f".{os.getpid()}-{kept.name}")
    shutil.copy(program, part)
    for earlier in kept.parent.glob(f"{kept.name.rpartition('-')[0]}-*"):
        earlier.unlink(missing_ok=True)
    part.rename(kept)


@functools.cache
def _object(source: Path, command: tuple[str, ...]) -> Path:
    """Returns the object file of a source, compiled once for all programs of the test run."""
    compiled = Path(_objects().name) / f"{source.stem}.o"
    subprocess.run([*command, "-c", str(source), "-o", str(compiled)], check=True)
    return compiled


@functools.cache
def _objects() -> tempfile.TemporaryDirectory[str]:
    """A folder that is deleted at the end of the test run."""
    return tempfile.TemporaryDirectory(prefix="evoke-objects-")


def execute(program: Path, argument: str) -> str:
    """Returns the output of the program; fails with it when the exit status is not 0."""
    done = subprocess.run([program, argument], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def _links_sanitizers() -> bool:
    """Whether the compiler has the sanitizers and their libraries."""
    if not compiler_accepts("g++", SANITIZERS):
        return False
    command = ["g++", *SANITIZERS, "-x", "c++", "-", "-o", "/dev/null"]
    done = subprocess.run(command, input=b"int main() {}", stderr=sys.stderr)
    return done.returncode == 0
