"""What does an edit in the middle of a conversation cost, and what is recalled after it?

A conversation states facts among other texts. Then one message in its first half is changed to
state another fact, or one is inserted that does, or one is removed; and the user asks for that fact
(`edited`), for one that was said after it (`behind`), and for one before it (`before`).

Arms: `direct` (llama-server without a budget), `exact` (the proxy, which decodes the text behind
the edit again), `approximate` (`policy.reanchor: approximate`, which moves its rows), each with the
same budget, and `approximate` without one. `decoded` has the tokens of the first turn after the
edit. `same` counts the answers with the text of `exact` (without a budget: of `direct`); `change`
is the mean difference in log probability of their tokens, in nats, without its sign, and `most` the
largest one. *Against* `direct` and `exact`. *Fails* when `approximate` recalls less than `exact`,
or decodes half as much or more."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.driver import Bench, Report, Row, option
from bench.llama import proxied, running
from evoke_proxy.demo.runner import recalled
from evoke_proxy.demo.session import SENTENCES, Fact, draw_fact, paragraph
from evoke_proxy.divergence.llama import Port
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

_SYSTEM = {"role": "system", "content": "You are a small assistant. Be brief."}
_REPLY = {"role": "assistant", "content": "Noted."}
KINDS = ("changed", "inserted", "removed")
_ASKED = ("edited", "behind", "before")

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation before and after an edit, and what is asked then."""

    kind: str
    before: Sequence[str]
    after: Sequence[str]
    asked: Mapping[str, Fact]


def case(kind: str, seed: int, texts: int) -> Case:
    """Return the case of a seed: facts at 1/8 (before), 3/8 (edited) and 3/4 (behind)."""
    rng = random.Random(f"edits-{kind}-{seed}")
    drawn: dict[str, Fact] = {}
    while len(drawn) < 4:
        fact = draw_fact(rng)
        drawn.setdefault(fact.question, fact)
    first, edited, behind, other = drawn.values()
    said = [paragraph(rng, SENTENCES) for _ in range(texts)]
    said[texts // 8] = first.statement
    said[texts * 3 // 4] = behind.statement
    at = texts * 3 // 8
    if kind == "removed":
        said[at] = f"{other.statement} {said[at]}"
        return Case(kind, said, said[:at] + said[at + 1 :], {"behind": behind, "before": first})
    later = list(said)
    later[at : at + (kind == "changed")] = [f"{edited.statement} {paragraph(rng, SENTENCES)}"]
    return Case(kind, said, later, dict(zip(_ASKED, (edited, behind, first), strict=True)))


def _messages(texts: Sequence[str]) -> list[Message]:
    said: list[Message] = [_SYSTEM]
    for text in texts:
        said += [{"role": "user", "content": text}, _REPLY]
    return said


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer after an edit: its text, the log probability of its tokens, what was decoded."""

    text: str
    logprobs: Sequence[float]
    decoded: int
    right: bool


def converse(port: int, one: Case, fields: Mapping[str, Any], name: str) -> dict[str, Answer]:
    """Send the conversation, edit it, and ask; returns the answers by what was asked for."""

    def send(messages: Sequence[Message], n_tokens: int) -> Any:
        body = {"messages": messages, "temperature": 0, "max_tokens": n_tokens, "logprobs": True}
        headers = {"X-Evoke-Session": name} if name else {}
        return Port(port).call("POST", "/v1/chat/completions", {**body, **fields}, headers)

    for end in range(4, len(one.before) + 1, 4):
        send(_messages(one.before[:end])[:-1], 1)
    history, answers = _messages(one.after), dict[str, Answer]()
    for what, fact in one.asked.items():
        history = [*history, {"role": "user", "content": fact.question}]
        reply = send(history, 16)
        choice, timings = reply["choices"][0], reply["timings"]
        said = choice["message"]["content"].strip().partition("\n")[0]
        decoded = timings.get("evoke", {}).get("decoded", timings["prompt_n"])
        decoded += reply["usage"].get("evoke", {}).get("reanchored", {}).get("decoded", 0)
        likely = [token["logprob"] for token in choice["logprobs"]["content"]]
        answers[what] = Answer(said, likely, decoded, recalled(said, fact.value))
        history = [*history, {"role": "assistant", "content": f"{fact.value}."}]
    return answers


def _approximate(folder: Path) -> str:
    """Return the name of a configuration file with `policy.reanchor: approximate`."""
    config = folder / "config.yaml"
    config.write_text("policy: {reanchor: approximate}\n", encoding="utf-8")
    return str(config)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield one row for each kind of edit and arm."""
    options, model = ("-c", "16384", "-np", "1", "-t", "1"), bundled_model()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(ensure_server(patched=False), model, *options, saves=False) as stock,
        running(ensure_server(), model, *options, "--evoke-ram", "256", saves=False) as patched,
        proxied(patched.port) as exact,
        running(ensure_server(), model, *options, "--evoke-ram", "256", saves=False) as other,
        proxied(other.port, "--config", _approximate(Path(folder))) as approximate,
    ):
        budget = {"evoke_budget": args.budget}
        arms: Sequence[tuple[str, int, dict[str, Any]]] = (
            ("direct", stock.port, {}),
            ("exact", exact.port, budget),
            ("approximate", approximate.port, budget),
            ("approximate, no budget", approximate.port, {"evoke_budget": None}),
        )
        for kind in KINDS:
            cases = [case(kind, args.seed + i, args.texts) for i in range(args.cases)]
            answers = {
                arm: [
                    converse(port, one, fields, f"{arm} {kind} {i}") for i, one in enumerate(cases)
                ]
                for arm, port, fields in arms
            }
            for arm, _, _ in arms:
                against = answers["direct" if arm.endswith("no budget") else "exact"]
                yield {"edit": kind, "arm": arm, **_counts(answers[arm], against)}


def _counts(found: Sequence[Mapping[str, Answer]], exact: Sequence[Mapping[str, Answer]]) -> Row:
    row: dict[str, Any] = {"cases": len(found)}
    for what in _ASKED:
        asked = [answers[what].right for answers in found if what in answers]
        row[what] = sum(asked) if asked else None
    row["decoded"] = round(fmean(next(iter(answers.values())).decoded for answers in found))
    changes = [
        abs(a - b)
        for one, other in zip(found, exact, strict=True)
        for what in one
        if one[what].text == other[what].text
        for a, b in zip(one[what].logprobs, other[what].logprobs, strict=False)
    ]
    row["same"] = sum(
        one[what].text == other[what].text
        for one, other in zip(found, exact, strict=True)
        for what in one
    )
    row["change"] = float(f"{fmean(changes):.2g}") if changes else None
    row["most"] = float(f"{max(changes):.2g}") if changes else None
    return row


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Compare the arms of each kind of edit."""
    missed = []
    for kind in KINDS:
        arms = {row["arm"]: row for row in rows if row["edit"] == kind}
        exact, approximate = arms["exact"], arms["approximate"]
        recall = [sum(row[what] or 0 for what in _ASKED) for row in (exact, approximate)]
        if recall[1] < recall[0]:
            missed.append(f"{kind}: recalls {recall[1]}, exact {recall[0]}")
        if approximate["decoded"] * 2 >= exact["decoded"]:
            missed.append(f"{kind}: decodes {approximate['decoded']}, exact {exact['decoded']}")
    return Report({"budget": args.budget}, missed)


BENCH = Bench(
    "edits", __doc__, "--cases 4", measure, report,
    ("edit", "arm", "cases", *_ASKED, "decoded", "same", "change", "most"),
    (option("--cases", 30, "of each kind of edit"), option("--texts", 24, "of a conversation"),
     option("--seed", 0, "the first seed"), option("--budget", 768, "tokens")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
