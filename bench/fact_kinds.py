"""Which kinds of facts does the bundled model recall at the length of the demo?

Nothing is evicted. For each kind of the generator, the demo's session states another fact in its
first turn. The assistant's answers are fixed, so that a session is one request."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.ceiling import served, wilson
from bench.model import vocab
from bench.model.facts import abstains
from bench.model.facts import draw as draw_fact
from bench.model.tasks import exchange, reading, statement_exchange
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.runner import MAX_TOKENS, recalled
from evoke_proxy.demo.session import draw
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

KINDS = {
    "my": "about the user",
    "para": "asked in other words",
    "file": "a setting of a file",
}
_EXAMPLES = """examples:
  python -m bench.fact_kinds
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    args = _parser().parse_args(argv)
    server = args.server or ensure_server(patched=False)
    rows = measure(server, range(args.first, args.first + args.seeds), args.threads)
    summary = {kind: _share([row for row in rows if row["kind"] == kind]) for kind in KINDS}
    record.write("fact_kinds", rows, summary, args.out)
    for kind, share in summary.items():
        print(f"{KINDS[kind]:<24}{share}")
    return 0


def measure(server: Path, seeds: Sequence[int], threads: int) -> list[dict[str, Any]]:
    """Ask for one fact of every kind in the session of every seed; a row for each."""
    with served(server, bundled_model(), threads) as port:
        return [_row(port, seed, kind) for seed in seeds for kind in KINDS]


def _row(port: int, seed: int, kind: str) -> dict[str, Any]:
    script = draw(seed)
    fact = draw_fact(random.Random(f"{seed}-{kind}"), kind)
    turns = reading(fact.parts[0], [fact]) if kind == "file" else statement_exchange(fact)
    messages = [{"role": "system", "content": script.system}, *turns]
    for said in script.turns[1:-1]:
        messages += exchange(said, dict(vocab.SMALL_TALK).get(said, vocab.CHAT_REPLY))
    messages += exchange(fact.paraphrase or fact.question)
    reply = chat(port, {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}, {})
    right = recalled(reply.text, fact.value)
    row = {"seed": seed, "kind": kind, "fact": fact.statement, "answer": reply.text}
    return {**row, "recalled": right}


def _share(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    right = sum(row["recalled"] for row in rows)
    low, high = wilson(right, len(rows))
    unknown = sum(abstains(row["answer"]) for row in rows)
    interval = [round(low, 3), round(high, 3)]
    return {"n": len(rows), "recalled": right, "unknown": unknown, "interval_95": interval}


def _parser() -> argparse.ArgumentParser:
    parser = record.command("fact_kinds", __doc__, _EXAMPLES)
    parser.add_argument("--server", type=Path, help="a llama-server (default: the stock build)")
    parser.add_argument("--seeds", type=int, default=40, help="sessions a kind (40)")
    parser.add_argument("--first", type=int, default=1000, help="the first seed (1000)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the server (1)")
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
