"""Fuzzes patched servers of every memory kind, built with sanitizers.

There are three kinds of operations: valid ones, whose results are compared with a model of the
slots; invalid calls; and calls of several concurrent clients, some of which disconnect. The run
ends at the first sanitizer report, leak, crash, answer that takes two minutes, or difference from
the model. The last line printed has the seed that repeats it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/contract")]

from adapters import write_adapter, write_vector  # noqa: E402
from concurrent_clients import run_clients  # noqa: E402
from invalid_bodies import send_invalid_calls  # noqa: E402
from llama import Llama, running  # noqa: E402
from operations import run_operations  # noqa: E402

from bench.random_models import SHAPES, ensure  # noqa: E402
from evoke_proxy.server_build import BuildOptions, ensure_server  # noqa: E402
from evoke_proxy.server_build.toolchain import SANITIZERS  # noqa: E402

_SHAPES = (
    *("dense", "bos", "moe", "gemma", "jamba", "lfm2", "qwen2vl", "qwen35"),
    *("dsa", "dsa-window", "msa"),
)
_UNIFIED, _SEPARATE = ("-np", "2", "-kvu"), ("-np", "2", "-no-kvu")
_FEW = ("-c", "1024", "--ctx-logical", "4096")
_NORMED = ("--kv-eviction", "3", "--kv-aggregation", "norm_sum", "--kv-evictable-tokens", "256")
_ON_DISK = ("--evoke-ram", "2", "--evoke-disk", "{folder}/blocks:8")
_ADAPTED = ("--lora", "{folder}/adapter.gguf")
_OVERRIDE = "llama.attention.layer_norm_rms_epsilon=float:"
_EPSILON, _OTHER_EPSILON = (
    ("--override-kv", f"{_OVERRIDE}1e-5"),
    ("--override-kv", f"{_OVERRIDE}0.3"),
)
_VECTOR = ("--control-vector-scaled", "{folder}/vector.gguf:1.0")
_OTHER_VECTOR = ("--control-vector-scaled", "{folder}/vector.gguf:1.5")
_BEFORE_RESTART = 120  # operations before a restarted server looks for the copies
_PIECE = 500  # operations per server in a round: a fault of all servers shows early
_ASAN = "detect_leaks=1:handle_abort=1:allocator_may_return_null=1"
_TSAN = f"exitcode=0:history_size=4:suppressions={ROOT}/tests/tsan.supp"
_USUAL = ("-c", "4096", "--evoke-ram", "4", "-t", "1")


@dataclass(frozen=True, slots=True)
class Case:
    """A model of random weights and the options of its server."""

    shape: str
    options: tuple[str, ...]
    other: tuple[str, ...] = ()
    """Replaces the last options of equal number: such a server must not use the copies."""

    def __str__(self) -> str:
        return f"{self.shape} {' '.join(self.options)}"

    @property
    def changed(self) -> tuple[str, ...]:
        """The options of a server that computes different rows from the same text."""
        return (*self.options[: len(self.options) - len(self.other)], *self.other)


CASES = (
    *(Case(f"tiny-{shape}", (*_UNIFIED, "-fa", "on")) for shape in _SHAPES),
    *(Case(f"tiny-{shape}", (*_SEPARATE, "-fa", "off")) for shape in _SHAPES),
    Case("tiny-dense", (*_SEPARATE, "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")),
    Case("tiny-dense", (*_UNIFIED, "-fa", "on", "-ctk", "q4_0", "-ctv", "q4_0")),
    Case("tiny-gemma", (*_SEPARATE, "-fa", "on", "--swa-full")),
    Case("tiny-gemma2", (*_UNIFIED, "-fa", "on")),
    Case("tiny-gpt-oss", (*_SEPARATE, "-fa", "off")),
    # a context longer than the cells, with every eviction mode
    Case("tiny-dense", (*_FEW, *_SEPARATE, "-fa", "on", "--kv-eviction", "1")),
    Case("tiny-dense", (*_FEW, *_UNIFIED, "-fa", "off", "--kv-eviction", "2")),
    Case("tiny-dense", (*_FEW, *_UNIFIED, "-fa", "on", "--kv-eviction", "3")),
    Case("tiny-moe", (*_FEW, *_SEPARATE, "-fa", "off", *_NORMED)),
    Case("tiny-gemma", (*_FEW, *_UNIFIED, "-fa", "on", "--kv-eviction", "1")),
    Case("tiny-gemma2", (*_FEW, *_SEPARATE, "-fa", "on", "--kv-eviction", "3")),
    Case("tiny-jamba", (*_FEW, *_SEPARATE, "-fa", "on", "--kv-eviction", "2")),
    Case("tiny-qwen35", (*_FEW, *_UNIFIED, "-fa", "on", "--kv-eviction", "3")),
    Case("tiny-qwen2vl", (*_FEW, *_UNIFIED, "-fa", "off", "--kv-eviction", "1")),
    # too little host memory for the saved copies, which go to disk
    Case("tiny-dense", (*_SEPARATE, "-fa", "on", *_ON_DISK)),
    Case("tiny-lfm2", (*_UNIFIED, "-fa", "on", *_ON_DISK)),
    Case("tiny-bos", (*_FEW, *_UNIFIED, "-fa", "on", "--kv-eviction", "2", *_ON_DISK)),
    # an adapter whose scale changes from request to request
    Case("tiny-dense", (*_UNIFIED, "-fa", "on", *_ADAPTED)),
    Case("tiny-moe", (*_SEPARATE, "-fa", "off", *_ADAPTED, *_ON_DISK)),
    Case("tiny-dense", (*_FEW, *_UNIFIED, "-fa", "off", "--kv-eviction", "2", *_ADAPTED)),
    # split modes that work without a GPU
    Case("tiny-dense", (*_UNIFIED, "-fa", "on", "--split-mode", "row")),
    Case("tiny-moe", (*_SEPARATE, "-fa", "off", "--split-mode", "none")),
    Case("tiny-bos", (*_SEPARATE, "-fa", "on", "--split-mode", "layer")),
    # a folder with copies of a server that computes different rows
    Case("tiny-dense", (*_SEPARATE, "-fa", "on", *_ON_DISK, *_EPSILON), _OTHER_EPSILON),
    Case("tiny-moe", (*_UNIFIED, "-fa", "on", *_ON_DISK, *_VECTOR), _OTHER_VECTOR),
    Case("tiny-dense", (*_UNIFIED, *_ON_DISK, "-fa", "on"), ("-fa", "off")),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzzes until `--operations` are done; returns 0. A finding is raised."""
    args = _parser().parse_args(argv)
    if not args.plain:
        os.environ["EVOKE_PATCHED_SERVER"] = str(
            ensure_server(options=BuildOptions(sanitize=args.sanitize))
        )
    cases = [case for case in CASES if args.only in str(case)]
    if not cases:
        raise SystemExit(f"no case has {args.only!r} in its line")
    done, began, turns = 0, time.monotonic(), _turns(cases, args.seed)
    while done < args.operations:
        seed, case = next(turns)
        piece = min(args.piece, args.operations - done)
        took = time.monotonic() - began
        print(f"{done:>7} {took:6.0f} s  seed {seed}  {case}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            write_adapter(Path(folder, "adapter.gguf"), seed, case.shape)
            write_vector(Path(folder, "vector.gguf"), seed, case.shape)
            if case.other:
                check_reuse_after_restart(case, Path(folder), seed)
            with watched(case, Path(folder)) as server:
                operate(server, piece, seed)
        done += piece
    print(f"{done} operations on {len(cases)} kinds of servers: nothing found")
    return 0


def _turns(cases: Sequence[Case], seed: int) -> Iterator[tuple[int, Case]]:
    """Yields every case with the first seed, then every case with the next, without end."""
    for each in itertools.count(seed):
        yield from ((each, case) for case in cases)


def operate(server: Llama, count: int, seed: int) -> None:
    """Runs `count` operations, divided among the three kinds."""
    run_operations(server, count * 2 // 5, seed)
    send_invalid_calls(server, count * 3 // 10, seed)
    run_clients(server, count - count * 2 // 5 - count * 3 // 10, seed)


def check_reuse_after_restart(case: Case, folder: Path, seed: int) -> None:
    """The copies on disk are used by a server with the same options, and by no other."""
    with watched(case, folder) as server:
        model = run_operations(server, _BEFORE_RESTART, seed)
        server.post("/slots/0?action=block-spill", {"all": True})
    with watched(replace(case, options=case.changed), folder) as server:
        assert server.slot()["blocks"] == [], "a server used copies of other options"
    with watched(case, folder) as server:
        assert model.compare_after_restart(server) > 0
        server.post("/slots/0?action=block-drop", {"all": True})


@contextmanager
def watched(case: Case, folder: Path) -> Iterator[Llama]:
    """Runs the server of `case`; RuntimeError with the reports if a sanitizer wrote any."""
    with tempfile.TemporaryDirectory() as scratch:
        reports = Path(scratch, "reports")
        reports.mkdir()
        log_path = f"log_path={reports}/report"
        os.environ["TSAN_OPTIONS"] = f"{log_path}:{_TSAN}"
        os.environ["ASAN_OPTIONS"] = f"{log_path}:{_ASAN}"
        os.environ["UBSAN_OPTIONS"] = f"{log_path}:print_stacktrace=1"
        model = ensure(SHAPES[case.shape])
        try:
            options = [option.format(folder=folder) for option in case.options]
            with running(True, *_USUAL, *options, model=model) as server:
                yield server
        finally:
            findings = [path.read_text(errors="replace") for path in sorted(reports.iterdir())]
            if findings:
                raise RuntimeError(f"{case}:\n" + "\n".join(findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make fuzz",
        description=__doc__,
        epilog="example:\n  make fuzz ARGS='--operations 100000'\n"
        "  make fuzz ARGS='--operations 500 --only gemma --seed 7'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--operations", type=int, default=20_000, help="how many (20000)")
    parser.add_argument("--piece", type=int, default=_PIECE, help=f"of them at a time ({_PIECE})")
    parser.add_argument("--seed", type=int, default=1, help="of the first round (1)")
    parser.add_argument("--only", default="", help="cases whose line has this in it")
    parser.add_argument(
        "--sanitize", choices=tuple(SANITIZERS), default="address", help="what it is built with"
    )
    parser.add_argument("--plain", action="store_true", help="the usual server, no sanitizers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
