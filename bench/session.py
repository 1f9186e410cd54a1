"""What time does a budget cost, in a long conversation and in many at once?

Long: one conversation of many turns through the proxy, under `evoke` with a budget of a quarter of
its length and under `no_eviction`, in pairs; which is first alternates. Result: the median of the
ratios of wall time. The same turns are also sent directly to the server (`direct`).

Many: as many conversations at once as the server has slots; each sends its next turn as soon as it
has its answer. Result: generated tokens per second through the proxy with a budget, divided by
those of the same server without the proxy, in pairs.

The model has 24 layers and random weights. Answers have a fixed length, and the resent history has
fixed answers, so that every arm has the same prompts."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import record
from bench.chat_turns import proxied
from bench.random_models import SHAPES, ensure
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.demo.session import paragraph
from evoke_proxy.server_build import ensure_server

_TURN_TOKENS = 90  # about what a turn adds to the history
_SENTENCES, _ANSWER_SENTENCES = 5, 3
_COLUMNS = (
    *("part", "arm", "repeat", "wall_s", "turns", "generated", "tokens_per_s", "prompt"),
    *("decoded", "recovered", "peak"),
)
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


def long(args: argparse.Namespace, say: Callable[[Any], None]) -> list[dict[str, Any]]:
    """Run the long conversation `repeats` times in every arm, each on a server of its own."""
    size = args.turns * _TURN_TOKENS
    options = ["-np", "1", "-c", str(2 * size + 4096), "--evoke-ram", "2048"]
    by_name, rows = arms(size // 4), []
    for repeat in range(args.repeats):
        order = ["evoke", "no_eviction", "direct"]
        for name in order if repeat % 2 else reversed(order):
            with _server(args, options) as port, _front(port, by_name[name]) as front:
                began = time.perf_counter()
                total = converse(front, by_name[name], repeat, args.turns, args.answer)
                wall = time.perf_counter() - began
            head = {"part": "long", "arm": name, "repeat": repeat}
            rows.append(head | _timed(wall, args.turns, total))
            say(rows[-1:])
    return rows


def many(args: argparse.Namespace, say: Callable[[Any], None]) -> list[dict[str, Any]]:
    """Run many conversations at once, `repeats` times in every arm, each on a server of its own."""
    size = args.each * _TURN_TOKENS
    cells = args.sessions * (2 * size + 256)
    options = ["-np", str(args.sessions), "-c", str(cells), "-no-kvu", "--evoke-ram", "2048"]
    # Half of the history: enough to evict in every conversation.
    by_name, rows = arms(max(320, size // 2)), []
    for repeat in range(args.repeats):
        order = ["evoke", "direct"]
        for name in order if repeat % 2 else reversed(order):
            with _server(args, options) as port, _front(port, by_name[name]) as front:
                wall, total = _at_once(front, by_name[name], repeat, args)
            turns = args.sessions * args.each
            head = {"part": "many", "arm": name, "repeat": repeat}
            rows.append(head | _timed(wall, turns, total))
            say(rows[-1:])
    return rows


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
    port, threads = free_port(), str(args.threads)
    where = ["--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads]
    command = [str(args.server or ensure_server()), "-m", str(ensure(SHAPES[args.model])), *where]
    with tempfile.TemporaryDirectory() as folder:
        with serving([*command, *options], port, Path(folder) / "llama-server.log"):
            yield port


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
        summary["long_spread"] = record.spread(long_ratios)
    shared = _ratios(rows, "many", "evoke", "direct", "tokens_per_s")
    if shared:
        summary["many_tokens_per_s_proxied_over_direct"] = statistics.median(shared)
        summary["many_spread"] = record.spread(shared)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/session.json`; 0 when the bars are reached."""
    args = _parser().parse_args(argv)

    def say(rows: Sequence[Mapping[str, Any]]) -> None:
        print(record.table(rows, _COLUMNS).splitlines()[-1], flush=True)

    rows = [*(long(args, say) if args.turns else ()), *(many(args, say) if args.each else ())]
    summary = summarise(rows)
    print(record.table(rows, _COLUMNS))
    record.tell("session", rows, summary, args.out)
    return 0 if reached(summary) else 1


def _parser() -> argparse.ArgumentParser:
    parser = record.parser("session", __doc__, "--turns 14 --each 2 --repeats 1")
    free = max(1, (os.cpu_count() or 2) - 1)
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: our build)")
    parser.add_argument("--model", choices=sorted(SHAPES), default="deep-24")
    parser.add_argument(
        "--turns", type=int, default=56, help="turns of the long conversation, 0: none (56)"
    )
    parser.add_argument("--sessions", type=int, default=16, help="conversations at once (16)")
    parser.add_argument("--each", type=int, default=6, help="turns of each of these, 0: none (6)")
    parser.add_argument("--answer", type=int, default=32, help="tokens of every answer (32)")
    parser.add_argument("--repeats", type=int, default=3, help="pairs to take the median of (3)")
    parser.add_argument(
        "--threads", type=int, default=free, help="of the server; one core is the proxy's"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
