"""How much longer does a generated token take when attention is captured?

Compares 0, 1, 4 and 16 captured layers of 24, evenly spread, on one server for each shape and
setting of flash attention. Each round generates a few tokens with every number of layers; the order
rotates. The overhead is the median over the rounds of the time with capture divided by the time
without. Times are processor time of the server, so that other load counts little; `wall_ms` is the
server's wall time. The limits apply to the shape of a real model at 1,536 tokens: the layers of
`deep-24` are so narrow that half of its work is attention. Linux only.

*Against* generation without capture. *Fails* above 2, 4 and 10 % with 1, 4 and 16 layers."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.driver import SERVER, Bench, Report, Row, option
from bench.llama import Llama, running
from bench.random_models import SHAPES, ensure
from evoke_proxy.server_build import ensure_server

LAYERS = (0, 1, 4, 16)
# Percent of a generated token's time at the short context.
BARS = {1: 2.0, 4: 4.0, 16: 10.0}
CASES = ("qwen2.5-0.5b:1536", "qwen2.5-0.5b:16384", "deep-24:1536", "deep-24:16384")
BOUNDED_CASE = CASES[0]
_DECODED = 1526


def measure(
    server: Llama, n_layers: int, context: int, rounds: int, n: int
) -> list[dict[str, Any]]:
    """One row a number of layers."""
    prompt = _filled(server, context - n)
    times: dict[int, list[float]] = {count: [] for count in LAYERS}
    walls: dict[int, list[float]] = {count: [] for count in LAYERS}
    for i in range(rounds + 1):
        for count in (*LAYERS[i % len(LAYERS) :], *LAYERS[: i % len(LAYERS)]):
            chosen = [n_layers * k // count for k in range(count)]
            server.act("attn-capture", layers=chosen)
            began = server.cpu_s()
            answer = server.complete(prompt, n_predict=n, ignore_eos=True)
            if i > 0:  # the first round only warms up
                times[count].append(1000 * (server.cpu_s() - began) / n)
                walls[count].append(answer["timings"]["predicted_per_token_ms"])
    return [
        {
            "layers": count,
            "cpu_ms": statistics.median(times_ms),
            "wall_ms": statistics.median(walls[count]),
            "overhead_percent": 100 * (statistics.median(_ratios(times_ms, times[0])) - 1),
            "quartiles": _quartiles(_ratios(times_ms, times[0])),
            "repeats": times_ms,
        }
        for count, times_ms in times.items()
    ]


def _filled(server: Llama, length: int) -> list[int]:
    """Return a prompt whose rows are in the cache.

    A short one is decoded, and put behind itself until it is long enough: what attention costs is
    the same for any rows.
    """
    part = [10 + (7 * j) % 1900 for j in range(min(length, _DECODED))]
    server.complete(part)
    server.act("block-save", name="part", p0=0, p1=len(part))
    prompt = list(part)
    while len(prompt) < length:
        server.act("block-load", names=["part"], at=len(prompt))
        prompt += part
    return prompt[:length]


def _ratios(times_ms: Sequence[float], without: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(times_ms, without, strict=True)]


def _quartiles(ratios: Sequence[float]) -> str:
    first, _, last = statistics.quantiles(ratios, n=4)
    return f"{100 * (first - 1):.1f} .. {100 * (last - 1):.1f}"


def cases(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of each case, with flash attention and without."""
    server = args.server or ensure_server()
    for case in args.cases:
        name, context = case.split(":")
        shape, cells = SHAPES[name], int(context) + 2 * _DECODED
        for flash in args.fa:
            options = ("-c", str(cells), "-np", "1", "--evoke-ram", "64", "-fa", flash, "-t", "1")
            with running(server, ensure(shape), *options) as llama:
                for row in measure(llama, shape.layers, int(context), args.rounds, args.tokens):
                    yield {"case": case, "fa": flash, **row}


def report(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the overhead of each row, and those that miss their bars."""
    named = {f"{r['case']}_fa_{r['fa']}_layers_{r['layers']}_percent": r for r in rows}
    missed = [
        name
        for name, row in named.items()
        if row["case"] == BOUNDED_CASE
        and row["overhead_percent"] > BARS.get(row["layers"], float("inf"))
    ]
    overheads = {name: row["overhead_percent"] for name, row in named.items()}
    return Report({**overheads, "missed": missed}, missed)


BENCH = Bench(
    "capture", __doc__, "--rounds 40 --cases deep-24:1536", cases, report,
    ("case", "fa", "layers", "cpu_ms", "wall_ms", "overhead_percent", "quartiles"),
    (SERVER, option("--cases", CASES, "SHAPE:CONTEXT"), option("--rounds", 20),
     option("--tokens", 10, "generated in each turn"),
     option("--fa", ("on", "off"), "flash attention", choices=("on", "off"))),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
