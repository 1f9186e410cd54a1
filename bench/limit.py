"""How long can a generation get, and how many run at once, with and without eviction?

Length: one slot with `--cells` cells is asked for `--tokens` tokens. Without eviction it stops when
the cells are full and is restarted until it has generated as many, to compare the speed.
Throughput: slots that share `--shared` cells are asked for `--each` tokens each, at the same time;
a binary search finds the largest number that all complete. Speed is tokens per second of processor
time of the server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench import record
from bench.decode import cpu_s, process
from bench.llama import Llama, running
from bench.random_models import SHAPES, ensure
from evoke_proxy.server_build import ensure_server

ARMS = {
    "off": (),
    "streaming": ("--kv-eviction", "1"),
    "scored": ("--kv-eviction", "2"),
    "attention": ("--kv-eviction", "3"),
}
SLOTS = 16
_COLUMNS = (
    "arm", "asked", "generated", "per_cpu_s", "n_resident_peak",
    "evicted", "saved", "most_at_once", "together_per_cpu_s",
)  # fmt: skip


def ask(server: Llama, prompt: Sequence[int], tokens: int) -> Any:
    """A completion that nothing but the context ends."""
    body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True}
    return server.call("POST", "/completion", body)


def length(server: Llama, tokens: int) -> dict[str, Any]:
    """One generation: how far it got, how fast, and what left the cells meanwhile."""
    prompt = [10 + 7 * i % 1900 for i in range(64)]
    folder = process(server.port)
    began, timings = cpu_s(folder), ask(server, prompt, tokens)["timings"]
    total = timings["predicted_n"]
    while total < tokens:
        total += ask(server, prompt, tokens)["timings"]["predicted_n"]
    used = cpu_s(folder) - began
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

    folder = process(server.port)
    began = cpu_s(folder)
    with ThreadPoolExecutor(count) as pool:
        done = list(pool.map(one, range(count)))
    used = cpu_s(folder) - began
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


def measure(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    server, model = ensure_server(patched=True, progress=False), ensure(SHAPES[args.shape])
    options = ("-t", "1", "-fa", "on", "--evoke-ram", "256", *ARMS[arm])
    with running(server, model, "-c", str(args.cells), "-np", "1", *options) as one:
        row = length(one, args.tokens)
    shared = ("-c", str(args.shared), "-np", str(SLOTS), "-kvu")
    with running(server, model, *shared, *options) as many:
        count, speed = most(many, args.each)
    return {"arm": arm, **row, "most_at_once": count, "together_per_cpu_s": speed}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/limit.json`; 1 when an arm with eviction stops early."""
    parser = record.parser("limit", __doc__, "--cells 2048 --tokens 50000")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="long-2")
    parser.add_argument("--cells", type=int, default=1024, help="cells of the one slot (1024)")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens asked of it (20000)")
    parser.add_argument("--shared", type=int, default=4096, help="cells that 16 slots share (4096)")
    parser.add_argument("--each", type=int, default=700, help="tokens asked of each (700)")
    args = parser.parse_args(argv)
    rows = [measure(arm, args) for arm in ARMS]
    total: dict[str, Any] = {}
    for row in rows:
        total[f"generated_{row['arm']}"] = row["generated"]
        total[f"most_at_once_{row['arm']}"] = row["most_at_once"]
        total[f"speed_{row['arm']}"] = row["per_cpu_s"] / rows[0]["per_cpu_s"]
    print(record.table(rows, _COLUMNS))
    print(record.write("limit", rows, total, args.out))
    return 0 if all(row["generated"] == args.tokens for row in rows[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
