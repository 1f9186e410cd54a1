"""How often does the bundled model recall the demo's fact when nothing is evicted?

Runs the demo's sessions turn by turn against a stock llama-server, without the proxy. Each final
question is asked twice: with the whole history, and without the turn that states the fact, where
the value must not be answered. The first share is the ceiling to compare every other arm with."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import record
from bench.quality import stats
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.processes import free_port, server_command, serving
from evoke_proxy.demo.runner import MAX_TOKENS, recalled
from evoke_proxy.demo.session import draw
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

_EXAMPLES = """examples:
  python -m bench.ceiling
  python -m bench.ceiling --server build/bin/llama-server --seeds 200 --first 1000
"""
Messages = Sequence[Mapping[str, str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; 0 when the ceiling is at least --least."""
    args = _parser().parse_args(argv)
    server = args.server or ensure_server(patched=False)
    rows = measure(server, range(args.first, args.first + args.seeds), args.threads)
    summary = summarise(rows)
    _print(rows, summary)
    print(f"written: {record.write('ceiling', rows, summary, args.out)}")
    return 0 if summary["ceiling"] >= args.least and not summary["without_fact"] else 1


def measure(
    server: Path, seeds: Sequence[int], threads: int, options: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Run the sessions of the seeds one after the other and return a row for each."""
    with served(server, bundled_model(), threads, options) as port:
        return [_row(port, seed) for seed in seeds]


@contextmanager
def served(server: Path, model: Path, threads: int, options: Sequence[str] = ()) -> Iterator[int]:
    """The port of a server without blocks, which runs until the block is left."""
    port = free_port()
    command = [*server_command(server, model, port, blocks=False), *options]
    command[command.index("-t") + 1] = str(threads)
    with tempfile.TemporaryDirectory() as folder:
        with serving(command, port, Path(folder) / "llama-server.log"):
            yield port


def _row(port: int, seed: int) -> dict[str, Any]:
    script = draw(seed)
    messages = [{"role": "system", "content": script.system}]
    answers: list[str] = []
    for turn in script.turns:
        messages.append({"role": "user", "content": turn})
        answer, tokens = _ask(port, messages)
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer})
    # The system message stays; the planting turn and its answer go.
    without, _ = _ask(port, [messages[0], *messages[3:-1]])
    value = script.fact.value
    return {
        "seed": seed,
        "fact": script.fact.statement,
        "tokens": tokens,
        "turns": len(script.turns),
        "answer": answers[-1],
        "recalled": recalled(answers[-1], value),
        "repeated_early": any(value in answer for answer in answers[:-1]),
        "answer_without_fact": without,
        "value_without_fact": value in without,
    }


def _ask(port: int, messages: Messages) -> tuple[str, int]:
    body = {"messages": list(messages), "temperature": 0, "max_tokens": MAX_TOKENS}
    reply = chat(port, body, {})
    return reply.text, int(reply.timings["prompt_n"]) + int(reply.timings["cache_n"])


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the share recalled with its Wilson 95 % interval, and the lengths of the sessions."""
    right, total = sum(row["recalled"] for row in rows), len(rows)
    low, high = wilson(right, total)
    return {
        "sessions": total,
        "recalled": right,
        "ceiling": right / total,
        "interval_95": [round(low, 4), round(high, 4)],
        "repeated_early": sum(row["repeated_early"] for row in rows),
        "without_fact": sum(row["value_without_fact"] for row in rows),
        "tokens_min": min(row["tokens"] for row in rows),
        "tokens_max": max(row["tokens"] for row in rows),
    }


def wilson(right: int, total: int) -> tuple[float, float]:
    """Return the Wilson score interval of a share."""
    return stats.wilson(right / total, total)


def _print(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    print(f"{'seed':>6} {'tokens':>6} {'recalled':>8}  fact -> answer | answer without the fact")
    for row in rows:
        word = "yes" if row["recalled"] else "NO"
        said = f"{row['fact']} -> {row['answer']} | {row['answer_without_fact']}"
        print(f"{row['seed']:>6} {row['tokens']:>6} {word:>8}  {said}")
    print(json.dumps(summary))


def _parser() -> argparse.ArgumentParser:
    parser = record.command("ceiling", __doc__, _EXAMPLES)
    parser.add_argument("--server", type=Path, help="a llama-server (default: the stock build)")
    parser.add_argument("--seeds", type=int, default=100, help="how many sessions (100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the server (1)")
    parser.add_argument("--least", type=float, default=0.96, help="the ceiling wanted (0.96)")
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
