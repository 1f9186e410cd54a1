"""Where should a recovered block land, and when: before or after the question is decoded?

A fact is stated first, its rows are saved and evicted, other text is decoded without them, and a
question asks for the fact. The bench calls the server directly, without the proxy. Arms:

* `original`: the rows are loaded at their own positions before the question
* `late`: the same after the question is decoded; only its last token sees the fact
* `tail`: the gap is closed, and the rows are moved to the end of the text
* `native`: the message with the fact is decoded again at the end of the text
* `never`: nothing is evicted
* `discard`: nothing is recovered

*Against* `native`, `never` and `discard`. *Fails* never."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.driver import Bench, Report, Row, option
from bench.llama import Llama, running
from bench.stats import share_of
from evoke_proxy.demo.runner import recalled
from evoke_proxy.demo.session import SENTENCES, SYSTEM, Fact, draw_fact, paragraph
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

ARMS = ("never", "original", "late", "tail", "native", "discard")
_TRAINED = 8192
_ANSWER: dict[str, Any] = {"n_predict": 32, "stop": ["<|im_end|>"]}


class Session:
    """One fact, other turns of `distance` tokens after it, and one question."""

    def __init__(self, llama: Llama, seed: int, distance: int) -> None:
        rng = random.Random(f"evoke-placement-{seed}")
        self._llama, self._seed, self._distance = llama, seed, distance
        self.fact: Fact = draw_fact(rng)
        messages = [_said("system", SYSTEM), _said("user", self.fact.statement)]
        messages += [_said("assistant", "Noted.")]
        question = _said("user", self.fact.question)
        while True:
            view = self._rendered([*messages, question])
            fact_span, answered, asked = (view["spans"][i] for i in (1, 2, -1))
            if asked["p0"] - answered["p1"] >= distance:
                break
            messages += [_said("user", paragraph(rng, SENTENCES)), _said("assistant", "I see.")]
        self._tokens: list[int] = view["tokens"]
        self._fact_span, self._answered = (fact_span["p0"], fact_span["p1"]), answered["p1"]
        self._asked: int = asked["p0"]

    def row(self, arm: str) -> dict[str, Any]:
        """Run one arm in an empty slot."""
        self._llama.erase()
        prompt = self._tokens if arm == "never" else self._moved() if arm == "native" else None
        if prompt is None:
            prompt = self._evicted(arm)
        answer = self._llama.complete(prompt, **_ANSWER)
        said = answer["content"].strip()
        return {
            "distance": self._distance,
            "seed": self._seed,
            "arm": arm,
            "tokens": len(prompt),
            "answer": said,
            "recalled": recalled(said, self.fact.value),
        }

    def _evicted(self, arm: str) -> list[int]:
        """The prompt that the slot then stands for, decoded up to the question."""
        llama, (p0, p1) = self._llama, self._fact_span
        llama.complete(self._tokens[: self._answered])
        llama.act("block-save", name="fact", p0=p0, p1=p1, evict=True)
        llama.complete(self._tokens[: self._asked] if arm != "late" else self._tokens)
        if arm in ("original", "late"):
            llama.act("block-load", names=["fact"])
        if arm != "tail":
            return self._tokens
        closed = llama.act("block-compact")
        llama.act("block-load", names=["fact"], at=closed["n_tokens"])
        return self._moved()

    def _moved(self) -> list[int]:
        (p0, p1), tokens = self._fact_span, self._tokens
        return tokens[:p0] + tokens[p1 : self._asked] + tokens[p0:p1] + tokens[self._asked :]

    def _rendered(self, messages: list[dict[str, str]]) -> Any:
        body = {"dialect": "chat", "body": {"messages": messages}}
        return self._llama.call("POST", "/evoke/render", body)


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each distance, session and arm."""
    options = ["-c", str(args.cells), "-np", "1", "-t", "1", "--evoke-ram", "64", "-fa", "on"]
    if args.cells > _TRAINED:
        options += ["--override-kv", f"llama.context_length=int:{args.cells}"]
    with running(ensure_server(), bundled_model(), *options) as llama:
        for distance in args.distances:
            for seed in range(args.first, args.first + args.seeds):
                session = Session(llama, seed, distance)
                yield from (session.row(arm) for arm in ARMS)


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the share of sessions that recall, by distance and arm."""
    arms = []
    for distance in args.distances:
        for arm in ARMS:
            mine = [r["recalled"] for r in rows if (r["distance"], r["arm"]) == (distance, arm)]
            arms.append({"distance": distance, "arm": arm, **share_of(sum(mine), len(mine))})
    return Report({"arms": arms}, table=arms)


BENCH = Bench(
    "placement", __doc__, "--seeds 5 --distances 500 2000", measure, report,
    ("distance", "arm", "n", "right", "share", "interval_95"),
    (option("--seeds", 20, "how many sessions"), option("--first", 0, "the first seed"),
     option("--distances", (500, 2000, 6000), "tokens between"),
     option("--cells", _TRAINED, "of the slot; more than the trained length for longer distances")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
