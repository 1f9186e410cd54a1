"""Random operations and nonsense against servers of every shape, built with sanitizers.

Half of the operations are those of a client, held against bookkeeping of our own; half are calls
that no client would make. A report of a sanitizer, a leak, a crash, an answer that takes a minute
or a state that disagrees ends it, with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/contract")]

from llama import Llama, running  # noqa: E402
from nonsense import torment  # noqa: E402
from operations import play  # noqa: E402

from bench.random_models import SHAPES, ensure  # noqa: E402
from evoke_proxy.server_build import ensure_server  # noqa: E402

_SHAPES = ("dense", "bos", "moe", "gemma", "jamba", "lfm2", "qwen2vl", "qwen35")
_UNIFIED, _SEPARATE = ("-np", "2", "-kvu"), ("-np", "2", "-no-kvu")
_PIECE = 500  # operations before others get their turn: what is wrong everywhere shows early
_USUAL = ("-c", "4096", "--evoke-ram", "4", "-t", "1")


@dataclass(frozen=True, slots=True)
class Case:
    """A model of random weights and the options of its server."""

    shape: str
    options: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.shape} {' '.join(self.options)}"


CASES = (
    *(Case(f"tiny-{shape}", (*_UNIFIED, "-fa", "on")) for shape in _SHAPES),
    *(Case(f"tiny-{shape}", (*_SEPARATE, "-fa", "off")) for shape in _SHAPES),
    Case("tiny-dense", (*_SEPARATE, "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")),
    Case("tiny-dense", (*_UNIFIED, "-fa", "on", "-ctk", "q4_0", "-ctv", "q4_0")),
    Case("tiny-gemma", (*_SEPARATE, "-fa", "on", "--swa-full")),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz until so many operations are done; 0 when nothing was found."""
    args = _parser().parse_args(argv)
    if not args.plain:
        os.environ["EVOKE_PATCHED_SERVER"] = str(ensure_server(sanitize=True))
    done, began, seed = 0, time.monotonic(), args.seed
    while done < args.operations:
        for case in CASES:
            if args.only in str(case) and done < args.operations:
                count = min(args.piece, args.operations - done)
                took = time.monotonic() - began
                print(f"{done:>7} {took:6.0f} s  seed {seed}  {case}", flush=True)
                with watched(case) as server:
                    play(server, count // 2, seed)
                    torment(server, count - count // 2, seed)
                done += count
        seed += 1
    print(f"{done} operations on {len(CASES)} kinds of servers: nothing found")
    return 0


@contextmanager
def watched(case: Case) -> Iterator[Llama]:
    """A server of this kind; RuntimeError when a sanitizer has something to say about it."""
    with tempfile.TemporaryDirectory() as folder:
        reports = Path(folder)
        where = f"log_path={reports}/report"
        os.environ["ASAN_OPTIONS"] = f"{where}:detect_leaks=1:allocator_may_return_null=1"
        os.environ["UBSAN_OPTIONS"] = f"{where}:print_stacktrace=1"
        model = ensure(SHAPES[case.shape])
        try:
            with running(True, *_USUAL, *case.options, model=model) as server:
                yield server
        finally:
            found = [path.read_text(errors="replace") for path in sorted(reports.iterdir())]
            if found:
                raise RuntimeError(f"{case}:\n" + "\n".join(found))


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
    parser.add_argument("--plain", action="store_true", help="the usual server, no sanitizers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
