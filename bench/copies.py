"""How fast are blocks copied, by the runs of cells that they are in, compared with a memcpy?

Starts one server for each layout of V (flash attention on: rows; off: columns) with one slot that
is three quarters full. For each block size, a save, a load and a memcpy take turns; the block is in
one run of cells, then in runs of 8 rows, then in 8 and in 64 runs, in random order. The last arm is
a server whose four slots share their cells and generate side by side: its runs are those that
four clients make. Times of copies are those that the server reports (`t_ms`, without HTTP).
The memcpy uses one thread and buffers that were touched before. On a server with K/V on a device
(`--server`) the columns `copies` and `copied_mb` count what crosses to and from the device in a
save and a load; they do not grow with the runs."""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import record
from bench.llama import Llama, running
from bench.random_models import SHAPES, ensure
from evoke_proxy.server_build import ensure_server

SIZES = (64, 160, 640, 1280)
RUN = 8
FOUR_CLIENTS = "four clients"
VERBS = ("save", "load")
# Shares of the speed of memcpy that blocks of 640 tokens and more must reach.
BARS = {("on", "contiguous"): 0.8, ("on", "scattered"): 0.5,
        ("off", "contiguous"): 0.8, ("off", "scattered"): 0.15}  # fmt: skip
# Share of the speed of one run that a block in 64 runs, or as four clients make it, must reach.
BAR_OF_ONE_RUN = 0.5
_COLUMNS = (
    *("fa", "cells", "tokens", "runs", "mb", "memcpy_ms", "save_ms", "load_ms"),
    *("save_vs_memcpy", "load_vs_memcpy", "bar", "save_vs_one_run", "load_vs_one_run"),
    *("copies", "copied_mb"),
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
    """Medians of saving and loading [p0, p1) of slot 0, and of a memcpy of as much."""
    times: dict[str, list[float]] = {"save": [], "load": [], "memcpy": []}
    first = server.act("block-save", name="b", p0=p0, p1=p1)
    plain = Memcpy(first["n_bytes"])
    before = device(server)
    for _ in range(repeats):
        server.act("block-drop", names=["b"])
        times["memcpy"].append(plain.ms())
        times["save"].append(server.act("block-save", name="b", p0=p0, p1=p1)["t_ms"])
        server.act("block-evict", p0=p0, p1=p1)
        times["memcpy"].append(plain.ms())
        loaded = server.act("block-load", names=["b"])
        assert loaded["same_cells"]
        times["load"].append(loaded["t_ms"])
    n_copies, n_bytes = (now - then for now, then in zip(device(server), before, strict=True))
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
        "copies": n_copies / repeats,
        "copied_mb": n_bytes / repeats / 1e6,
    }


def device(server: Llama) -> tuple[int, int]:
    """Copies between host and device so far, and their bytes; zeros where none are counted."""
    counts = server.call("GET", "/slots/0/blocks?since=latest").get("device", {})
    return counts.get("n_copies", 0), counts.get("n_bytes", 0)


def scatter(server: Llama, p0: int, p1: int, run: int = RUN) -> None:
    """Let the rows of [p0, p1) change places in runs of `run`, none beside the one before it."""
    spans = [(p, min(p + run, p1)) for p in range(p0, p1, run)]
    names = [f"run/{a}" for a, _ in spans]
    saves = [
        {"op": "save", "name": name, "p0": a, "p1": b}
        for name, (a, b) in zip(names, spans, strict=True)
    ]
    server.act("block-plan", ops=[*saves, {"op": "evict", "p0": p0, "p1": p1}])
    for name in shuffled(names, p0):
        server.act("block-load", names=[name], place="contig")
    server.act("block-drop", names=names)


def shuffled(names: Sequence[str], seed: int) -> list[str]:
    """The names in an order in which none follows the one that it follows in `names`."""
    order = list(range(len(names)))
    draw = random.Random(seed)
    while any(b == a + 1 for a, b in zip(order, order[1:], strict=False)):
        i = next(i for i in range(len(order) - 1) if order[i + 1] == order[i] + 1)
        j = draw.randrange(len(order))
        order[i], order[j] = order[j], order[i]
    return [names[i] for i in order]


def options_of(args: argparse.Namespace, fa: str) -> list[str]:
    """The options of every server."""
    threads = ["-t", str(args.threads), "-tb", str(args.threads)]
    return ["--evoke-ram", "1024", "-fa", fa, *threads, *args.server_args.split()]


def run(server: Path, model: Path, args: argparse.Namespace, fa: str) -> list[dict[str, Any]]:
    """The rows of one server with one slot."""
    filled = sum(args.sizes) + 256
    cells = (filled * 4 // 3 + 255) // 256 * 256
    options = ["-c", str(cells), "-np", "1", *options_of(args, fa)]
    rows: list[dict[str, Any]] = []
    with running(server, model, *options) as llama:
        llama.complete([10 + 7 * j % 1900 for j in range(filled)])
        for cells_are in ("contiguous", "8 runs", "64 runs", "scattered"):
            start = 64
            for size in args.sizes:
                n_rows = {"8 runs": size // 8, "64 runs": size // 64}.get(cells_are, RUN)
                if n_rows == 0 or (cells_are == "64 runs" and size % 64):
                    start += size
                    continue
                if cells_are != "contiguous":
                    scatter(llama, start, start + size, n_rows)
                row = {"fa": fa, "cells": cells_are}
                row |= measure(llama, start, start + size, args.repeats)
                bar = BARS.get((fa, cells_are)) if size >= 640 else None
                rows.append(row | {"bar": bar} | compared(row, rows))
                print(record.table(rows[-1:], _COLUMNS), flush=True)
                start += size
    return rows


def side_by_side(
    server: Path, model: Path, args: argparse.Namespace, fa: str, rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The row of a block that was generated while three other slots generated."""
    options = ["-c", "2048", "-np", "4", "-kvu", *options_of(args, fa)]
    with running(server, model, *options) as llama:

        def generate(slot: int) -> None:
            prompt = [10 + (7 + slot) * j % 1900 for j in range(32)]
            llama.complete(prompt, slot, n_predict=160, ignore_eos=True)

        with ThreadPoolExecutor(4) as clients:
            list(clients.map(generate, range(4)))
        row = {"fa": fa, "cells": FOUR_CLIENTS} | measure(llama, 96, 160, args.repeats)
    return [row | {"bar": None} | compared(row, rows)]


def compared(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The speed of a row as a share of that of the same block in one run.

    Each is first divided by the speed of the memcpy beside it, so that other load is in neither.
    """
    for one in rows:
        if (one["fa"], one["cells"], one["tokens"]) == (row["fa"], "contiguous", row["tokens"]):
            pairs = ((verb, f"{verb}_vs_memcpy") for verb in VERBS)
            return {f"{verb}_vs_one_run": row[key] / one[key] for verb, key in pairs}
    return {}


def missed(row: record.Row) -> bool:
    """Return whether a row has a bar and does not reach it."""
    worse = min(row["save_vs_memcpy"], row["load_vs_memcpy"])
    if row["cells"] in ("64 runs", FOUR_CLIENTS):
        return bool(min(row[f"{verb}_vs_one_run"] for verb in VERBS) < BAR_OF_ONE_RUN)
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
    parser.add_argument("--server-args", default="", help="more options of the server")
    args = parser.parse_args(argv)
    server = args.server or ensure_server(patched=True)
    model = ensure(SHAPES[args.shape])
    rows = []
    for fa in ("on", "off") if args.fa == "both" else (args.fa,):
        of_one = run(server, model, args, fa)
        rows += [*of_one, *side_by_side(server, model, args, fa, of_one)]
    worst = {
        f"{verb}_fa_{fa}_{cells}": min(row[f"{verb}_vs_memcpy"] for row in matching)
        for (fa, cells) in BARS
        if (matching := [r for r in rows if r["bar"] and (r["fa"], r["cells"]) == (fa, cells)])
        for verb in ("save", "load")
    }
    print(record.table(rows, _COLUMNS))
    of_one_run = {
        f"fa_{fa}_{cells.replace(' ', '_')}": min(
            row[f"{verb}_vs_one_run"]
            for row in rows
            if (row["fa"], row["cells"]) == (fa, cells)
            for verb in VERBS
        )
        for fa in dict.fromkeys(row["fa"] for row in rows)
        for cells in ("8 runs", "64 runs", FOUR_CLIENTS)
    }
    summary = {"shape": args.shape, "worst_from_640": worst, "worst_of_one_run": of_one_run}
    summary["missed"] = sum(map(missed, rows))
    print(f"written: {record.write('copies', rows, summary, args.out)}")
    return 1 if summary["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
