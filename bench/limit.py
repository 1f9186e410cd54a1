"""How long can a generation get, and how many run at once, with and without eviction?

Length: one slot with `--cells` cells is asked for `--tokens` tokens. Without eviction it stops when
the cells are full and is restarted until it has generated as many, to compare the speed.
Throughput: slots that share `--shared` cells are asked for `--each` tokens each, at the same time;
a binary search finds the largest number that all complete. `by_count` is the speed of 1, 2, 4, ...
at once, 0 from where the cells are full. Speed is tokens per second of processor time of the
server.

Part `shift`: what a long answer leaves of what was said before it, see `bench/shift.py`.

*Against* the server without eviction. *Fails* when a generation with eviction ends early."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench import shift
from bench.driver import Bench, Report, Row, option, run_parts
from bench.llama import Llama, running
from bench.random_models import SHAPES, ensure
from evoke_proxy.server_build import ensure_server

ARMS = {
    "off": (),
    "streaming": ("--kv-eviction", "1"),
    "scored": ("--kv-eviction", "2"),
    "attention": ("--kv-eviction", "3"),
}
SLOTS = 32
_COUNTS = (1, 2, 4, 8, 16, 32)


def ask(server: Llama, prompt: Sequence[int], tokens: int) -> Any:
    """A completion that nothing but the context ends."""
    body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True}
    return server.call("POST", "/completion", body)


def length(server: Llama, tokens: int) -> dict[str, Any]:
    """One generation: how far it got, how fast, and what left the cells meanwhile."""
    prompt = [10 + 7 * i % 1900 for i in range(64)]
    began, timings = server.cpu_s(), ask(server, prompt, tokens)["timings"]
    total = timings["predicted_n"]
    while total < tokens:
        total += ask(server, prompt, tokens)["timings"]["predicted_n"]
    used = server.cpu_s() - began
    usage = timings.get("evoke", {})
    out = usage.get("auto_evicted", [])
    return {
        "asked": tokens,
        "generated": timings["predicted_n"],
        "per_cpu_s": total / used,
        "n_resident_peak": usage.get("n_resident_peak"),
        "evicted": sum(p1 - p0 for p0, p1, _ in out),
        "saved": sum(p1 - p0 for p0, p1, name in out if name),
    }


def together(server: Llama, count: int, each: int) -> float:
    """Return the speed of n generations at once; 0 when one of them did not get its tokens."""

    def one(number: int) -> bool:
        prompt = [20 + (11 * i + 131 * number) % 1900 for i in range(64)]
        try:
            return bool(ask(server, prompt, each)["timings"]["predicted_n"] == each)
        except RuntimeError:  # the cells were full
            return False

    began = server.cpu_s()
    with ThreadPoolExecutor(count) as pool:
        done = list(pool.map(one, range(count)))
    used = server.cpu_s() - began
    for slot in range(SLOTS):
        server.erase(slot)
    return count * each / used if all(done) else 0.0


def most(server: Llama, each: int) -> tuple[int, float]:
    """The most generations at once that all get their tokens, and their speed together."""
    low, high, speed = 0, SLOTS + 1, 0.0
    while high - low > 1:
        middle = (low + high) // 2
        measured = together(server, middle, each)
        if measured:
            low, speed = middle, measured
        else:
            high = middle
    return low, speed


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each arm."""
    server, model = ensure_server(), ensure(SHAPES[args.shape])
    for arm, eviction in ARMS.items():
        options = ("-t", "1", "-fa", "on", "--evoke-ram", "256", *eviction)
        with running(server, model, "-c", str(args.cells), "-np", "1", *options) as one:
            row = length(one, args.tokens)
        shared = ("-c", str(args.shared), "-np", str(SLOTS), "-kvu")
        with running(server, model, *shared, *options) as many:
            by_count = {str(n): round(together(many, n, args.each)) for n in _COUNTS}
            count, speed = most(many, args.each)
        row |= {"most_at_once": count, "together_per_cpu_s": speed, "by_count": by_count}
        yield {"arm": arm, **row}


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report how far each arm got; one with eviction must get all tokens."""
    summary: dict[str, Any] = {}
    for row in rows:
        summary[f"generated_{row['arm']}"] = row["generated"]
        summary[f"most_at_once_{row['arm']}"] = row["most_at_once"]
        summary[f"speed_{row['arm']}"] = row["per_cpu_s"] / rows[0]["per_cpu_s"]
    early = [row for row in rows[1:] if row["generated"] != args.tokens]
    return Report(summary, [f"{row['arm']} ends after {row['generated']} tokens" for row in early])


BENCH = Bench(
    "limit", __doc__, "--cells 2048 --tokens 50000", measure, report,
    ("arm", "asked", "generated", "per_cpu_s", "n_resident_peak", "evicted", "saved",
     "most_at_once", "together_per_cpu_s", "by_count"),
    (option("--shape", "long-2", choices=sorted(SHAPES)),
     option("--cells", 1024, "of the one slot"), option("--tokens", 20_000, "asked of it"),
     option("--shared", 4096, "cells that 32 slots share"),
     option("--each", 700, "tokens asked of each")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_parts({"shift": shift.BENCH, "all": BENCH}, ["all"]))
