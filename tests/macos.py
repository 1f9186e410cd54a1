"""Compiles our C++ and the upstream files with our hooks for macOS, with zig as the compiler.

zig contains the headers of macOS. The objects are not linked, because that needs all of llama.cpp
compiled, and nothing is run. Metal and Accelerate are left out: zig contains no frameworks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from evoke_proxy.server_build.build import BuildSpec, build_spec, prepare  # noqa: E402
from evoke_proxy.server_build.cache import cache_dir  # noqa: E402
from evoke_proxy.server_build.cmake import BuildTree  # noqa: E402
from evoke_proxy.server_build.errors import BuildError  # noqa: E402
from evoke_proxy.server_build.fetch import pristine_source  # noqa: E402
from evoke_proxy.server_build.series import git_apply, patches_dir  # noqa: E402
from evoke_proxy.server_build.toolchain import find_toolchain  # noqa: E402

ZIG = "ziglang==0.17.1"
PROCESSORS = ("aarch64", "x86_64")
_INCLUDES = (
    *("src", "include", "ggml/include", "common", "vendor", "vendor/cpp-httplib"),
    *("tools/server", "tools/mtmd", "."),
)
_FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror=return-type", "-c")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles for each processor; returns 0 when every file compiles without a warning of ours."""
    args = _parser().parse_args(arguments)
    try:
        spec = build_spec(True, find_toolchain(), None, patches_dir(), cache_dir())
        tree = BuildTree(cache_dir() / "macos")
        prepare(spec, pristine_source(spec.pin, cache_dir(), print), tree)
        zig = installed_zig(cache_dir() / "zig")
        write_ui_header(tree.source, tree.root / "generated")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    ours = sorted(place for _, place in spec.series.sources if place.endswith(".cpp"))
    jobs = [
        (p, f) for p in args.processor or PROCESSORS for f in [*ours, *hooked_files(spec, tree)]
    ]
    failed = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = pool.map(lambda job: compiled(zig, tree.source, *job), jobs)
        for (processor, file), (status, output) in zip(jobs, results, strict=True):
            warned = any(is_our_warning(line, ours) for line in output.splitlines())
            if status != 0 or warned:
                failed += 1
                print(f"FAILED {processor} {file}\n{output}")
            else:
                print(f"{processor} {file}", flush=True)
    print(f"{len(jobs) - failed} objects compiled, {failed} failed")
    return 1 if failed else 0


def is_our_warning(line: str, ours: Sequence[str]) -> bool:
    """Whether a line of the compiler is a warning in one of our files or its header."""
    stem = line.partition(":")[0].rpartition(".")[0]
    return " warning: " in line and any(stem == file.removesuffix(".cpp") for file in ours)


def hooked_files(spec: BuildSpec, tree: BuildTree) -> list[str]:
    """Returns the C++ files of upstream that the patches change."""
    files = {
        line.split("\t")[2]
        for patch in spec.series.patches
        for line in git_apply("git", tree.source, "--numstat", str(patch)).stdout.splitlines()
    }
    return sorted(file for file in files if file.endswith(".cpp"))


def installed_zig(folder: Path) -> Path:
    """Returns a Python that has zig, in a virtual environment of its own."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", ZIG], check=True)
    return python


def write_ui_header(source: Path, folder: Path) -> None:
    """Writes the header ui.h of a server without the web UI, as the build of llama.cpp does."""
    values = {
        "UI_SOURCE_DIR": source / "tools/ui",
        "UI_BINARY_DIR": folder,
        "LLAMA_SOURCE_DIR": source,
        "HF_ENABLED": "OFF",
        "BUILD_UI": "OFF",
        "LLAMA_UI_GZIP": "OFF",
    }
    definitions = [f"-D{name}={value}" for name, value in values.items()]
    script = source / "scripts/ui-assets.cmake"
    done = subprocess.run(
        ["cmake", *definitions, "-P", str(script)], capture_output=True, text=True
    )
    if not (folder / "ui.h").exists():
        raise BuildError(f"{script} wrote no ui.h: {done.stderr}")


def compiled(zig: Path, source: Path, processor: str, file: str) -> tuple[int, str]:
    """Compiles one file; returns the exit status and what the compiler prints."""
    target = source.parent / processor / f"{file.replace('/', '-')}.o"
    target.parent.mkdir(exist_ok=True)
    command = [str(zig), "-m", "ziglang", "c++", "-target", f"{processor}-macos", *_FLAGS]
    generated = (
        ["-I../generated"] if '#include "ui.h"' in (source / file).read_text("utf-8") else []
    )
    command += [*(f"-I{name}" for name in _INCLUDES), *generated, file, "-o", str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    return done.returncode, done.stderr


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tests/macos.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("processor", nargs="*", help=f"of {', '.join(PROCESSORS)}; default: all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
