"""How often does the bundled model recall when nothing is evicted, by task and length?

Every question goes to the chat endpoint of a stock llama-server at temperature 0, after the session
and the earlier questions with their expected answers. An answer is right when it ends with exactly
the expected value, or, for a fact that was never stated, when it says so. The sessions were not
used for training or for any choice. An interrupted run continues with the unfinished cells."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bench import record
from bench.llama import served
from bench.model.facts import abstains
from bench.model.tasks import TASKS, Probe, Session, exchange, sessions
from bench.quality.journal import Journal
from bench.stats import wilson_counts
from evoke_proxy.demo.client import DemoError, Reply, chat
from evoke_proxy.demo.runner import recalled
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

SEED, MAX_TOKENS = 5_000_000, 40
_EXAMPLES = """examples:
  python -m bench.ruler
  python -m bench.ruler --tasks needle,updates --lengths 1000 --questions 20
"""
Row = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; 0 when every cell reaches --least."""
    args = _parser().parse_args(argv)
    server = args.server or ensure_server(patched=False)
    model, lengths = args.model or bundled_model(), [int(part) for part in args.lengths.split(",")]
    cells = [(task, length) for task in args.tasks.split(",") for length in lengths]
    with ExitStack() as stack, ThreadPoolExecutor(args.servers) as pool:
        ports: SimpleQueue[int] = SimpleQueue()
        for _ in range(args.servers):
            ports.put(stack.enter_context(served(server, model, args.threads)))
        journal = Journal(
            _journal_file(args.out), _identity(server, model, args.seed, args.questions)
        )
        runner = _Runner(ports, journal, args.seed, args.questions)
        measured = [pool.submit(runner.cell, task, length) for task, length in cells]
        rows = [row for future in measured for row in future.result()]
    summary = summarise(rows)
    print(json.dumps(summary["all"]))
    print(f"written: {record.write('ruler', rows, summary, args.out)}")
    worst = min(cell["ceiling"] for cell in summary["cells"])
    return 0 if worst >= args.least else 1


def _journal_file(out: Path | None) -> Path:
    return (out or Path("out/bench/ruler.json")).with_suffix(".cells.jsonl")


def _identity(server: Path, model: Path, seed: int, questions: int) -> str:
    """Return a hash of everything a cell's rows depend on, besides task and length."""
    digest = hashlib.sha256(model.read_bytes())
    for name in ("facts.py", "tasks.py", "text.py", "vocab.py"):
        digest.update((Path(__file__).parent / "model" / name).read_bytes())
    digest.update(f"{server} {seed} {questions}".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Runner:
    """Measures cells; one call uses one server at a time.

    Attributes:
        ports: Ports of the servers that no cell uses now.
        journal: The cells that an earlier, interrupted run finished.
        seed: Seed of the sessions.
        questions: Least number of questions in a cell.
    """

    ports: SimpleQueue[int]
    journal: Journal
    seed: int
    questions: int

    def cell(self, task: str, length: int) -> Sequence[Row]:
        """Return the rows of one cell, from the journal if it has them."""
        key = f"{task} {length}"
        rows = list(self.journal.records().get(key, {}).get("rows", ()))
        if not rows:
            port = self.ports.get()
            try:
                for index, session in enumerate(sessions(self.seed, task, length, self.questions)):
                    if len(rows) >= self.questions:
                        break
                    rows += ask(port, session, length, index)
            finally:
                self.ports.put(port)
            self.journal.append(key, {"rows": rows})
        print(_line(task, length, rows), flush=True)
        return rows


def ask(port: int, session: Session, length: int, index: int) -> list[Row]:
    """Ask all probes of a session; a row for each."""
    messages = list(session.messages)
    rows: list[Row] = []
    for probe in session.probes:
        messages += exchange(probe.question)
        body = {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        reply = _patiently(port, body)
        tokens = int(reply.timings["prompt_n"]) + int(reply.timings["cache_n"])
        rows.append(
            {
                "task": session.task,
                "length": length,
                "session": index,
                "tokens": tokens,
                "kind": probe.fact.kind,
                "type": probe.fact.type,
                "question": probe.question,
                "expected": probe.answer,
                "answer": reply.text,
                "right": right(reply.text, probe),
            }
        )
        messages.append({"role": "assistant", "content": probe.answer})
    return rows


def _patiently(port: int, body: Mapping[str, Any]) -> Reply:
    """Ask, and once more after an error: the first try times out on a suspended machine."""
    try:
        return chat(port, body, {})
    except DemoError:
        return chat(port, body, {})


def right(answer: str, probe: Probe) -> bool:
    """Return whether an answer is the expected one."""
    if probe.value is None:
        return abstains(answer)
    return recalled(answer, probe.value)


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the ceilings with their Wilson 95 % intervals: by task and length, and over all."""
    cells: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["task"], row["length"]), []).append(row)
    return {
        "all": _share(rows),
        "cells": [
            {"task": task, "length": length, **_share(found)}
            for (task, length), found in cells.items()
        ],
    }


def _share(rows: Sequence[Row]) -> dict[str, Any]:
    count, total = sum(row["right"] for row in rows), len(rows)
    low, high = wilson_counts(count, total)
    return {
        "n": total,
        "right": count,
        "ceiling": count / total,
        "interval_95": [round(low, 4), round(high, 4)],
        "false_unknown": sum(not r["right"] and abstains(r["answer"]) for r in rows),
        "tokens_max": max(row["tokens"] for row in rows),
    }


def _line(task: str, length: int, rows: Sequence[Row]) -> str:
    share = _share(rows)
    wrong = [f"    {r['expected']!r}: {r['answer']!r}" for r in rows if not r["right"]]
    first = f"{task:<12}{length:>6}  {share['right']:>4} of {share['n']:<4} {share['interval_95']}"
    return "\n".join([first, *wrong])


def _parser() -> argparse.ArgumentParser:
    parser = record.command("ruler", __doc__, _EXAMPLES)
    parser.add_argument("--server", type=Path, help="a llama-server (default: the stock build)")
    parser.add_argument("--model", type=Path, help="a .gguf file (default: the bundled one)")
    parser.add_argument("--tasks", default=",".join(TASKS), help="of " + ",".join(TASKS))
    parser.add_argument("--lengths", default="1000,4000,7000", help="tokens (1000,4000,7000)")
    parser.add_argument(
        "--questions", type=int, default=60, help="the least number of questions per cell (60)"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--servers", type=int, default=1, help="how many at a time (1)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a server (1)")
    parser.add_argument("--least", type=float, default=0.0, help="the ceiling wanted (0)")
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
