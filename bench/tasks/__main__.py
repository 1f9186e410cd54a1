"""Is what a task needs in the cache when the answer begins, by kind of task?

A case is one conversation (real dialogs as haystack, `bench/data`) with messages planted in it, and
a turn that asks about them. A case counts when every message that its answer needs is whole in the
cache. Budgets are 1/4, 1/8 and 1/16 of the conversation. Kinds:

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
The conversation is a turn of its own before the question. The decision code runs in this process;
with `--server` the proxy and the patched server run, with the settings that a request can ask for.
Parts besides `all`: `factorial` measures what each signal of the ranking is worth
(`bench/evidence/factorial.py`), `agree` runs the default in both forms.

*Against* the fills, other settings of the proxy, no eviction. *Fails* when the default misses a bar
(`bench/tasks/score.py`) or a criterion of `bench/criteria.py` in a cell: a kind of task, or all, at
one length and budget; intervals draw whole templates; or when both forms differ (`agree`).

The templates of the splits are disjoint. Tune on `tuning` and `tuning_more` only; published figures
are of `reporting`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench import charts, criteria, record
from bench.driver import Bench, Report, Row, option, run_parts
from bench.engines import (
    OPTIONS,
    SETTINGS,
    Engine,
    InProcess,
    Setting,
    Spans,
    engine,
    history_of,
    settings_of,
    shares_of,
)
from bench.evidence import factorial
from bench.fills import FILLS, Rankings
from bench.tasks import score
from bench.tasks.cases import Case, cases, kinds
from bench.tasks.templates import TEMPLATES

_COLUMNS = ("kind", "length", "share", "arm", "tokens", "cases", "whole", "messages")
# Cases of a kind by the length of conversations, and for all other lengths.
_COUNTS = {4000: 40, 32000: 16}
_FEWEST = 6
NO_EVICTION = Setting(score.CEILING)


def measure(made: Engine, case: Case, shares: Sequence[int], arms: Sequence[str]) -> Iterator[Any]:
    """Yield one row for each share of the conversation and each arm."""
    settings = [setting for setting in SETTINGS if setting.arm in arms]
    if score.CEILING in arms:
        settings.append(NO_EVICTION)
    of_arm = {(r["share"], r["arm"]): r for r in measure_settings(made, case, shares, settings)}
    rankings = None
    if isinstance(made, InProcess) and set(arms) - set(score.ENGINE_ARMS):
        encoders = made.encoders
        rankings = Rankings(score.texts_of(case), encoders["built-in"], encoders.get("encoder"))
    spans = made.spans([*case.messages, *case.asked])
    for share in shares:
        if rankings is not None:
            budget = score.budget_of(_tokens(case, spans), share)
            for arm, found in score.fills(case, spans, budget, rankings).items():
                of_arm[share, arm] = _row(case, spans, share, (arm, found))
        yield from (of_arm[share, arm] for arm in arms if (share, arm) in of_arm)


def measure_settings(
    made: Engine, case: Case, shares: Sequence[int], settings: Sequence[Setting]
) -> Iterator[Any]:
    """Yield one row for each share of the conversation and each setting of the proxy."""
    messages = [*case.messages, *case.asked]
    spans = made.spans(messages)
    for share in shares:
        for setting in settings:
            budget = score.budget_of(_tokens(case, spans), share)
            name = f"{case.id} {share} {setting.arm} {time.monotonic_ns()}"
            session = made.begin(setting, None if setting is NO_EVICTION else budget, name)
            session.resident(history_of(messages))
            found = score.whole_share(case, spans, session.resident(messages))
            yield _row(case, spans, share, (setting.arm, found))


def _tokens(case: Case, spans: Spans) -> int:
    return spans[len(case.messages) - 1][1]


def _row(case: Case, spans: Spans, share: int, result: tuple[str, float]) -> dict[str, Any]:
    arm, found = result
    tokens = _tokens(case, spans)
    split, length = case.id.split()[0], int(case.id.split()[-2])
    return {"kind": case.kind, "scene": case.scene, "case": case.id, "split": split,
            "length": length, "tokens": tokens, "share": share, "question": case.id,
            "budget": score.budget_of(tokens, share), "arm": arm,
            "whole": found >= 1.0, "messages": round(found, 3)}  # fmt: skip


def misses(rows: Sequence[score.Row], most: int) -> Iterator[str]:
    """Yield the first cases of each kind that the default misses, in words."""
    for kind in dict.fromkeys(row["kind"] for row in rows):
        missed = [r for r in rows if r["kind"] == kind and r["arm"] == "default" and not r["whole"]]
        for row in missed[:most]:
            number = int(row["case"].split()[-1])
            case = cases(row["split"], kind, row["length"], number + 1)[number]
            yield f"\n{row['case']} at 1/{row['share']}: {row['messages']:.0%} of the messages"
            yield from (f"  needed   {case.messages[at]['content']}" for at in case.needed)
            yield from (f"  {message['role']:<9}{message['content']}" for message in case.asked)


def chosen(args: argparse.Namespace, length: int) -> Iterator[Case]:
    """Yield the cases of a length that were asked for."""
    count = args.count or _COUNTS.get(length, _FEWEST)
    for kind in kinds(args.split):
        if not args.kinds or kind in args.kinds.split(","):
            yield from cases(args.split, kind, length, count)


def lengths_of(args: argparse.Namespace) -> list[int]:
    """Return the lengths of conversations that were asked for."""
    return [int(part) for part in args.lengths.split(",")]


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all arms."""
    measured = [score.CEILING, *FILLS, *(setting.arm for setting in settings_of(args))]
    asked = args.arms.split(",") if args.arms else score.ARMS
    arms = [arm for arm in score.ARMS if arm in measured and arm in asked]
    for length in lengths_of(args):
        with engine(args.server, length, args.embedder) as made:
            for case in chosen(args, length):
                yield from measure(made, case, shares_of(args), arms)
                print(case.id, file=sys.stderr, flush=True)


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report percentages, differences and verdicts; bars and criteria are missed alike."""
    summary, found = {"split": args.split, **score.summarise(rows)}, score.cells(rows)
    default = [cell for cell in found if cell["arm"] == "default"]
    said = [record.table(default, _COLUMNS), *misses(rows, args.misses)]
    said.append(record.table(summary["verdicts"], criteria.VERDICT_COLUMNS))
    whole = summary["whole"].get("4000", {}).get("1/8", {})
    title = f"All needed messages in the cache, % of cases: 4,000 tokens, 1/8, split {args.split}"
    picture = charts.bars(title, whole, score.BARS, score.COLOURS)
    return Report(summary, summary["missed"], rows=found, picture=picture, said="\n".join(said))


def factorial_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the default with each combination of signals, of the first length."""
    drawn = list(chosen(args, lengths_of(args)[0]))

    def of(made: InProcess, setting: Setting) -> Iterator[Row]:
        for case in drawn:
            for row in measure_settings(made, case, shares_of(args), (setting,)):
                yield {**row, "conversation": f"{case.kind} {case.scene}"}

    yield from factorial.measured(of)


def of_factorial(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the effect of each signal by share and kind."""
    names = [*dict.fromkeys(row["kind"] for row in rows), "all kinds"]
    summary = {
        f"1/{share}": {
            kind: factorial.effects(
                [r for r in rows if r["share"] == share and kind in (r["kind"], "all kinds")]
            )
            for kind in names
        }
        for share in shares_of(args)
    }
    return Report({"split": args.split, **summary}, rows=score.cells(rows))


def both_forms(args: argparse.Namespace) -> Iterator[Row]:
    """Yield each case of the first length under the default, in this process and on servers."""
    length = lengths_of(args)[0]
    yield from compared(list(chosen(args, length)), length, shares_of(args))


def compared(drawn: Sequence[Case], length: int, shares: Sequence[int]) -> Iterator[Row]:
    """Yield the share of the needed messages of cases, in this process and on servers."""
    fast = InProcess()
    with engine(True, length) as real:
        for case in drawn:
            forms = (measure(made, case, shares, ("default",)) for made in (fast, real))
            for quick, slow in zip(*forms, strict=True):
                pair = [(row["tokens"], row["messages"]) for row in (quick, slow)]
                named = {"case": case.id, "share": quick["share"]}
                yield {**named, "in_process": pair[0], "on_servers": pair[1]}


def differing(rows: Sequence[Row]) -> list[str]:
    """Return the cases on which both forms differ, in words."""
    return [
        f"{r['case']} at 1/{r['share']}: {r['in_process']} in this process, {r['on_servers']} on"
        " servers"
        for r in rows
        if r["in_process"] != r["on_servers"]
    ]


_OPTIONS = (
    option("--split", "reporting", choices=TEMPLATES),
    option("--kinds", "", "separated by commas (all)"),
    option("--lengths", "4000,32000,128000", "of conversations, in tokens"),
    option("--count", 0, "cases of a kind (40, 16, 6 by length)"),
    *OPTIONS,
)
PARTS = {
    "all": Bench(
        "tasks", __doc__, "--split tuning --lengths 4000 --shares 8", rows_of, report, (), _OPTIONS
    ),
    "factorial": Bench(
        "tasks factorial", __doc__, "--split tuning --lengths 4000 --shares 8 --count 6",
        factorial_rows, of_factorial, (), _OPTIONS,
    ),
    "agree": Bench(
        "tasks agree", __doc__, "--split tuning --count 1 --lengths 4000 --shares 8", both_forms,
        lambda _, rows: Report({"cases": len(rows)}, differing(rows)),
        ("case", "share", "in_process", "on_servers"), _OPTIONS,
    ),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, ["all"]))
