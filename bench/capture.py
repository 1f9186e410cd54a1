"""How much longer does a generated token take when attention is captured?

Compares 0, 1, 4 and 16 captured layers of 24, evenly spread, on one server for each shape and
setting of flash attention. Each round generates a few tokens with every number of layers; the order
rotates. The overhead is the median over the rounds of the time with capture divided by the time
without. Times are processor time of the server, so that other load counts little; `wall_ms` is the
server's wall time. The limits apply to the shape of a real model at 1,536 tokens: the layers of
`deep-24` are so narrow that half of its work is attention. Linux only."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.decode import cpu_s, process
from bench.llama import Llama, running
from bench.random_models import SHAPES, ensure
from evoke_proxy.server_build import ensure_server

LAYERS = (0, 1, 4, 16)
# Percent of a generated token's time at the short context.
BARS = {1: 2.0, 4: 4.0, 16: 10.0}
CASES = ("qwen2.5-0.5b:1536", "qwen2.5-0.5b:16384", "deep-24:1536", "deep-24:16384")
BOUNDED_CASE = CASES[0]
_DECODED = 1526
_COLUMNS = ("case", "fa", "layers", "cpu_ms", "wall_ms", "overhead_percent", "quartiles")


def measure(
    server: Llama, n_layers: int, context: int, rounds: int, n: int
) -> list[dict[str, Any]]:
    """One row a number of layers."""
    prompt = _filled(server, context - n)
    folder = process(server.port)
    times: dict[int, list[float]] = {count: [] for count in LAYERS}
    walls: dict[int, list[float]] = {count: [] for count in LAYERS}
    for i in range(rounds + 1):
        for count in (*LAYERS[i % len(LAYERS) :], *LAYERS[: i % len(LAYERS)]):
            chosen = [n_layers * k // count for k in range(count)]
            server.act("attn-capture", layers=chosen)
            began = cpu_s(folder)
            answer = server.complete(prompt, n_predict=n, ignore_eos=True)
            if i > 0:  # the first round only warms up
                times[count].append(1000 * (cpu_s(folder) - began) / n)
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
    """A prompt whose rows are in the cache: a short one is decoded, and put behind itself again and
    again. What attention costs is the same for any rows."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; 1 when a bar is missed."""
    parser = record.parser("capture", __doc__, "--rounds 40 --cases deep-24:1536")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="SHAPE:CONTEXT ...")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=10, help="generated in each turn (10)")
    parser.add_argument("--fa", choices=("on", "off"), nargs="+", default=["on", "off"])
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: the cache)")
    args = parser.parse_args(argv)
    server = args.server or ensure_server(patched=True)
    rows: list[dict[str, Any]] = []
    for case in args.cases:
        for flash in args.fa:
            times_ms = _case(server, case, flash, args.rounds, args.tokens)
            rows += [{"case": case, "fa": flash} | row for row in times_ms]
            print(record.table(rows[-len(LAYERS) :], _COLUMNS), flush=True)
    print(record.table(rows, _COLUMNS))
    missed = [_named(row) for row in rows if _misses(row)]
    summary: dict[str, Any] = {_named(row): row["overhead_percent"] for row in rows}
    print(f"written: {record.write('capture', rows, summary | {'missed': missed}, args.out)}")
    return 1 if missed else 0


def _case(server: Path, case: str, flash: str, rounds: int, n: int) -> list[dict[str, Any]]:
    name, context = case.split(":")
    shape = SHAPES[name]
    options = (
        "-c",
        str(int(context) + 2 * _DECODED),
        "-np",
        "1",
        "--evoke-ram",
        "64",
        "-fa",
        flash,
    )
    with running(server, ensure(shape), *options, "-t", "1") as llama:
        return measure(llama, shape.layers, int(context), rounds, n)


def _named(row: dict[str, Any]) -> str:
    return f"{row['case']}_fa_{row['fa']}_layers_{row['layers']}_percent"


def _misses(row: dict[str, Any]) -> bool:
    bar = BARS.get(row["layers"]) if row["case"] == BOUNDED_CASE else None
    return bar is not None and row["overhead_percent"] > bar


if __name__ == "__main__":
    sys.exit(main())
