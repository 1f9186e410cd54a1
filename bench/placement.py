"""Where should a recovered block land, and when: before or after the question is decoded?

A fact is stated first, its rows are saved and evicted, other text is decoded without them, and a
question asks for the fact. The bench calls the server directly, without the proxy. Arms:

* `original`: the rows are loaded at their own positions before the question
* `late`: the same after the question is decoded; only its last token sees the fact
* `tail`: the gap is closed, and the rows are moved to the end of the text
* `native`: the message with the fact is decoded again at the end of the text
* `never`: nothing is evicted
* `discard`: nothing is recovered

`--rope` compares how the server computes positions beyond the trained length: `none`, `linear` or
`yarn`. Beyond it an arm says something only where `never` still answers.

*Against* `native`, `never` and `discard`. *Fails* never."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.driver import Bench, Report, Row, option
from bench.llama import Llama, running
from bench.model.tasks import exchange
from bench.stats import share_of
from evoke_proxy.demo.runner import recalled
from evoke_proxy.demo.session import SENTENCES, SYSTEM, Fact, draw_fact, paragraph
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

# Those in the middle share one text, decoded without the fact; the tail changes it, and is last.
ARMS = ("never", "original", "late", "discard", "tail", "native")
_TRAINED = 8192
_MOST_TOKENS = 256  # more than a turn has
_ANSWER: dict[str, Any] = {"n_predict": 32, "stop": ["<|im_end|>"]}


class Session:
    """One fact, other turns of `distance` tokens after it, and one question."""

    def __init__(self, llama: Llama, seed: int, distance: int) -> None:
        rng = random.Random(f"evoke-placement-{seed}")
        self._llama, self._seed, self._distance = llama, seed, distance
        self.fact: Fact = draw_fact(rng)
        messages = [{"role": "system", "content": SYSTEM}]
        messages += exchange(self.fact.statement, "Noted.")
        while True:
            view = llama.rendered({"messages": [*messages, *exchange(self.fact.question)]})
            fact_span, answered, asked = (view["spans"][i] for i in (1, 2, -1))
            if asked["p0"] - answered["p1"] >= distance:
                break
            missing = distance - (asked["p0"] - answered["p1"])
            for _ in range(1 + missing // _MOST_TOKENS):
                messages += exchange(paragraph(rng, SENTENCES), "I see.")
        self._tokens: list[int] = view["tokens"]
        self._fact_span, self._answered = (fact_span["p0"], fact_span["p1"]), answered["p1"]
        self._asked: int = asked["p0"]

    def rows(self, arms: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Run these of ARMS, in that order."""
        self._llama.erase()
        evicted = False
        for arm in (each for each in ARMS if each in arms):
            if arm in ("never", "native"):
                self._llama.erase()
                prompt = self._tokens if arm == "never" else self._moved()
            else:
                self._evict(is_saved=evicted)
                evicted, prompt = True, self._recovered(arm)
            answer = self._llama.complete(prompt, **_ANSWER)
            said = answer["content"].strip()
            row = {"distance": self._distance, "seed": self._seed, "arm": arm}
            row |= {"tokens": len(prompt), "answer": said}
            yield row | {"recalled": recalled(said, self.fact.value)}

    def _evict(self, is_saved: bool) -> None:
        """Leave the slot with all that stands before the question, decoded without the fact."""
        llama, (p0, p1) = self._llama, self._fact_span
        if is_saved:
            llama.act("block-evict", p0=p0, p1=p1)
        else:
            llama.erase()
            llama.complete(self._tokens[: self._answered])
            llama.act("block-save", name="fact", p0=p0, p1=p1, evict=True)
        llama.complete(self._tokens[: self._asked])

    def _recovered(self, arm: str) -> list[int]:
        """Bring the fact back as an arm does; return the prompt that the slot then stands for."""
        llama = self._llama
        if arm == "late":
            llama.complete(self._tokens)
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


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each kind of RoPE, distance, session and arm."""
    for rope in args.rope:
        with running(ensure_server(), bundled_model(), *_options(args.cells, rope)) as llama:
            for distance in args.distances:
                for seed in range(args.first, args.first + args.seeds):
                    session = Session(llama, seed, distance)
                    yield from ({"rope": rope, **row} for row in session.rows(args.arms))


def _options(cells: int, rope: str) -> list[str]:
    """Return the server's options: positions are compressed into the trained length, or not."""
    options = ["-c", str(cells), "-np", "1", "-t", "1", "--evoke-ram", "256", "-fa", "on"]
    if cells > _TRAINED:
        options += ["--override-kv", f"llama.context_length=int:{cells}"]
    if rope != "none":
        options += ["--rope-scaling", rope, "--rope-scale", str(cells / _TRAINED)]
        options += ["--yarn-orig-ctx", str(_TRAINED)]
    return options


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the share of sessions that recall, by kind of RoPE, distance and arm."""
    cells = {(row["rope"], row["distance"], row["arm"]): list[bool]() for row in rows}
    for row in rows:
        cells[row["rope"], row["distance"], row["arm"]].append(row["recalled"])
    arms = [
        {"rope": rope, "distance": distance, "arm": arm, **share_of(sum(mine), len(mine))}
        for (rope, distance, arm), mine in cells.items()
    ]
    return Report({"arms": arms}, table=arms)


BENCH = Bench(
    "placement", __doc__, "--seeds 5 --distances 500 2000", measure, report,
    ("rope", "distance", "arm", "n", "right", "share", "interval_95"),
    (option("--seeds", 20, "how many sessions"), option("--first", 0, "the first seed"),
     option("--distances", (500, 2000, 6000), "tokens between"),
     option("--arms", ARMS, "which"), option("--rope", ("none",), "none, linear or yarn"),
     option("--cells", _TRAINED, "of the slot; more than the trained length for longer distances")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
