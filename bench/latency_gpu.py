"""What do save, load and evict cost on an NVIDIA GPU, compared with the link and with decoding?

Builds the patched server with CUDA and writes two models with random weights, in the shapes of
Qwen2.5-7B and Llama-3.1-8B. Beside each block a copy of the same size between the GPU and pinned
memory is timed. `ceiling` is the best possible result of a save and a load at that rate, compared
with decoding the tokens again."""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.latency import SIZES, Block, measure
from bench.llama import running
from bench.random_models import SHAPES, ensure
from evoke_proxy.server_build import BuildOptions, ensure_server

MODELS = ("qwen2.5-7b", "llama-3.1-8b")
# The share of the rate of the link that blocks of 160 tokens and more must reach.
BAR, BAR_FROM = 0.6, 160
_COLUMNS = (
    *("model", "cells", "tokens", "mb", "save_ms", "load_ms", "prefill_ms", "save_vs_link"),
    *("load_vs_link", "save_load_vs_reprefill", "ceiling"),
)
_TO_GPU, _TO_HOST = 1, 2  # cudaMemcpyKind


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
            times.append((time.perf_counter() - began) * 1000)
        return statistics.median(times[1:])

    @staticmethod
    def _insist(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA says {error}")


def against_link(row: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Add the rate of the link, for the same number of bytes, to a row of `latency`."""
    link = Link(round(row["mb"] * 1e6))
    try:
        save_ms, load_ms = link.ms(repeats)
    finally:
        link.close()
    return row | {
        "link_save_ms": save_ms,
        "link_load_ms": load_ms,
        "save_vs_link": save_ms / row["save_ms"],
        "load_vs_link": load_ms / row["load_ms"],
        "ceiling": row["prefill_ms"] / (save_ms + load_ms),
    }


def run(server: Path, shape: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model; RuntimeError when host memory is not pinned."""
    rows = []
    options = ["-c", str(args.cells), "-np", "1", "--evoke-ram", "2048", "-ngl", "999"]
    with running(server, ensure(SHAPES[shape]), *options, "-fa", args.fa) as llama:
        if not llama.call("GET", "/props")["evoke"]["limits"]["pinned"]:
            raise RuntimeError("llama-server says that its host memory is not pinned")
        for scattered in (False, True):
            for size in args.sizes:
                filled = max(args.cells // 2, 2 * size)
                row = measure(llama, Block(size, filled, scattered), args.repeats)
                rows.append({"model": shape} | against_link(row, args.repeats))
                print(record.table(rows[-1:], _COLUMNS), flush=True)
    return rows


def missed(row: record.Row) -> bool:
    """Return whether a row has a bar and misses it."""
    has_bar = row["tokens"] >= BAR_FROM and row["cells"] == "contiguous"
    return bool(has_bar and min(row["save_vs_link"], row["load_vs_link"]) < BAR)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/latency_gpu.json`; 1 when the bar is missed."""
    parser = record.parser("latency_gpu", __doc__, "--repeats 21")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cells", type=int, default=16384, help="cells of the cache (16384)")
    parser.add_argument("--fa", choices=("on", "off"), default="on", help="flash attention")
    parser.add_argument("--server", type=Path, help="a patched llama-server built with CUDA")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    args = parser.parse_args(argv)
    server = args.server or ensure_server(options=BuildOptions(backend="cuda"))
    rows = [row for model in args.models for row in run(server, model, args)]
    print(record.table(rows, _COLUMNS))
    summary = {"models": args.models, "bar": BAR, "missed": sum(map(missed, rows))}
    print(f"written: {record.write('latency_gpu', rows, summary, args.out)}")
    return 1 if summary["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
