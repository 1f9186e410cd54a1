"""What does the bundled model recall in the demo's sessions, by part?

* `ceiling`: with nothing evicted, on a stock server. Each final question is asked twice: with the
  whole history, and without the turn that states the fact, where the value must not be answered.
  The first share is what every other arm is compared with.
* `facts`: the same by kind of fact: about the user, asked in other words, a setting of a file. The
  answers of the assistant are fixed, so that a session is one request.
* `types`: with a KV cache of f16, q8_0 and q4_0 (keys and values alike, flash attention on),
  without eviction and on the demo's budget. Evicting and loading is exact for every type
  (patches/SUPPORT.md), so both should lose the same.
* `arms`: each arm of the demo. Every turn must stay within the budget and its token counts must
  add up. All seeds count, also those on which the model fails without eviction, which `make demo`
  would replace; so compare `evoke` with `no_eviction` on the same seeds.

*Against*: nothing for `ceiling` and `facts`; f16 for `types`; the demo's other policies for `arms`.
*Fails* when the ceiling is below --least or a value is answered without its fact (`ceiling`), or
when a seed does not pass (`arms`)."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.driver import Bench, Report, Row, option, run_parts
from bench.llama import served
from bench.model import vocab
from bench.model.facts import abstains
from bench.model.facts import draw as draw_fact
from bench.model.tasks import exchange, reading, statement_exchange
from bench.stats import share_of
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.processes import stack
from evoke_proxy.demo.runner import (
    ARMS,
    BUDGET,
    MAX_TOKENS,
    RunObserver,
    failures,
    logical_tokens,
    recalled,
    run_arm,
)
from evoke_proxy.demo.session import draw
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

KINDS = {
    "my": "about the user",
    "para": "asked in other words",
    "file": "a setting of a file",
}
TYPES, TYPE_ARMS = ("f16", "q8_0", "q4_0"), ("no_eviction", "evoke")
_COLUMNS = ("seed", "kind", "type", "arm", "fact", "answer", "recalled", "failures")
Measure = Callable[[argparse.Namespace], Iterator[Row]]
Messages = Sequence[Mapping[str, str]]


def ceiling(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each session, run turn by turn."""
    with served(_stock(args), bundled_model(), args.threads) as port:
        for seed in _seeds(args):
            script, answers = draw(seed), list[str]()
            messages = [{"role": "system", "content": script.system}]
            for turn in script.turns:
                messages.append({"role": "user", "content": turn})
                answer, tokens = _ask(port, messages)
                answers.append(answer)
                messages.append({"role": "assistant", "content": answer})
            # The system message stays; the planting turn and its answer go.
            without, _ = _ask(port, [messages[0], *messages[3:-1]])
            value = script.fact.value
            yield {
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


def facts(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each session and kind of fact."""
    with served(_stock(args), bundled_model(), args.threads) as port:
        for seed in _seeds(args):
            for kind in KINDS:
                script, fact = draw(seed), draw_fact(random.Random(f"{seed}-{kind}"), kind)
                is_file = kind == "file"
                turns = reading(fact.parts[0], [fact]) if is_file else statement_exchange(fact)
                messages = [{"role": "system", "content": script.system}, *turns]
                for said in script.turns[1:-1]:
                    messages += exchange(said, dict(vocab.SMALL_TALK).get(said, vocab.CHAT_REPLY))
                answer, _ = _ask(port, [*messages, *exchange(fact.paraphrase or fact.question)])
                right = recalled(answer, fact.value)
                yield {"seed": seed, "kind": kind, "fact": fact.statement, "answer": answer,
                       "recalled": right}  # fmt: skip


def types(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each session, type of the cache, and arm."""
    for seed in _seeds(args):
        for kind in TYPES:
            for arm in TYPE_ARMS:
                options = ("-ctk", kind, "-ctv", kind, "-fa", "on")
                yield {"seed": seed, "type": kind, **_run(args, seed, arm, options)}


def arms(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each session, with what every arm of the demo did."""
    server = args.server or ensure_server()
    for seed in _seeds(args):
        script, runs = draw(seed), {}
        for arm in ARMS:
            with tempfile.TemporaryDirectory() as logs:
                with stack(server, bundled_model(), Path(logs), arm) as port:
                    runs[arm] = run_arm(script, arm, port, RunObserver())
        yield {
            "seed": seed,
            "value": script.fact.value,
            "logical_tokens": logical_tokens(runs),
            "failures": failures(runs, BUDGET),
            "arms": {
                arm: {
                    "recalled": run.recalled,
                    "answer": run.answer,
                    "peak_resident": run.peak_resident,
                    "evictions": run.evictions,
                    "recoveries": run.recoveries,
                    "decoded": sum(turn.decoded for turn in run.turns),
                    "wall_s": run.wall_s,
                    "ttft_ms_median": statistics.median(turn.ttft_ms for turn in run.turns),
                    "from_engine": all(turn.from_engine for turn in run.turns),
                }
                for arm, run in runs.items()
            },
        }


def _run(args: argparse.Namespace, seed: int, arm: str, options: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as logs:
        server = args.server or ensure_server()
        with stack(server, bundled_model(), Path(logs), arm, options) as port:
            run = run_arm(draw(seed), arm, port, RunObserver())
    return {"arm": arm, "recalled": run.recalled, "answer": run.answer,
            "peak_resident": run.peak_resident, "recoveries": run.recoveries}  # fmt: skip


def _ask(port: int, messages: Messages) -> tuple[str, int]:
    body = {"messages": list(messages), "temperature": 0, "max_tokens": MAX_TOKENS}
    reply = chat(port, body, {})
    return reply.text, int(reply.timings["prompt_n"]) + int(reply.timings["cache_n"])


def _stock(args: argparse.Namespace) -> Path:
    return args.server or ensure_server(patched=False)


def _seeds(args: argparse.Namespace) -> range:
    return range(args.first, args.first + args.seeds)


def counted(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how many of the rows recalled, with the share and its Wilson interval."""
    return share_of(sum(row["recalled"] for row in rows), len(rows))


def of_ceiling(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the share recalled, and the lengths of the sessions."""
    summary = {
        **counted(rows),
        "repeated_early": sum(row["repeated_early"] for row in rows),
        "without_fact": sum(row["value_without_fact"] for row in rows),
        "tokens_min": min(row["tokens"] for row in rows),
        "tokens_max": max(row["tokens"] for row in rows),
    }
    missed = [f"at least {args.least:.0%}"] if summary["share"] < args.least else []
    return Report(summary, [*missed, *["no value without its fact"] * summary["without_fact"]])


def of_facts(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the share by kind; `unknown` counts answers that the fact was never stated."""
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    unknown = {kind: sum(abstains(row["answer"]) for row in mine) for kind, mine in of.items()}
    return Report({kind: {**counted(of[kind]), "unknown": unknown[kind]} for kind in KINDS})


def of_types(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the share by type; `same_answer` counts those equal to f16 on the same arm."""
    found = []
    for arm in TYPE_ARMS:
        by_type = {t: [r for r in rows if (r["arm"], r["type"]) == (arm, t)] for t in TYPES}
        for kind, mine in by_type.items():
            pairs = zip(mine, by_type[TYPES[0]], strict=True)
            found.append(
                {"type": kind, "arm": arm, **counted(mine),
                 "same_answer": sum(a["answer"] == b["answer"] for a, b in pairs),
                 "peak_resident": max(row["peak_resident"] for row in mine),
                 "recoveries": sum(row["recoveries"] for row in mine)}
            )  # fmt: skip
    return Report({"budget": BUDGET, "types": found})


def of_arms(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the share by policy; a seed that does not pass misses the bar."""
    summary: dict[str, Any] = {"budget": BUDGET, "seeds": len(rows)}
    summary["passed"] = sum(not row["failures"] for row in rows)
    for arm in ARMS:
        mine = [row["arms"][arm] for row in rows]
        summary[arm] = {
            **counted(mine),
            "peak_resident_max": max(one["peak_resident"] for one in mine),
            "decoded_median": statistics.median(one["decoded"] for one in mine),
        }
    failed = [str(row["failures"]) for row in rows if row["failures"]]
    return Report(summary, failed)


def _part(
    name: str, measure: Measure, report: Callable[[argparse.Namespace, list[Row]], Report],
    seeds: tuple[int, int],
) -> Bench:  # fmt: skip
    options = (
        option("--server", help="a llama-server (default: our builds)", type=Path),
        option("--seeds", seeds[0], "how many sessions"),
        option("--first", seeds[1], "the first seed"),
        option("--threads", 1, "of the stock server"),
        option("--least", 0.96, "the ceiling wanted"),
    )
    return Bench(f"demo_recall {name}", __doc__, "--seeds 5", measure, report, _COLUMNS, options)


PARTS = {
    "ceiling": _part("ceiling", ceiling, of_ceiling, (100, 0)),
    "facts": _part("facts", facts, of_facts, (40, 1000)),
    "types": _part("types", types, of_types, (60, 0)),
    "arms": _part("arms", arms, of_arms, (20, 0)),
}

if __name__ == "__main__":
    sys.exit(run_parts(PARTS))
