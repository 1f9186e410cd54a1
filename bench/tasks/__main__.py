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
`--agree` runs the default in both forms on the same cases.

The bench fails when the default misses a bar (`bench/tasks/score.py`) or a criterion of
`bench/criteria.py` in a cell: a kind of task, or all, at one length and budget. Intervals draw
whole templates.

`--factorial` measures what each signal of the ranking is worth (`bench/evidence/factorial.py`).

The templates of the splits are disjoint. Tune on `tuning` and `tuning_more` only; published figures
are of `reporting`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import criteria, record
from bench.engines import SETTINGS, Engine, InProcess, Setting, Spans, engine, history_of
from bench.evidence import factorial
from bench.fills import Rankings
from bench.tasks import plot, score
from bench.tasks.cases import Case, cases, kinds
from bench.tasks.templates import TEMPLATES

_COLUMNS = ("kind", "length", "share", "arm", "tokens", "cases", "whole", "messages")
# Cases of a kind by the length of conversations, and for all other lengths.
_COUNTS = {4000: 40, 32000: 16}
_FEWEST = 6
NO_EVICTION = Setting(score.CEILING)
_EXAMPLES = """examples:
  python -m bench.tasks --split tuning --lengths 4000 --shares 8
  python -m bench.tasks --split tuning --kinds multi-value --lengths 4000 --shares 8 --misses 3
  python -m bench.tasks --server --count 2 --lengths 4000 --shares 8 --arms default
  python -m bench.tasks --split tuning --agree --count 1 --lengths 4000 --shares 8
  python -m bench.tasks --out bench/results/tasks.json
"""


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write JSON and SVG; 1 when a bar or a criterion is missed."""
    args = _parser().parse_args(argv)
    lengths, shares = (
        [int(part) for part in text.split(",")] for text in (args.lengths, args.shares)
    )
    chosen = [kind for kind in kinds(args.split) if not args.kinds or kind in args.kinds.split(",")]
    arms = [arm for arm in score.ARMS if arm in args.arms.split(",")]
    left_out = {
        setting.arm
        for setting in SETTINGS
        if (setting.embedder == "encoder" and not args.embedder)
        or (args.server and not setting.on_servers)
    }
    arms = [arm for arm in arms if arm not in left_out]
    if args.agree:
        differences = differing(args.split, lengths[0], shares, args.count or 1)
        print("\n".join(differences) or "both forms agree")
        return int(bool(differences))
    if args.factorial:
        return _factorial(args, chosen, shares)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        count = args.count or _COUNTS.get(length, _FEWEST)
        with engine(args.server, length, args.embedder) as made:
            for kind in chosen:
                began = time.monotonic()
                for case in cases(args.split, kind, length, count):
                    rows += measure(made, case, shares, arms)
                took = time.monotonic() - began
                print(f"{kind}, {length} tokens: {took:.0f} s", file=sys.stderr, flush=True)
    found = score.cells(rows)
    print(record.table([cell for cell in found if cell["arm"] == "default"], _COLUMNS))
    for line in misses(rows, args.misses):
        print(line)
    summary = {"split": args.split, **score.summarise(rows)}
    print(record.table(summary["verdicts"], criteria.VERDICT_COLUMNS))
    picture = _picture(summary, args.split)
    record.tell("tasks", found, summary, args.out, picture)
    print(f"missed: {len(summary['missed'])}")
    return int(bool(summary["missed"]))


def _factorial(args: Any, kinds_chosen: Sequence[str], shares: Sequence[int]) -> int:
    length = int(args.lengths.split(",")[0])
    count = args.count or _FEWEST
    rows: list[dict[str, Any]] = []
    for number, signals in enumerate(factorial.combinations(), 1):
        with factorial.only(signals) as setting:
            made = InProcess()
            for kind in kinds_chosen:
                for case in cases(args.split, kind, length, count):
                    rows += (
                        {**row, "signals": signals, "conversation": f"{kind} {case.scene}"}
                        for row in measure_settings(made, case, shares, (setting,))
                    )
        factorial.tell_progress(number)
    summary = {
        f"1/{share}": {
            kind: factorial.effects(
                [r for r in rows if r["share"] == share and kind in (r["kind"], "all kinds")]
            )
            for kind in (*kinds_chosen, "all kinds")
        }
        for share in shares
    }
    found = score.cells(rows)
    out = args.out or Path("out/bench/tasks_factorial.json")
    record.tell("tasks", found, {"split": args.split, **summary}, out)
    return 0


def differing(split: str, length: int, shares: Sequence[int], count: int) -> list[str]:
    """Return the cases on which the form in this process and that on servers differ."""
    fast = InProcess()
    said = []
    with engine(True, length) as real:
        for kind in kinds(split):
            for case in cases(split, kind, length, count):
                pairs = zip(
                    measure(fast, case, shares, ("default",)),
                    measure(real, case, shares, ("default",)),
                    strict=True,
                )
                for quick, slow in pairs:
                    if (quick["tokens"], quick["messages"]) != (slow["tokens"], slow["messages"]):
                        said.append(
                            f"{case.id} at 1/{quick['share']}: {quick['messages']} of the messages"
                            f" in this process, {slow['messages']} on servers"
                        )
    return said


def _picture(summary: dict[str, Any], split: str) -> str:
    whole = summary["whole"].get("4000", {}).get("1/8", {})
    title = f"All needed messages in the cache, % of cases: 4,000 tokens, 1/8, split {split}"
    return plot.bars(title, whole, score.BARS)


def _parser() -> Any:
    parser = record.command("tasks", __doc__, _EXAMPLES)
    parser.add_argument("--split", choices=TEMPLATES, default="reporting", help="(reporting)")
    parser.add_argument("--kinds", default="", help="separated by commas (all)")
    parser.add_argument(
        "--lengths", default="4000,32000,128000", help="of conversations, in tokens"
    )
    parser.add_argument("--shares", default="4,8,16", help="budgets, as 1/share of a conversation")
    parser.add_argument("--arms", default=",".join(score.ARMS), help="separated by commas (all)")
    parser.add_argument("--embedder", type=Path, help="directory of an encoder: more arms")
    parser.add_argument("--count", type=int, default=0, help="cases of a kind (40, 16, 6)")
    parser.add_argument(
        "--misses", type=int, default=0, help="print so many missed cases of a kind"
    )
    parser.add_argument(
        "--server", action="store_true", help="real servers instead of this process"
    )
    parser.add_argument(
        "--factorial", action="store_true", help="what each signal is worth, first length"
    )
    parser.add_argument("--agree", action="store_true", help="compare both forms, first length")
    parser.add_argument("--out", type=Path, help="the JSON file (out/bench/tasks.json)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
