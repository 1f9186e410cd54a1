"""Is what a task needs in the cache when the answer begins, by kind of task?

A case is one conversation (real dialogs as haystack, or `--haystack statements`; `bench/data`) with
messages planted in it, and a turn that asks about them. A case counts when every message that its
answer needs is whole in the cache. Budgets are 1/4, 1/8 and 1/16 of the conversation. Kinds:

* `needle`, `multi-key`: one fact; inside a long text, or among similar ones
* `multi-value`: eight values of one key
* `multi-query 4`, `multi-query 12`: so many questions in one turn
* `variable tracking`: a value handed on over four hops
* `common words`: what occurs most often
* `two hops`: a fact about what another fact names; `same words`: the question has words of both
* `pronoun follow-ups`: "And what does she do for a living?" after a question about a person
* `one-fact inference`: "Could I adopt a kitten?" where the landlord forbids pets
* `standing instructions`: "always answer in French", said long before
* `corrections`: the newest value of a fact that changed
* `summaries`: twelve decisions

Arms: those of `bench.evidence` (settings of the proxy, fills of the same budget) and `no eviction`.
The conversation is a turn of its own before the question. The engine runs in this process; with
`--server` the proxy and the patched server run, with the settings that a request can ask for. The
part `factorial` measures what each signal is worth (`bench/evidence/factorial.py`).

*Against* the fills, other settings of the proxy, no eviction. *Fails* when the default misses a bar
(`BARS`) or a criterion of `bench/presence.py` in a cell: a kind of task, or all, at
one length and budget; intervals draw whole templates.

The templates of the splits are disjoint. Tune on `tuning` and those that begin with it only;
published figures are of `reporting`. `reporting_lists` and `reporting_summaries` have been used
three times to choose between rankings; `reporting_second`, by another author, has been used for
nothing but to report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench import charts
from bench.driver import Report, Row, listed, numbers, option, run_parts
from bench.engines import history_of
from bench.presence import Asked, Corpus, Talk, summarise
from bench.tasks.cases import HAYSTACKS, TEMPLATES, Case, cases, kinds

# Cases of a kind by the length of conversations, and for all other lengths.
_COUNTS = {4000: 40, 32000: 16}
_FEWEST = 6
# Wanted of the default at 1/8, in percent of the cases; the first three at 4,000 tokens only.
BARS: Mapping[str, float] = {
    "multi-value": 95,
    "multi-query 4": 95,
    "multi-query 12": 85,
    "variable tracking": 60,
    "two hops, same words": 85,
    "two hops, other words": 60,
    "pronoun follow-ups": 90,
    "one-fact inference": 60,
    "standing instructions": 98,
}
_BAR_SHARE, _SHORT = "1/8", ("multi-value", "multi-query 4", "multi-query 12")
_BAR_LENGTHS = ("4000", "32000")
# The arms that the picture has, with their colours.
COLOURS: Mapping[str, str] = {
    "default": "#1b6e3c",
    "bm25": "#0b6aa8",
    "newest": "#b35900",
    "oracle": "#7a7a7a",
}
_MEAN, _ALL = "mean of kinds", "all kinds"


def talk_of(case: Case) -> Talk:
    """Return a case with its one turn; the cases of one template are alike for intervals.

    Fills take any message before the turn but the system prompt.
    """
    split, length = case.id.split()[0], int(case.id.split()[-2])
    about = {"split": split, "length": length, "kind": case.kind}
    about |= {"scene": case.scene, "conversation": f"{case.kind} {case.scene}"}
    asked = Asked(case.id, case.asked, case.needed, (case.kind,))
    history, ranked = history_of([*case.messages, *case.asked]), range(1, len(case.messages))
    return Talk(case.messages, [asked], history, ranked, about, (0,))


def chosen(args: argparse.Namespace, length: int) -> Iterator[Talk]:
    """Yield the cases of a length that were asked for."""
    count = args.count or _COUNTS.get(length, _FEWEST)
    for kind in kinds(args.split):
        if not args.kinds or kind in args.kinds:
            yield from map(talk_of, cases(args.split, kind, length, count, args.haystack))


def batches(args: argparse.Namespace) -> Iterator[tuple[int, Iterator[Talk]]]:
    """Yield the cases that were asked for by the length of conversations."""
    return ((length, chosen(args, length)) for length in args.lengths)


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of one length and share by kind, and those of all kinds."""
    of_kind = {
        kind: [row for row in rows if row["kind"] == kind]
        for kind in dict.fromkeys(row["kind"] for row in rows)
    }
    return {**of_kind, _ALL: list(rows)}


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary by length and share, with the means of kinds."""
    summary = summarise(rows, CORPUS.by, grouped)
    for shares in summary.values():
        for said in shares.values():
            of_kind = [arms for cell, arms in said["arms"].items() if cell != _ALL]
            said["arms"][_MEAN] = {
                arm: {"whole": round(sum(arms[arm]["whole"] for arms in of_kind) / len(of_kind), 1)}
                for arm in said["arms"][_ALL]
                if all(arm in arms for arms in of_kind)
            }
    return summary


def bars_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what is wanted of the default, and what it has, by kind and length."""
    found = []
    for kind, wanted in BARS.items():
        for length in _BAR_LENGTHS[: 1 if kind in _SHORT else None]:
            arms = summary.get(length, {}).get(_BAR_SHARE, {"arms": {}})["arms"]
            has = arms.get(kind, {}).get("default", {}).get("whole")
            if has is not None:
                found.append({"kind": kind, "length": length, "wanted": wanted, "found": has})
    return found


def picture(summary: Mapping[str, Any], split: str) -> str:
    """Draw the kinds at 4,000 tokens and an eighth; "" without them."""
    whole: dict[str, dict[str, float]] = {}
    by_kind = summary.get("4000", {}).get(_BAR_SHARE, {"arms": {}})["arms"]
    for kind, arms in by_kind.items():
        for arm, found in arms.items() if kind != _ALL else ():
            whole.setdefault(arm, {})[kind] = found["whole"]
    title = f"All needed messages in the cache, % of cases: 4,000 tokens, 1/8, split {split}"
    return charts.bars(title, whole, BARS, COLOURS)


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report percentages, differences and verdicts; bars and criteria are missed alike."""
    summary = summary_of(rows)
    bars = bars_of(summary)
    made = CORPUS.report(args, rows, summary)
    missed = [f"{b['kind']} at {b['length']}" for b in bars if b["found"] < b["wanted"]]
    missed += made.missed
    found = {
        "split": args.split,
        "haystack": args.haystack,
        "lengths": summary,
        "bars": bars,
        "missed": missed,
    }
    return replace(made, summary=found, missed=missed, picture=picture(summary, args.split))


CORPUS = Corpus(
    "tasks", __doc__, batches, "length", grouped, ("kind", "length"),
    (option("--split", "reporting", choices=TEMPLATES),
     option("--haystack", "dialogs", choices=HAYSTACKS),
     option("--kinds", "", "separated by commas (all)", type=listed),
     option("--lengths", "4000,32000,128000", "of conversations, in tokens", type=numbers),
     option("--count", 0, "cases of a kind (40, 16, 6 by length)")),
)  # fmt: skip
PARTS = CORPUS.parts(report, "--split tuning --lengths 4000 --shares 8 --count 6")

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, ["all"]))
