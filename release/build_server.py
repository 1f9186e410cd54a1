"""Compiles the patched llama-server for every x86-64 CPU into release/server, for its wheel.

ggml is built with its CPU code as libraries, one for each level of instructions, and loads the best
one at start (GGML_BACKEND_DL, GGML_CPU_ALL_VARIANTS). Programs that repair wheels do not see
libraries that are loaded this way, so each is copied here by name, with those of the compiler.
The licences of all that is compiled in are copied to release/server/licenses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from evoke_proxy.server_build.build import build_spec, n_cores, prepare
from evoke_proxy.server_build.cache import cache_dir, locked
from evoke_proxy.server_build.cmake import BuildTree, Progress, build_server
from evoke_proxy.server_build.fetch import pristine_source
from evoke_proxy.server_build.series import patches_dir
from evoke_proxy.server_build.toolchain import find_toolchain

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "release/server/evoke_proxy_server"
LICENCES = ROOT / "release/server/licenses"
FLAGS = (
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_NATIVE=OFF",
    "-DGGML_BACKEND_DL=ON",
    "-DGGML_CPU_ALL_VARIANTS=ON",
    # ggml's own threads: libgomp would be one more library.
    "-DGGML_OPENMP=OFF",
    "-DOPENSSL_USE_STATIC_LIBS=ON",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
)
# Libraries of the compiler that the wheel contains. Everything else that is needed is glibc.
_COMPILER = re.compile(r"lib(stdc\+\+|gcc_s)\.so\.\d+")
_GLIBC = re.compile(r"lib(c|m|dl|rt|pthread|resolv)\.so\.\d+|ld-linux-x86-64\.so\.2")
# Uses AMX, which GCC 12 compiles wrongly; see `server_build.toolchain`. The next lower one is used.
_LEFT_OUT = ("sapphirerapids",)


def main() -> int:
    """Build, and copy the program and its libraries into the package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=n_cores(), help="parallel compilers")
    arguments = parser.parse_args()
    tools, cache = find_toolchain().with_flags(*FLAGS), cache_dir()
    spec = build_spec(True, tools, None, patches_dir(), cache)
    progress = Progress(sys.stderr)
    with locked(cache, lambda pid: progress.say(f"waiting for the build of process {pid}")):
        source = pristine_source(spec.pin, cache, progress.say)
        tree = BuildTree(cache / "trees" / spec.tree_key)
        prepare(spec, source, tree)
        progress.begin(f"building llama-server for all CPUs (-j{arguments.jobs})")
        server = build_server(tree, tools, arguments.jobs, progress)
        collect(server, PACKAGE / "bin")
        collect_licences(source, LICENCES)
    stamp = {
        "series": spec.series.digest,
        "pin": spec.pin.sha256,
        "commit": spec.pin.commit,
        "flags": list(FLAGS),
        "compiler": tools.compiler,
    }
    (PACKAGE / "bin/stamp.json").write_text(json.dumps(stamp, indent=2) + "\n", "utf-8")
    return 0


def collect(server: Path, target: Path) -> None:
    """Copy a program and every library that it needs or may load into an empty folder."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    variants = [
        path
        for path in sorted(server.parent.glob("libggml-cpu-*.so"))
        if not path.stem.endswith(_LEFT_OUT)
    ]
    if len(variants) < 5:
        raise SystemExit(f"only {len(variants)} variants of the CPU code were built")
    todo, done = [server, *variants], set[str]()
    while todo:
        path = todo.pop()
        if path.name in done:
            continue
        done.add(path.name)
        copy = target / path.name
        shutil.copy(path, copy)
        subprocess.run(["strip", "--strip-unneeded", str(copy)], check=True)
        for name in needed(path):
            if _COMPILER.fullmatch(name):
                todo.append(_of_compiler(name))
            elif not _GLIBC.fullmatch(name):
                todo.append(server.parent / name)  # raises if there is none: it must be static
    environment = {"PATH": "/nonexistent", "HOME": os.devnull}
    subprocess.run([target / server.name, "--version"], check=True, env=environment)


def collect_licences(source: Path, target: Path) -> None:
    """Copy the licences of llama.cpp, its libraries, the patches, OpenSSL and the compiler's."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    files = {
        "evoke-proxy": ROOT / "LICENSE",
        "patches": ROOT / "patches/LICENSE",
        "llama.cpp": source / "LICENSE",
        # Those of Debian and Ubuntu, where this is built.
        "openssl": Path("/usr/share/doc/libssl-dev/copyright"),
        "gcc": Path("/usr/share/doc/libstdc++6/copyright"),
    }
    for path in sorted((source / "licenses").glob("LICENSE-*")):
        files[path.name.removeprefix("LICENSE-")] = path
    # Libraries without such a file are in the public domain.
    for path in sorted((source / "vendor").rglob("LICENSE*")):
        files[path.parent.name] = path
    for name, path in files.items():
        shutil.copyfile(path, target / f"{name}.txt")


def needed(path: Path) -> list[str]:
    """Return the names of the libraries that a program or library is linked to."""
    shown = subprocess.run(
        ["readelf", "--dynamic", "--wide", str(path)], check=True, capture_output=True, text=True
    )
    return re.findall(r"\(NEEDED\).*\[(.+)\]", shown.stdout)


def _of_compiler(name: str) -> Path:
    """Return the file of a library of the compiler, under the name that programs look for."""
    shown = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
    path = Path(shown.stdout.strip())
    if not path.is_file():
        raise SystemExit(f"{name} of the compiler was not found")
    return path


if __name__ == "__main__":
    sys.exit(main())
