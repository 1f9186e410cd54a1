"""Runs the tests on server builds that the CI does not build, and records the results.

A target names the build flags of llama-server and the tests that depend on them. Each file of tests
is one run, with servers of its own. The results are written to tests/results/TARGET.json with the
command, the commit and the machine, and are committed with the change that they were run for. A
later run of some files replaces their results and leaves those of the others, as long as the
servers are built from the same C++ code. EVOKE_PATCHED_SERVER and EVOKE_STOCK_SERVER name servers
that were built elsewhere, for a machine without compilers.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.record import checkout, machine  # noqa: E402
from evoke_proxy.demo.processes import free_port, serving  # noqa: E402
from evoke_proxy.models import bundled_model  # noqa: E402
from evoke_proxy.server_build import BuildError, BuildOptions, ensure_server  # noqa: E402
from evoke_proxy.server_build.cache import cache_dir  # noqa: E402
from evoke_proxy.server_build.fetch import read_pin  # noqa: E402
from evoke_proxy.server_build.series import patches_dir, read_series  # noqa: E402

RESULTS = ROOT / "tests" / "results"
# The time limit of a test in pyproject.toml.
TEST_S = 300
# Tests that copy K/V rows or decode around them; the others do not depend on the backend.
BLOCKS = tuple(
    f"tests/contract/test_{name}.py"
    for name in "adopt compact disk errors exact follow_up live memories modes probe stream".split()
)


@dataclass(frozen=True)
class Target:
    """One row of the matrix: how the servers are built and started, and what is run on them."""

    about: str
    flags: tuple[str, ...] = ()
    sanitizer: str = ""
    programs: Mapping[str, str] = field(default_factory=dict)
    """Programs that the build needs, each with the Debian packages that contain it."""
    settings: tuple[str, ...] = ()
    """cmake variables that are taken from the environment if they are set there."""
    server_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    tests: tuple[str, ...] = ("tests/contract",)
    rpc: bool = False
    """Whether each server gets a process that computes for it (tests/rpc_launcher.py)."""
    kv_buffer: str = ""
    """How the name of every buffer with K/V begins; other buffers end the run."""
    stock: bool = True
    """Whether the tests need the unpatched server, too."""
    time_factor: int = 1
    """How many times as long as usual a test and each request in it may take."""
    command: tuple[str, ...] = ()
    """What is run instead of tests."""


TARGETS = {
    "avx2": Target(
        about="a processor with AVX2 only: sums round differently from one with AVX-512",
        flags=(
            "-DGGML_NATIVE=OFF",
            "-DGGML_AVX2=ON",
            "-DGGML_FMA=ON",
            "-DGGML_F16C=ON",
            "-DGGML_BMI2=ON",
            "-DGGML_AVX512=OFF",
            "-DGGML_AVX_VNNI=OFF",
        ),
    ),
    "tsan": Target(
        about="the thread sanitizer in the code of the patches and in the server around it",
        sanitizer="thread",
        environment={
            "TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1 history_size=4"
            f" suppressions={ROOT}/tests/tsan.supp"
        },
        tests=tuple(f"tests/contract/test_{name}.py" for name in "disk render live random".split()),
        stock=False,
    ),
    "vulkan": Target(
        about="K/V in device buffers of the Vulkan backend, on Mesa's software driver"
        " (headers older than 1.3.275: Vulkan_INCLUDE_DIR names newer ones)",
        settings=("Vulkan_INCLUDE_DIR",),
        flags=("-DGGML_VULKAN=ON",),
        programs={
            "glslc": "glslc libvulkan-dev spirv-headers mesa-vulkan-drivers",
        },
        server_args=("-ngl", "99"),
        environment={"GGML_VK_VISIBLE_DEVICES": "0"},
        tests=BLOCKS,
        kv_buffer="Vulkan0",
        stock=False,
        time_factor=10,
    ),
    "cuda": Target(
        about="K/V in buffers of an NVIDIA GPU (CUDAARCHS names its architecture, CUDACXX nvcc)",
        flags=("-DGGML_CUDA=ON",),
        server_args=("-ngl", "99"),
        tests=BLOCKS,
        kv_buffer="CUDA0",
        stock=False,
    ),
    "rpc": Target(
        about="K/V in buffers of the RPC backend, computed by a server process on this machine",
        flags=("-DGGML_RPC=ON",),
        server_args=("-ngl", "99"),
        tests=BLOCKS,
        rpc=True,
        kv_buffer="RPC0",
        stock=False,
    ),
    "macos": Target(
        about="our C++ and the upstream files with hooks, compiled for macOS with zig, not linked",
        command=("tests/macos.py",),
    ),
    "pins": Target(
        about="the series on other releases of llama.cpp: writes patches/APPLIES.md",
        command=("patches/check.py",),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds one target, runs its tests, writes the result; returns their exit status."""
    args, options = _parser().parse_known_intermixed_args(arguments)
    target = TARGETS[args.target]
    missing = {
        name: packages for name, packages in target.programs.items() if not shutil.which(name)
    }
    if missing:
        names, packages = ", ".join(missing), " ".join(missing.values())
        print(f"missing: {names}; on Debian: sudo apt-get install -y {packages}", file=sys.stderr)
        return 2
    os.environ["EVOKE_CACHE"] = str(_cache_of(args.target))
    command = make_command(args.target, [*args.rest, *options])
    try:
        record = _record(args.target, command, _runs(target, args, options))
    except BuildError as error:
        print(f"test-matrix: {error}", file=sys.stderr)
        return 1
    print(f"{args.target}: exit status {record['exit_status']}, {record['result']}")
    print(f"written: {_result_path(args.target).relative_to(ROOT)}")
    return int(record["exit_status"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tests/matrix.py",
        description=__doc__,
        epilog="targets:\n" + "\n".join(f"  {name:8} {t.about}" for name, t in TARGETS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", choices=TARGETS, metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument(
        "rest",
        nargs="*",
        metavar="TEST",
        help="tests instead of the target's own; options of its command",
    )
    parser.add_argument("--jobs", type=int, default=1, help="files that run side by side (1)")
    return parser


def _cache_of(target: str) -> Path:
    """The target's own build cache, beside the default one: two builds never lock each other.

    Downloads are linked, not fetched again. `EVOKE_CACHE` replaces both.
    """
    if "EVOKE_CACHE" in os.environ:
        return cache_dir()
    shared = cache_dir()
    own = shared.with_name(f"evoke-{target}")
    (own / "downloads").mkdir(parents=True, exist_ok=True)
    for file in (shared / "downloads").glob("*.tar.gz"):
        with contextlib.suppress(OSError):
            os.link(file, own / "downloads" / file.name)
    return own


@dataclass(frozen=True)
class FinishedRun:
    """One finished run: what it ran, its exit status and its output."""

    tests: str
    """The file or folder of tests, with the options that chose some of them."""
    status: int
    lines: tuple[str, ...]
    seconds: float = 0.0
    kv_buffers: tuple[str, ...] = ()
    """The buffers that had K/V; empty where the target does not ask."""
    devices: tuple[str, ...] = ()
    """The devices that computed, by the names that their drivers give; empty where the target
    does not ask."""

    @property
    def closing(self) -> str:
        """The last line of the output that is not empty."""
        return next((line for line in reversed(self.lines) if line.strip()), "")


def _runs(
    target: Target, args: argparse.Namespace, options: Sequence[str]
) -> Iterator[FinishedRun]:
    """Builds the servers and runs the target's command, or each of its files of tests."""
    if target.command:
        command = [*target.command, *args.rest, *options]
        yield replace(_execute(command, os.environ), tests=" ".join(command))
        return
    environment = _environment(target)
    buffers, devices = _where_kv_is(target, environment) if target.kv_buffer else ((), ())
    limit = [f"--timeout={TEST_S * target.time_factor}"] if target.time_factor > 1 else []

    def run(tests: str) -> FinishedRun:
        finished = _execute(["tests/run.py", "-v", tests, *options, *limit], environment)
        named = " ".join([tests, *options])
        return replace(finished, tests=named, kv_buffers=buffers, devices=devices)

    with ThreadPoolExecutor(args.jobs) as pool:
        started = [pool.submit(run, tests) for tests in args.rest or target.tests]
        yield from (finished.result() for finished in as_completed(started))


def _environment(target: Target) -> Mapping[str, str]:
    """Returns an environment with the servers of a target; builds those that are not in it."""
    servers = {}
    for patched, variable in ((True, "EVOKE_PATCHED_SERVER"), (False, "EVOKE_STOCK_SERVER")):
        if variable in os.environ:
            servers[variable] = os.environ[variable]
        elif patched or target.stock:
            flags = target.flags + tuple(
                f"-D{name}={os.environ[name]}" for name in target.settings if name in os.environ
            )
            options = BuildOptions(sanitize=target.sanitizer, flags=flags, ui=False)
            built = ensure_server(patched=patched, options=options)
            servers[variable] = str(built)
    if target.rpc:
        os.environ["MATRIX_LLAMA_SERVER"] = servers["EVOKE_PATCHED_SERVER"]
        os.environ["MATRIX_RPC_SERVER"] = str(_build_rpc_server())
        servers["EVOKE_PATCHED_SERVER"] = str(ROOT / "tests/rpc_launcher.py")
    return {
        **os.environ,
        **servers,
        **target.environment,
        "EVOKE_SERVER_ARGS": " ".join(target.server_args),
        "MATRIX_TIME_FACTOR": str(target.time_factor),
    }


def _execute(command: Sequence[str], environment: Mapping[str, str]) -> FinishedRun:
    """Runs a Python program in the checkout and prints its output as it comes."""
    lines = []
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=dict(environment),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    seconds = time.monotonic() - started
    return FinishedRun("", process.returncode, tuple(lines), seconds)


def _build_rpc_server() -> Path:
    """Compiles the RPC server in the tree of the target's server; returns the program."""
    tree = max((cache_dir() / "trees").glob("*/build"), key=lambda path: path.stat().st_mtime)
    name = "ggml-rpc-server"
    build = ["cmake", "--build", str(tree), "--target", name, "-j", str(os.cpu_count())]
    if subprocess.run(build, capture_output=True, text=True).returncode != 0:
        raise BuildError(f"{name} does not compile in {tree}")
    return tree / "bin" / name


def _where_kv_is(
    target: Target, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Starts a server; returns the buffers with K/V and the devices, as its log names them.

    Raises BuildError if K/V is in other buffers than the target's.
    """
    port = free_port()
    command = [environment["EVOKE_PATCHED_SERVER"], "-m", str(bundled_model()), "-c", "1024"]
    command += ["-lv", "4", "--port", str(port), *target.server_args]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "llama-server.log")
        os.environ.update(target.environment)
        with serving(command, port, log):
            pass
        said = log.read_text(encoding="utf-8", errors="replace")
    found = tuple(re.findall(r"(\S+) KV buffer size", said))
    if not found or not all(name.startswith(target.kv_buffer) for name in found):
        raise BuildError(f"K/V should be in buffers of {target.kv_buffer}, and is in {found}")
    return found, tuple(re.findall(r"using device \S+ \((.+)\) \([^()]*\) - ", said))


def make_command(target: str, chosen: Sequence[str]) -> str:
    """The command that repeats a run, with the tests and options that were chosen for it."""
    command = f"make test-matrix TARGET={target}"
    return f"{command} ARGS={shlex.quote(shlex.join(chosen))}" if chosen else command


def _record(name: str, command: str, runs: Iterable[FinishedRun]) -> dict[str, Any]:
    """Writes the result of each run when it ends, with those of earlier runs of the same build."""
    target, path, record = TARGETS[name], _result_path(name), dict[str, Any]()
    tested = checkout()  # before the first result changes a file of it
    for finished in runs:
        head: dict[str, Any] = {
            "target": name,
            "about": target.about,
            "command": command,
            "llama_cpp": read_pin(patches_dir()).commit,
            "series": read_series(patches_dir()).digest[:16],
            "cmake_flags": list(target.flags),
            "server_args": list(target.server_args),
        }
        if target.time_factor > 1:
            head["time_factor"] = target.time_factor
        earlier = json.loads(path.read_text("utf-8")) if path.exists() else {}
        same = all(earlier.get(key) == head[key] for key in ("llama_cpp", "series"))
        results = dict(earlier.get("runs", {})) if same and not target.command else {}
        results[finished.tests] = {
            "result": finished.closing,
            "exit_status": finished.status,
            "seconds": round(finished.seconds),
            "failures": [line for line in finished.lines if line.startswith(("FAILED", "ERROR"))],
            **({"kv_buffers": list(finished.kv_buffers)} if finished.kv_buffers else {}),
            **({"devices": list(finished.devices)} if finished.devices else {}),
            "date": datetime.date.today().isoformat(),
            "checkout": tested,
            "machine": machine(),
        }
        statuses = [one["exit_status"] for one in results.values()]
        record = head | {
            "runs": results,
            "exit_status": max(statuses, key=abs),
            "result": total([one["result"] for one in results.values()]),
        }
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def _result_path(name: str) -> Path:
    return RESULTS / f"{name}.json"


def total(results: Sequence[str]) -> str:
    """Returns the sum of lines such as `3 passed, 0 failed`; a single line as it is."""
    if len(results) == 1:
        return results[0]
    sums: Counter[str] = Counter(passed=0, failed=0)
    for line in results:
        for number, outcome in re.findall(r"(\d+) (passed|failed|skipped)", line):
            sums[outcome] += int(number)
    return ", ".join(f"{number} {outcome}" for outcome, number in sums.items())


if __name__ == "__main__":
    sys.exit(main())
