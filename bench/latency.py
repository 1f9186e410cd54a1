"""What do save, load and evict cost, compared with decoding the same tokens again?

One server with one slot and a cache that is at least half full. For each block size the four
operations take turns, round after round; results are medians. First the rows are where they were
decoded, then they are scattered over the cells in runs of 8. The comparison decodes the tokens of
the block as the tail of the same prompt and generates one token. Times are those that the server
reports: `t_ms` of the call, without HTTP, and `prompt_ms`."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import record
from bench.copies import scatter
from bench.llama import Llama, running
from bench.random_models import SHAPES, ensure
from evoke_proxy.server_build import ensure_server

SIZES = (20, 40, 160, 640, 1280)
_COLUMNS = (
    "cells", "tokens", "mb", "save_ms", "evict_ms", "load_ms", "prefill_ms",
    "load_vs_reprefill", "save_load_vs_reprefill", "save_over_load",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    """What is copied, and how its times are taken.

    Attributes:
        size: Tokens of the block.
        filled: Tokens in the cache, of which the block is the end.
        scattered: Whether its rows are scattered over the cells.
        over_http: Whether times are those of the client, from sending a call to its whole answer.
    """

    size: int
    filled: int
    scattered: bool
    over_http: bool = False


def measure(server: Llama, block: Block, repeats: int) -> dict[str, Any]:
    """One row: medians over the repeats."""
    size, filled, over_http = block.size, block.filled, block.over_http
    times: dict[str, list[float]] = {"save": [], "evict": [], "load": [], "prefill": []}
    n_bytes = 0
    for i in range(repeats):
        prompt = [10 + (7 * j + i) % 1900 for j in range(filled + size)]
        server.complete(prompt[:filled])
        began = time.perf_counter()
        prefill = float(server.complete(prompt)["timings"]["prompt_ms"])
        times["prefill"].append(_ms_since(began) if over_http else prefill)
        name = f"b{size}-{i}"
        start = filled - size
        if block.scattered:
            scatter(server, start, filled)
        calls: tuple[tuple[str, dict[str, Any]], ...] = (
            ("save", {"name": name, "p0": start, "p1": filled}),
            ("evict", {"p0": start, "p1": filled}),
            ("load", {"names": [name]}),
        )
        for verb, body in calls:
            began = time.perf_counter()
            answer = server.act(f"block-{verb}", **body)
            times[verb].append(_ms_since(began) if over_http else answer["t_ms"])
            n_bytes = answer.get("n_bytes", n_bytes)
        server.act("block-drop", names=[name])
        server.erase()
    middle = {key: statistics.median(values) for key, values in times.items()}
    return {
        "cells": "scattered" if block.scattered else "contiguous",
        "tokens": size,
        "mb": n_bytes / 1e6,
        **{f"{key}_ms": value for key, value in middle.items()},
        "spread": {key: record.spread(values) for key, values in times.items()},
        "load_vs_reprefill": middle["prefill"] / middle["load"],
        "save_load_vs_reprefill": middle["prefill"] / (middle["save"] + middle["load"]),
        "save_over_load": middle["save"] / middle["load"],
    }


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/latency.json`."""
    parser = record.parser("latency", __doc__, "--repeats 9 --fa off")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-7b-kv")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cells", type=int, default=4096, help="cells of the cache (4096)")
    parser.add_argument("--fa", choices=("on", "off"), default="on", help="flash attention")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: the cache)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    args = parser.parse_args(argv)
    server = args.server or ensure_server(patched=True)
    model = ensure(SHAPES[args.shape])
    options = ["-c", str(args.cells), "-np", "1", "--evoke-ram", "2048", "-fa", args.fa]
    options += ["-t", str(args.threads), "-tb", str(args.threads)]
    rows = []
    with running(server, model, *options) as llama:
        for scattered in (False, True):
            for size in args.sizes:
                filled = max(args.cells // 2, 2 * size)
                rows.append(measure(llama, Block(size, filled, scattered), args.repeats))
                print(record.table(rows[-1:], _COLUMNS), flush=True)
    largest = [row for row in rows if row["tokens"] == max(args.sizes)][0]
    summary = {
        "shape": args.shape,
        "kv_bytes_per_token": SHAPES[args.shape].kv_bytes,
        "load_vs_reprefill_1280": largest["load_vs_reprefill"],
        "save_load_vs_reprefill_1280": largest["save_load_vs_reprefill"],
        "save_over_load_1280": largest["save_over_load"],
    }
    print(record.table(rows, _COLUMNS))
    print(f"written: {record.write('latency', rows, summary, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
