"""Does the bundled model answer what its training did not have, and does its recall find it?

Four sets of questions, about facts that were stated once: `trained` (questions of the training, to
compare with), `new question` (trained attributes, new questions), `new attribute` (the question in
the words of the statement) and `new, reworded` (new attribute, in other words). Lists:
`bench/model/unseen.py`.

* Ceiling: a stock server, nothing evicted. `key`: the answer as the model gives it. `bare` and
  `thought`: the answer begins with a text that does not name the key, and the model goes on.
* Arms on a budget of 1/8: the proxy with `evoke_recall` `text`, `model` and `fused`. `visible`: the
  fact was in the cache; `right`: the answer has its value.

*Against* `trained`, and recall by text. *Fails* on a turn with a fault."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.driver import Bench, Report, Row, option
from bench.llama import served
from bench.model import text, vocab
from bench.model.facts import Fact
from bench.model.tasks import Probe, estimated_tokens, exchange, statement_exchange
from bench.model.unseen import FORMATS, NEW_QUESTIONS, NUMBER_ATTRIBUTES, PAIR_ATTRIBUTES
from bench.quality.arms import recalling
from bench.quality.drive import run
from bench.quality.sessions import Script
from bench.quality.stack import read, stack
from bench.stats import share_of
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.runner import recalled
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

SETS = ("trained", "new question", "new attribute", "new, reworded")
RECALLS = ("text", "model", "fused")
_RATIO, _SEED, _FACTS, _MAX_TOKENS = 8.0, 8_000_000, 6, 40


def scripts(name: str, tokens: int, questions: int) -> list[Script]:
    """Return sessions of one set with at least this many questions, each about `tokens` long."""
    asked = _questions(name)
    made: list[Script] = []
    while sum(len(script.probes) for script in made) < questions:
        rng = random.Random(f"{_SEED} {name} {len(made)}")
        # Every question comes once before one comes twice.
        order = random.Random(f"{_SEED} {len(made) * _FACTS // len(asked)}").sample(
            sorted(asked), len(asked)
        )
        first = len(made) * _FACTS % len(asked)
        chosen = (order * 2)[first : first + _FACTS]
        made.append(_script(rng, name, tokens, {key: asked[key] for key in chosen}))
    return made


def _questions(name: str) -> dict[str, str]:
    """Return the questions of a set by attribute."""
    if name == "trained":
        return {**vocab.PAIR_PARAPHRASES, **vocab.NUMBER_PARAPHRASES} | {
            attribute: f"What is my {attribute}?"
            for attribute in (*vocab.PAIR_ATTRIBUTES, *vocab.NUMBER_ATTRIBUTES)
        }
    if name == "new question":
        return dict(NEW_QUESTIONS)
    reworded = {**PAIR_ATTRIBUTES, **NUMBER_ATTRIBUTES}
    if name == "new, reworded":
        return reworded
    return {attribute: f"What is my {attribute}?" for attribute in reworded}


def _type_of(attribute: str) -> str:
    if attribute in vocab.CODE_ATTRIBUTES:
        return "code"
    numbers = (*vocab.NUMBER_ATTRIBUTES, *vocab.NUMBER_PARAPHRASES, *NUMBER_ATTRIBUTES)
    return "number" if attribute in numbers else "pair"


def _script(rng: random.Random, name: str, tokens: int, asked: Mapping[str, str]) -> Script:
    facts = {}
    for attribute in asked:
        type_ = _type_of(attribute)
        facts[attribute] = Fact("my", (attribute,), type_, text.value(rng, type_))
    parts = [statement_exchange(fact) for fact in facts.values()]
    room = tokens - sum(estimated_tokens(part) for part in parts)
    while room > 0:
        filler = exchange(*text.filler(rng, min(15, max(1, room // 13))))
        parts.insert(rng.randrange(len(parts) + 1), filler)
        room -= estimated_tokens(filler)
    probes = [Probe(facts[key], asked[key], facts[key].answer, facts[key].value) for key in facts]
    rng.shuffle(probes)
    messages = [
        {"role": "system", "content": vocab.SYSTEM_PROMPTS[0]},
        *(message for part in parts for message in part),
        *(message for p in probes for message in exchange(p.question, p.answer)),
    ]
    return Script(f"{name}-{tokens}-{rng.random():.6f}", name, _SEED, messages, probes)


def ceiling(port: int, script: Script, format_: str) -> Iterator[dict[str, Any]]:
    """Yield one row for each question, asked with nothing evicted.

    Each question directly follows the statements, so no answer of another one shows the format.
    """
    history = list(script.messages[: -2 * len(script.probes)])
    for probe in script.probes:
        messages = [*history, {"role": "user", "content": probe.question}]
        if FORMATS[format_]:
            messages.append({"role": "assistant", "content": FORMATS[format_]})
        body = {"messages": messages, "temperature": 0, "max_tokens": _MAX_TOKENS}
        said = chat(port, body, {}).text
        right = probe.value is not None and recalled(said, probe.value)
        yield {"set": script.task, "arm": f"ceiling, {format_}", "right": right, "visible": True,
               "question": probe.question, "expected": probe.answer, "answer": said}  # fmt: skip


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield one row for each question and arm: the ceilings, then the arms on a budget."""
    made = [script for name in SETS for script in scripts(name, args.tokens, args.questions)]
    with served(ensure_server(patched=False), bundled_model(), 1) as port:
        for script in made:
            for format_ in FORMATS:
                yield from ceiling(port, script, format_)
    with stack(ensure_server(), bundled_model(), {}, Path("out/bench/unseen-logs")) as running:
        for script in made:
            reading = read(running.upstream, script)
            for recall in RECALLS:
                found = run(running, script, reading, recalling(recall, _RATIO))
                for probe in found["probes"]:
                    named = {"set": script.task, "arm": recall, "faults": len(found["faults"])}
                    yield named | {key: probe[key] for key in _KEPT}


_KEPT = ("question", "expected", "answer", "right", "visible")


def report(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report by set and arm: right answers, and facts in the cache."""
    found = []
    for name, arm in dict.fromkeys((row["set"], row["arm"]) for row in rows):
        mine = [row for row in rows if (row["set"], row["arm"]) == (name, arm)]
        right = share_of(sum(row["right"] for row in mine), len(mine))
        visible = sum(row["visible"] for row in mine)
        found.append({"set": name, "arm": arm, **right, "visible": visible})
    faults = sum(row.get("faults", 0) for row in rows)
    missed = [f"{faults} faults of turns"] if faults else []
    return Report({"arms": found, "faults": faults}, missed, table=found)


BENCH = Bench(
    "unseen", __doc__, "--questions 12 --tokens 1500", measure, report,
    ("set", "arm", "n", "right", "visible", "interval_95"),
    (option("--questions", 36, "of each set, at least"),
     option("--tokens", 2500, "of a session")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
