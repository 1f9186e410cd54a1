"""How fast are blocks copied, compared with a memcpy of the same size?

Starts one server for each layout of V (flash attention on: rows; off: columns) with one slot that
is three quarters full. For each block size, a save, a load and a memcpy take turns; first the block
is where it was decoded, then it is scattered over the cells in runs of 8. Times of copies are those
that the server reports (`t_ms`, without HTTP). The memcpy uses one thread and buffers that were
touched before."""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.llama import Llama, running
from bench.random_models import SHAPES, ensure
from evoke_proxy.server_build import ensure_server

SIZES = (160, 640, 1280)
RUN = 8
# Shares of the speed of memcpy that blocks of 640 tokens and more must reach.
BARS = {("on", "contiguous"): 0.8, ("on", "scattered"): 0.5,
        ("off", "contiguous"): 0.8, ("off", "scattered"): 0.15}  # fmt: skip
_COLUMNS = (
    *("fa", "cells", "tokens", "runs", "mb", "memcpy_ms", "save_ms", "load_ms"),
    *("save_vs_memcpy", "load_vs_memcpy", "bar"),
)


class Memcpy:
    """Two buffers whose pages are present, and the time to copy one into the other."""

    def __init__(self, n_bytes: int) -> None:
        self._n = n_bytes
        self._from, self._to = (ctypes.create_string_buffer(n_bytes) for _ in range(2))
        ctypes.memset(self._from, 1, n_bytes)
        ctypes.memset(self._to, 2, n_bytes)

    def ms(self) -> float:
        began = time.perf_counter()
        ctypes.memmove(self._to, self._from, self._n)
        return (time.perf_counter() - began) * 1000


def measure(server: Llama, p0: int, p1: int, repeats: int) -> dict[str, Any]:
    """Medians of saving and loading [p0, p1) of the slot, and of a memcpy of as much."""
    times: dict[str, list[float]] = {"save": [], "load": [], "memcpy": []}
    first = server.act("block-save", name="b", p0=p0, p1=p1)
    plain = Memcpy(first["n_bytes"])
    for _ in range(repeats):
        server.act("block-drop", names=["b"])
        times["memcpy"].append(plain.ms())
        times["save"].append(server.act("block-save", name="b", p0=p0, p1=p1)["t_ms"])
        server.act("block-evict", p0=p0, p1=p1)
        times["memcpy"].append(plain.ms())
        loaded = server.act("block-load", names=["b"])
        assert loaded["same_cells"]
        times["load"].append(loaded["t_ms"])
    server.act("block-drop", names=["b"])
    middle = {key: statistics.median(values) for key, values in times.items()}
    return {
        "tokens": p1 - p0,
        "runs": first["n_runs"],
        "mb": first["n_bytes"] / 1e6,
        **{f"{key}_ms": value for key, value in middle.items()},
        "spread": {key: record.spread(values) for key, values in times.items()},
        "save_vs_memcpy": middle["memcpy"] / middle["save"],
        "load_vs_memcpy": middle["memcpy"] / middle["load"],
    }


def scatter(server: Llama, p0: int, p1: int) -> None:
    """Let the rows of [p0, p1) change places in runs of 8."""
    spans = [(p, min(p + RUN, p1)) for p in range(p0, p1, RUN)]
    names = [f"run/{a}" for a, _ in spans]
    saves = [
        {"op": "save", "name": name, "p0": a, "p1": b}
        for name, (a, b) in zip(names, spans, strict=True)
    ]
    server.act("block-plan", ops=[*saves, {"op": "evict", "p0": p0, "p1": p1}])
    random.Random(p0).shuffle(names)
    for name in names:
        server.act("block-load", names=[name], place="contig")
    server.act("block-drop", names=names)


def run(server: Path, model: Path, args: argparse.Namespace, fa: str) -> list[dict[str, Any]]:
    """The rows of one server."""
    filled = sum(args.sizes) + 256
    cells = (filled * 4 // 3 + 255) // 256 * 256
    options = ["-c", str(cells), "-np", "1", "--evoke-ram", "1024", "-fa", fa]
    options += ["-t", str(args.threads), "-tb", str(args.threads), *args.options]
    rows = []
    with running(server, model, *options) as llama:
        llama.complete([10 + 7 * j % 1900 for j in range(filled)])
        for cells_are in ("contiguous", "scattered"):
            start = 64
            for size in args.sizes:
                if cells_are == "scattered":
                    scatter(llama, start, start + size)
                row = {"fa": fa, "cells": cells_are}
                row |= measure(llama, start, start + size, args.repeats)
                rows.append(row | {"bar": BARS[fa, cells_are] if size >= 640 else None})
                print(record.table(rows[-1:], _COLUMNS), flush=True)
                start += size
    return rows


def missed(row: record.Row) -> bool:
    """Return whether a row has a bar and does not reach it."""
    worse = min(row["save_vs_memcpy"], row["load_vs_memcpy"])
    return row["bar"] is not None and worse < row["bar"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/copies.json`; 1 when a bar is missed."""
    parser = record.parser("copies", __doc__, "--repeats 31")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-7b-kv")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--fa", choices=("on", "off", "both"), default="both")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: the cache)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    args = parser.parse_args(argv)
    args.options = []
    server = args.server or ensure_server(patched=True)
    model = ensure(SHAPES[args.shape])
    rows = []
    for fa in ("on", "off") if args.fa == "both" else (args.fa,):
        rows += run(server, model, args, fa)
    worst = {
        f"{verb}_fa_{fa}_{cells}": min(row[f"{verb}_vs_memcpy"] for row in matching)
        for (fa, cells) in BARS
        if (matching := [r for r in rows if r["bar"] and (r["fa"], r["cells"]) == (fa, cells)])
        for verb in ("save", "load")
    }
    print(record.table(rows, _COLUMNS))
    summary = {"shape": args.shape, "worst_from_640": worst, "missed": sum(map(missed, rows))}
    print(f"written: {record.write('copies', rows, summary, args.out)}")
    return 1 if summary["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
