"""What time does a budget cost, in a long conversation and in many at once?

Long: one conversation of many turns through the proxy, under `evoke` with a budget of a quarter of
its length and under `no_eviction`, in pairs; which is first alternates. Result: the median of the
ratios of wall time. The same turns are also sent directly to the server (`direct`).

Many: as many conversations at once as the server has slots; each sends its next turn as soon as it
has its answer. Result: generated tokens per second through the proxy with a budget, divided by
those of the same server without the proxy, in pairs.

The model has 24 layers and random weights. Answers have a fixed length, and the resent history has
fixed answers, so that every arm has the same prompts.

*Against* the proxy without a budget, and llama-server directly. *Fails* above 1.05 times the time
of the first, or below 0.95 of the tokens per second of the second."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.driver import SERVER, Bench, Report, Row, option
from bench.llama import proxied, running
from bench.random_models import SHAPES, ensure
from bench.stats import spread
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.session import paragraph
from evoke_proxy.server_build import ensure_server

_TURN_TOKENS = 90  # about what a turn adds to the history
_SENTENCES, _ANSWER_SENTENCES = 5, 3
LONG_MOST, MANY_LEAST = 1.05, 0.95


@dataclass(frozen=True, slots=True)
class Arm:
    """How requests reach the server.

    Attributes:
        name: The name of the arm in rows.
        proxied: Whether requests go through the proxy.
        fields: Fields that are added to each request.
    """

    name: str
    proxied: bool
    fields: Mapping[str, Any]


def arms(budget: int) -> dict[str, Arm]:
    """Return the three arms by name."""
    return {
        "direct": Arm("direct", False, {}),
        "no_eviction": Arm("no_eviction", True, {"evoke_policy": "no_eviction"}),
        "evoke": Arm("evoke", True, {"evoke_policy": "evoke", "evoke_budget": budget}),
    }


def converse(port: int, arm: Arm, seed: int, turns: int, answer: int) -> dict[str, int]:
    """Run one conversation turn by turn and return its token counts."""
    rng = random.Random(f"session-{seed}")
    messages = [{"role": "system", "content": "You are a small assistant. Be brief."}]
    headers = {"X-Evoke-Session": f"{arm.name}-{seed}"} if arm.proxied else {}
    total = {"generated": 0, "prompt": 0, "decoded": 0, "recovered": 0, "peak": 0}
    for _ in range(turns):
        messages.append({"role": "user", "content": paragraph(rng, _SENTENCES)})
        body = {
            "messages": messages,
            "temperature": 0,
            "max_tokens": answer,
            "ignore_eos": True,
            **arm.fields,
        }
        timings = chat(port, body, headers).timings
        usage = timings.get("evoke") or {}
        total["generated"] += int(timings["predicted_n"])
        total["decoded"] += int(timings["prompt_n"])
        total["prompt"] = int(usage.get("n_prompt", timings["prompt_n"] + timings["cache_n"]))
        total["recovered"] += int(usage.get("recovered", 0))
        total["peak"] = max(total["peak"], int(usage.get("n_resident_peak", total["prompt"])))
        said = paragraph(rng, _ANSWER_SENTENCES)
        messages.append({"role": "assistant", "content": said})
    return total


def long(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each run of the long conversation, each on a server of its own."""
    size = args.turns * _TURN_TOKENS
    options = ["-np", "1", "-c", str(2 * size + 4096), "--evoke-ram", "2048"]
    by_name = arms(size // 4)
    for repeat in range(args.repeats):
        order = ["evoke", "no_eviction", "direct"]
        for name in order if repeat % 2 else reversed(order):
            with _server(args, options) as port, _front(port, by_name[name]) as front:
                began = time.perf_counter()
                total = converse(front, by_name[name], repeat, args.turns, args.answer)
                wall = time.perf_counter() - began
            head = {"part": "long", "arm": name, "repeat": repeat}
            yield head | _timed(wall, args.turns, total)


def many(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each run of many conversations at once, each on a server of its own."""
    size = args.each * _TURN_TOKENS
    cells = args.sessions * (2 * size + 256)
    options = ["-np", str(args.sessions), "-c", str(cells), "-no-kvu", "--evoke-ram", "2048"]
    # Half of the history: enough to evict in every conversation.
    by_name = arms(max(320, size // 2))
    for repeat in range(args.repeats):
        order = ["evoke", "direct"]
        for name in order if repeat % 2 else reversed(order):
            with _server(args, options) as port, _front(port, by_name[name]) as front:
                wall, total = _at_once(front, by_name[name], repeat, args)
            turns = args.sessions * args.each
            head = {"part": "many", "arm": name, "repeat": repeat}
            yield head | _timed(wall, turns, total)


def _at_once(
    port: int, arm: Arm, repeat: int, args: argparse.Namespace
) -> tuple[float, dict[str, int]]:
    seeds = [1000 * (repeat + 1) + i for i in range(args.sessions)]
    began = time.perf_counter()
    with ThreadPoolExecutor(args.sessions) as pool:
        jobs = [pool.submit(converse, port, arm, s, args.each, args.answer) for s in seeds]
        found = [job.result() for job in jobs]
    wall = time.perf_counter() - began
    total = {name: sum(one[name] for one in found) for name in found[0]}
    return wall, {**total, "peak": max(one["peak"] for one in found)}


def _timed(wall: float, turns: int, total: Mapping[str, int]) -> dict[str, Any]:
    """The columns of a row that are measured: `wall` in seconds, counts, tokens per second."""
    speed = total["generated"] / wall
    return {"wall_s": round(wall, 3), "turns": turns, **total, "tokens_per_s": round(speed, 2)}


@contextmanager
def _server(args: argparse.Namespace, options: Sequence[str]) -> Iterator[int]:
    binary, model, threads = args.server or ensure_server(), SHAPES[args.model], str(args.threads)
    options = ("-t", threads, "-tb", threads, *options)
    with running(binary, ensure(model), *options, saves=False) as llama:
        yield llama.port


@contextmanager
def _front(port: int, arm: Arm) -> Iterator[int]:
    if not arm.proxied:
        yield port
        return
    with proxied(port) as proxy:
        yield proxy.port


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians over the repeats that the bars apply to, with minimum and maximum."""
    summary: dict[str, Any] = {}
    long_ratios = _ratios(rows, "long", "evoke", "no_eviction", "wall_s")
    if long_ratios:
        summary["long_wall_evoke_over_no_eviction"] = statistics.median(long_ratios)
        direct = _ratios(rows, "long", "evoke", "direct", "wall_s")
        summary["long_wall_evoke_over_direct"] = statistics.median(direct)
        summary["long_spread"] = spread(long_ratios)
    shared = _ratios(rows, "many", "evoke", "direct", "tokens_per_s")
    if shared:
        summary["many_tokens_per_s_proxied_over_direct"] = statistics.median(shared)
        summary["many_spread"] = spread(shared)
    return summary


def _ratios(
    rows: Sequence[Mapping[str, Any]], part: str, above: str, below: str, name: str
) -> list[float]:
    values = {(row["part"], row["arm"], row["repeat"]): float(row[name]) for row in rows}
    repeats = sorted({repeat for found, arm, repeat in values if (found, arm) == (part, above)})
    return [values[part, above, i] / values[part, below, i] for i in repeats]


def reached(summary: Mapping[str, Any]) -> bool:
    """Return whether the bars are reached."""
    long_ratio = summary.get("long_wall_evoke_over_no_eviction", 0.0)
    shared = summary.get("many_tokens_per_s_proxied_over_direct", 1.0)
    return bool(long_ratio <= LONG_MOST and shared >= MANY_LEAST)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of both parts."""
    if args.turns:
        yield from long(args)
    if args.each:
        yield from many(args)


def report(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the medians that the bars apply to."""
    summary = summarise(rows)
    bars = f"long at most {LONG_MOST}, many at least {MANY_LEAST}"
    return Report(summary, [] if reached(summary) else [bars])


BENCH = Bench(
    "session", __doc__, "--turns 14 --each 2 --repeats 1", measure, report,
    ("part", "arm", "repeat", "wall_s", "turns", "generated", "tokens_per_s", "prompt",
     "decoded", "recovered", "peak"),
    (SERVER, option("--model", "deep-24", choices=sorted(SHAPES)),
     option("--turns", 56, "turns of the long conversation, 0: none"),
     option("--sessions", 16, "conversations at once"),
     option("--each", 6, "turns of each of these, 0: none"),
     option("--answer", 32, "tokens of every answer"),
     option("--repeats", 3, "pairs to take the median of"),
     option("--threads", max(1, (os.cpu_count() or 2) - 1), "of the server; one core is free")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
