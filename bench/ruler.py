"""How often does the bundled model recall when nothing is evicted, by task and length?

Every question goes to the chat endpoint of a stock llama-server at temperature 0, after the session
and the earlier questions with their expected answers. An answer is right when it ends with exactly
the expected value, or, for a fact that was never stated, when it says so. The sessions were not
used for training or for any choice. An interrupted run continues with the unfinished cells.

*Against* nothing: it is a ceiling. *Fails* when a cell is below --least."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.driver import MODEL, Bench, Report, Row, option
from bench.llama import served
from bench.model.facts import abstains
from bench.model.tasks import TASKS, Probe, Session, exchange, sessions
from bench.quality.journal import Journal
from bench.stats import share_of
from evoke_proxy.demo.client import DemoError, Reply, chat
from evoke_proxy.demo.runner import recalled
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

SEED, MAX_TOKENS = 5_000_000, 40


def _identity(server: Path, model: Path, seed: int, questions: int) -> str:
    """Return a hash of everything a cell's rows depend on, besides task and length."""
    digest = hashlib.sha256(model.read_bytes())
    for name in ("facts.py", "tasks.py", "text.py", "vocab.py"):
        digest.update((Path(__file__).parent / "model" / name).read_bytes())
    digest.update(f"{server} {seed} {questions}".encode())
    return digest.hexdigest()


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each question."""
    server = args.server or ensure_server(patched=False)
    model = args.model or bundled_model()
    file = (args.out or Path("out/bench/ruler.json")).with_suffix(".cells.jsonl")
    journal = Journal(file, _identity(server, model, args.seed, args.questions))
    with served(server, model, args.threads) as port:
        for task in args.tasks.split(","):
            for length in map(int, args.lengths.split(",")):
                drawn = sessions(args.seed, task, length, args.questions)
                yield from cell(port, journal, drawn, length, args.questions)


def cell(
    port: int, journal: Journal, drawn: Sequence[Session], length: int, questions: int
) -> Sequence[Row]:
    """Return the rows of the sessions of one task and length, from the journal if it has them."""
    key = f"{drawn[0].task} {length}"
    rows = list(journal.records().get(key, {}).get("rows", ()))
    if not rows:
        for index, session in enumerate(drawn):
            if len(rows) < questions:
                rows += ask(port, session, length, index)
        journal.append(key, {"rows": rows})
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
    by_cell = [
        {"task": task, "length": length, **_share(found)} for (task, length), found in cells.items()
    ]
    return {"all": _share(rows), "cells": by_cell}


def _share(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        **share_of(sum(row["right"] for row in rows), len(rows)),
        "false_unknown": sum(not r["right"] and abstains(r["answer"]) for r in rows),
        "tokens_max": max(row["tokens"] for row in rows),
    }


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the ceilings and the wrong answers."""
    for row in rows:
        if not row["right"]:
            print(f"    {row['expected']!r}: {row['answer']!r}")
    summary = summarise(rows)
    poor = [cell for cell in summary["cells"] if cell["share"] < args.least]
    return Report(summary, [f"{cell['task']} at {cell['length']}" for cell in poor])


BENCH = Bench(
    "ruler", __doc__, "--tasks needle,updates --lengths 1000 --questions 20", measure, report,
    ("task", "length", "session", "tokens", "kind", "right", "expected", "answer"),
    (option("--server", help="a llama-server (default: the stock build)", type=Path),
     MODEL,
     option("--tasks", ",".join(TASKS), "separated by commas"),
     option("--lengths", "1000,4000,7000", "tokens"),
     option("--questions", 60, "the least number of questions of a cell"),
     option("--seed", SEED), option("--threads", 1, "of the server"),
     option("--least", 0.0, "the ceiling wanted")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
