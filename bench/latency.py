"""What do save, load and evict cost?

* `decoding`: beside decoding the tokens of the block again as the tail of the same prompt. One
  server with one slot and a cache that is at least half full. For each block size the four
  operations take turns, round after round. First the rows are where they were decoded, then they
  are scattered over the cells in runs of 8.
* `memcpy`: beside a memcpy of the same size, by the runs of cells that a block is in, for each
  layout of V (flash attention on: rows; off: columns). The cache is three quarters full; a block is
  in one run of cells, then in runs of 8 rows, then in 8 and in 64 runs, in random order. The last
  arm is a server whose four slots share their cells and generate side by side: its runs are those
  that four clients make. The memcpy uses one thread and buffers that were touched before. On a
  server with K/V on a device the columns `copies` and `copied_mb` count what crosses to and from
  the device in a save and a load; they do not grow with the runs.
* `gpu`: as `decoding`, on an NVIDIA GPU, with models in the shapes of Qwen2.5-7B and Llama-3.1-8B,
  and beside a copy of the same size between the GPU and pinned memory (the link). `ceiling` is the
  best possible result of a save and a load at the rate of the link, compared with decoding.

Times are those that the server reports, without HTTP (`t_ms`, `prompt_ms`); results are medians.
*Against* decoding, a memcpy, the link. *Fails* when copies are slower than the bars of a part;
`decoding` never."""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.driver import SERVER, Bench, Report, Row, option, run_parts
from bench.llama import Llama, running
from bench.random_models import SHAPES, ensure
from bench.stats import spread
from evoke_proxy.server_build import BuildOptions, ensure_server

SIZES, SIZES_OF_COPIES = (20, 40, 160, 640, 1280), (64, 160, 640, 1280)
RUN = 8
FOUR_CLIENTS = "four clients"
GPU_MODELS = ("qwen2.5-7b", "llama-3.1-8b")
VERBS = ("save", "load")
# Shares of the speed of memcpy that blocks of 640 tokens and more must have.
BARS = {("on", "contiguous"): 0.8, ("on", "scattered"): 0.5,
        ("off", "contiguous"): 0.8, ("off", "scattered"): 0.15}  # fmt: skip
# Share of the speed of one run that a block in 64 runs, or as four clients make it, must have.
BAR_OF_ONE_RUN = 0.5
# Share of the speed of the link that blocks of 160 tokens and more must have.
BAR_OF_LINK, BAR_OF_LINK_FROM = 0.6, 160
_COLUMNS = (
    *("cells", "tokens", "mb", "save_ms", "evict_ms", "load_ms", "prefill_ms"),
    *("load_vs_reprefill", "save_load_vs_reprefill", "save_over_load"),
)
_MEMCPY_COLUMNS = (
    *("fa", "cells", "tokens", "runs", "mb", "memcpy_ms", "save_ms", "load_ms"),
    *("save_vs_memcpy", "load_vs_memcpy", "bar", "save_vs_one_run", "load_vs_one_run"),
    *("copies", "copied_mb"),
)
_GPU_COLUMNS = (
    *("model", "cells", "tokens", "mb", "save_ms", "load_ms", "prefill_ms", "save_vs_link"),
    *("load_vs_link", "save_load_vs_reprefill", "ceiling"),
)
_TO_GPU, _TO_HOST = 1, 2  # cudaMemcpyKind


@dataclass(frozen=True, slots=True)
class Block:
    """What is copied, and how its times are taken."""

    size: int  # tokens of the block
    filled: int  # tokens in the cache, of which the block is the end
    scattered: bool  # whether its rows are scattered over the cells
    # Whether times are those of the client, from sending a call to its whole answer.
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
        "spread": {key: spread(values) for key, values in times.items()},
        "load_vs_reprefill": middle["prefill"] / middle["load"],
        "save_load_vs_reprefill": middle["prefill"] / (middle["save"] + middle["load"]),
        "save_over_load": middle["save"] / middle["load"],
    }


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


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


def beside_decoding(llama: Llama, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each size, first contiguous, then scattered."""
    for scattered in (False, True):
        for size in args.sizes:
            filled = max(args.cells // 2, 2 * size)
            yield measure(llama, Block(size, filled, scattered), args.repeats)


def on_cpu(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of `decoding`."""
    options = ["-c", str(args.cells), "-np", "1", "--evoke-ram", "2048", "-fa", args.fa]
    options += ["-t", str(args.threads), "-tb", str(args.threads)]
    with running(args.server or ensure_server(), ensure(SHAPES[args.shape]), *options) as llama:
        yield from beside_decoding(llama, args)


def of_decoding(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the largest block where it was decoded."""
    largest = next(row for row in rows if row["tokens"] == max(args.sizes))
    names = ("load_vs_reprefill", "save_load_vs_reprefill", "save_over_load")
    summary = {"shape": args.shape, "kv_bytes_per_token": SHAPES[args.shape].kv_bytes}
    return Report(summary | {f"{name}_{largest['tokens']}": largest[name] for name in names})


def copied(server: Llama, p0: int, p1: int, repeats: int) -> dict[str, Any]:
    """Medians of saving and loading [p0, p1) of slot 0, and of a memcpy of as much."""
    times: dict[str, list[float]] = {"save": [], "load": [], "memcpy": []}
    first = server.act("block-save", name="b", p0=p0, p1=p1)
    n = first["n_bytes"]  # the pages of both buffers are present
    source, target = (ctypes.create_string_buffer(b"x" * n, n) for _ in range(2))

    def memcpy_ms() -> float:
        began = time.perf_counter()
        ctypes.memmove(target, source, n)
        return _ms_since(began)

    before = device(server)
    for _ in range(repeats):
        server.act("block-drop", names=["b"])
        times["memcpy"].append(memcpy_ms())
        times["save"].append(server.act("block-save", name="b", p0=p0, p1=p1)["t_ms"])
        server.act("block-evict", p0=p0, p1=p1)
        times["memcpy"].append(memcpy_ms())
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
        "spread": {key: spread(values) for key, values in times.items()},
        "save_vs_memcpy": middle["memcpy"] / middle["save"],
        "load_vs_memcpy": middle["memcpy"] / middle["load"],
        "copies": n_copies / repeats,
        "copied_mb": n_bytes / repeats / 1e6,
    }


def device(server: Llama) -> tuple[int, int]:
    """Copies between host and device so far, and their bytes; zeros where none are counted."""
    counts = server.call("GET", "/slots/0/blocks?since=latest").get("device", {})
    return counts.get("n_copies", 0), counts.get("n_bytes", 0)


def beside_memcpy(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of `memcpy`: of a server with one slot, then of one with four."""
    server, model = args.server or ensure_server(), ensure(SHAPES[args.shape])
    threads = ["-t", str(args.threads), "-tb", str(args.threads)]
    for fa in ("on", "off") if args.fa == "both" else (args.fa,):
        options = ["--evoke-ram", "1024", "-fa", fa, *threads, *args.server_args.split()]
        rows: list[dict[str, Any]] = []
        filled = sum(args.sizes) + 256
        cells = (filled * 4 // 3 + 255) // 256 * 256
        with running(server, model, "-c", str(cells), "-np", "1", *options) as llama:
            llama.complete([10 + 7 * j % 1900 for j in range(filled)])
            for row in _by_runs(llama, args):
                bar = BARS.get((fa, row["cells"])) if row["tokens"] >= 640 else None
                rows.append({"fa": fa, **row, "bar": bar, **_of_one_run(row, rows)})
                yield rows[-1]
        with running(server, model, "-c", "2048", "-np", "4", "-kvu", *options) as llama:
            row = {"cells": FOUR_CLIENTS, **_side_by_side(llama, args.repeats)}
            yield {"fa": fa, **row, "bar": None, **_of_one_run(row, rows)}


def _by_runs(llama: Llama, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of blocks that are scattered in runs of several lengths."""
    for cells in ("contiguous", "8 runs", "64 runs", "scattered"):
        start = 64
        for size in args.sizes:
            n_rows = {"8 runs": size // 8, "64 runs": size // 64}.get(cells, RUN)
            if n_rows and not (cells == "64 runs" and size % 64):
                if cells != "contiguous":
                    scatter(llama, start, start + size, n_rows)
                yield {"cells": cells, **copied(llama, start, start + size, args.repeats)}
            start += size


def _side_by_side(llama: Llama, repeats: int) -> dict[str, Any]:
    """Measure a block that was generated while three other slots generated."""

    def generate(slot: int) -> None:
        prompt = [10 + (7 + slot) * j % 1900 for j in range(32)]
        llama.complete(prompt, slot, n_predict=160, ignore_eos=True)

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(generate, range(4)))
    return copied(llama, 96, 160, repeats)


def _of_one_run(row: Row, rows: Sequence[Row]) -> dict[str, float]:
    """The speed of a row as a share of that of the same block in one run.

    Each is first divided by the speed of the memcpy beside it, so that other load is in neither.
    """
    keys = {f"{verb}_vs_one_run": f"{verb}_vs_memcpy" for verb in VERBS}
    one = next((r for r in rows if r["tokens"] == row["tokens"]), row)
    if one is row and row["cells"] != "contiguous":
        return {}
    return {name: row[key] / one[key] for name, key in keys.items()}


def of_memcpy(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the slowest of each layout, and the rows that miss their bars."""
    worst = {
        f"{verb}_fa_{fa}_{cells}": min(row[f"{verb}_vs_memcpy"] for row in matching)
        for (fa, cells) in BARS
        if (matching := [r for r in rows if r["bar"] and (r["fa"], r["cells"]) == (fa, cells)])
        for verb in VERBS
    }
    of_one_run: dict[str, float] = {}
    for row in rows:
        if row["cells"] in ("8 runs", "64 runs", FOUR_CLIENTS) and "save_vs_one_run" in row:
            name = f"fa_{row['fa']}_{row['cells'].replace(' ', '_')}"
            of_one_run[name] = min(of_one_run.get(name, math.inf), _share_of_one_run(row))
    missed = [f"{r['tokens']} tokens, {r['cells']}, -fa {r['fa']}" for r in rows if _misses(r)]
    summary = {"shape": args.shape, "worst_from_640": worst, "worst_of_one_run": of_one_run}
    return Report({**summary, "missed": len(missed)}, missed)


def _share_of_one_run(row: Row) -> float:
    return min(float(row[f"{verb}_vs_one_run"]) for verb in VERBS)


def _misses(row: Row) -> bool:
    if row["cells"] in ("64 runs", FOUR_CLIENTS):  # a block of 64 tokens in one run may be missing
        return "save_vs_one_run" in row and _share_of_one_run(row) < BAR_OF_ONE_RUN
    worse = min(row["save_vs_memcpy"], row["load_vs_memcpy"])
    return row["bar"] is not None and worse < row["bar"]


class Link:
    """Copies between the GPU and pinned memory, by the CUDA runtime itself."""

    def __init__(self, n_bytes: int) -> None:
        name = ctypes.util.find_library("cudart") or "libcudart.so"
        self._cuda, self._n = ctypes.CDLL(name), n_bytes
        self._host, self._gpu = ctypes.c_void_p(), ctypes.c_void_p()
        size = ctypes.c_size_t(n_bytes)
        self._insist(self._cuda.cudaMallocHost(ctypes.byref(self._host), size))
        self._insist(self._cuda.cudaMalloc(ctypes.byref(self._gpu), size))

    def close(self) -> None:
        self._cuda.cudaFree(self._gpu)
        self._cuda.cudaFreeHost(self._host)

    def ms(self, repeats: int) -> tuple[float, float]:
        """Medians of a copy from the GPU and of one to it."""
        return self._median(_TO_HOST, repeats), self._median(_TO_GPU, repeats)

    def _median(self, kind: int, repeats: int) -> float:
        source, target = (self._gpu, self._host) if kind == _TO_HOST else (self._host, self._gpu)
        times = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            self._insist(self._cuda.cudaMemcpy(target, source, ctypes.c_size_t(self._n), kind))
            self._insist(self._cuda.cudaDeviceSynchronize())
            times.append(_ms_since(began))
        return statistics.median(times[1:])

    @staticmethod
    def _insist(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA says {error}")


def against_link(row: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """Add the rate of the link, for the same number of bytes, to a row of `decoding`."""
    with closing(Link(round(row["mb"] * 1e6))) as link:
        save_ms, load_ms = link.ms(repeats)
    return dict(row) | {
        "link_save_ms": save_ms,
        "link_load_ms": load_ms,
        "save_vs_link": save_ms / row["save_ms"],
        "load_vs_link": load_ms / row["load_ms"],
        "ceiling": row["prefill_ms"] / (save_ms + load_ms),
    }


def on_gpu(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of each model; RuntimeError when host memory is not pinned."""
    server: Path = args.server or ensure_server(options=BuildOptions(backend="cuda"))
    options = ["-c", str(args.cells), "-np", "1", "--evoke-ram", "2048", "-ngl", "999"]
    for model in args.models:
        with running(server, ensure(SHAPES[model]), *options, "-fa", args.fa) as llama:
            if not llama.call("GET", "/props")["evoke"]["limits"]["pinned"]:
                raise RuntimeError("llama-server says that its host memory is not pinned")
            for row in beside_decoding(llama, args):
                yield {"model": model, **against_link(row, args.repeats)}


def of_gpu(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the blocks that are copied slower than the bar, wherever their cells are."""
    missed = [
        f"{row['model']}, {row['tokens']} tokens, {row['cells']}"
        for row in rows
        if row["tokens"] >= BAR_OF_LINK_FROM
        if min(row["save_vs_link"], row["load_vs_link"]) < BAR_OF_LINK
    ]
    return Report({"models": args.models, "bar": BAR_OF_LINK, "missed": len(missed)}, missed)


_SHAPE = option("--shape", "qwen2.5-7b-kv", choices=sorted(SHAPES))
_THREADS = option("--threads", 1, "of the server")
_FA = option("--fa", "on", "flash attention", choices=("on", "off"))
PARTS = {
    "decoding": Bench(
        "latency", __doc__, "--repeats 9 --fa off", on_cpu, of_decoding, _COLUMNS,
        (SERVER, _SHAPE, _THREADS, _FA, option("--repeats", 5, "of each block"),
         option("--cells", 4096, "of the cache"), option("--sizes", SIZES, "tokens of blocks")),
    ),
    "memcpy": Bench(
        "latency memcpy", __doc__, "--repeats 31", beside_memcpy, of_memcpy, _MEMCPY_COLUMNS,
        (SERVER, _SHAPE, _THREADS, option("--repeats", 15, "of each block"),
         option("--fa", "both", "flash attention", choices=("on", "off", "both")),
         option("--sizes", SIZES_OF_COPIES, "tokens of blocks"),
         option("--server-args", "", "more options of the server")),
    ),
    "gpu": Bench(
        "latency gpu", __doc__, "--repeats 21", on_gpu, of_gpu, _GPU_COLUMNS,
        (SERVER, _FA, option("--models", GPU_MODELS, choices=sorted(SHAPES)),
         option("--repeats", 9, "of each block"), option("--cells", 16384, "of the cache"),
         option("--sizes", SIZES, "tokens of blocks")),
    ),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, ["decoding"]))
