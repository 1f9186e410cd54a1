"""Is the evidence in the cache when the answer begins, in real conversations?

Conversations with labelled evidence (`bench/data`) are sent with a question at their end. A
question counts as `whole` when every row of every message that answers it is in the cache when the
answer begins, and as `half` when half of the rows of each is. Answers are not graded. The budget is
1/4, 1/8 or 1/16 of the conversation. All questions follow the same conversation, as when a user
edits the last message.

Arms of the proxy: `default`; `default + encoder`, with the encoder of --embedder; `words only`;
`breadcrumb`, a policy that quotes evicted text (counts as present); `no recall`, keep-scores alone;
`discard`, nothing returns; `infllm`. All others are fills of the same budget without the proxy
(`bench/fills.py`). Not measured: `recall: model` and `fused`, which need a model that understands
the question, and `truncate`, which is the fill `newest`.

The decision code runs in this process; with --server the proxy and the patched server run, with
the settings that a request can ask for. Conversations are for tuning or for reporting
(`bench/evidence/splits.toml`); figures of the two are never mixed. Parts besides `all`: `factorial`
measures what each signal of the ranking is worth (`bench/evidence/factorial.py`), `agree` runs the
default in both forms, `quick` takes a minute on servers.

*Against* the fills, and other settings of the proxy. *Fails* when the default misses a criterion of
`bench/criteria.py` in a cell (all questions, a data set, a kind of question, a conversation, at one
budget), when both forms differ (`agree`), when less is found than recorded (`quick`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import criteria, record
from bench.criteria import paired_difference, percent
from bench.driver import Bench, Report, Row, option, run_parts
from bench.engines import (
    DEFAULT,
    OPTIONS,
    SETTINGS,
    Engine,
    InProcess,
    Setting,
    engine,
    servers,
    settings_of,
    share_resident,
    shares_of,
)
from bench.evidence import factorial
from bench.evidence.conversations import (
    SPLITS,
    Conversation,
    Question,
    conversations,
    kinds_of,
    split_of,
)
from bench.fills import FILLS, Rankings, fill, random_blocks

RECORDED = Path(__file__).parents[1] / "results/evidence.json"
# The quick form: short conversations for tuning, one share, the first questions, on servers.
QUICK_CONVERSATIONS = ("bfcl-finance", "mtrag-clapnq")
QUICK_SHARE, QUICK_QUESTIONS = 8, 18
# How much fewer questions, of 100, the quick form may find than recorded.
GUARD_POINTS = 8.0
_LEAST_BUDGET, _LONGEST = 256, 30_000
# Cells of fewer questions say nothing.
_FEWEST = 10
_ARMS = (*(setting.arm for setting in SETTINGS), *FILLS)


def found(shares: Sequence[float]) -> dict[str, bool]:
    """Return whether all evidence is resident, as a whole and by half."""
    return {"whole": min(shares) >= 1.0, "half": min(shares) >= 0.5}


class Measurement:
    """One conversation at one budget: what each arm has in the cache for each question."""

    def __init__(self, made: Engine, talk: Conversation, share: int) -> None:
        self._made = made
        self._talk = talk
        spans = made.spans(talk.messages)
        self._total = max(end for _, end in spans.values())
        self._share = share
        self._budget = max(_LEAST_BUDGET, self._total // share)

    def rows(self, arms: Mapping[str, Mapping[str, dict[str, bool]]]) -> Iterator[dict[str, Any]]:
        """Yield one row for each arm and question, with what tables and criteria group by."""
        talk = self._talk
        kinds = {question.id: kinds_of(talk, question) for question in talk.questions}
        for arm, answers in arms.items():
            for question, has in answers.items():
                yield {
                    "split": split_of()[talk.id], "source": talk.source, "conversation": talk.id,
                    "share": self._share, "budget": self._budget, "tokens": self._total,
                    "question": question, "kinds": kinds[question], "arm": arm, **has,
                }  # fmt: skip

    def by_setting(
        self, setting: Setting, questions: Sequence[Question], tag: str
    ) -> dict[str, dict[str, bool]]:
        """Return what the proxy has for each question, asked one after the other."""
        talk, answers = self._talk, {}
        name = f"{talk.id} {self._share} {setting.arm} {tag}"
        session = self._made.begin(setting, self._budget, name)
        session.resident(talk.messages[:-1])
        for question in questions:
            messages = [*talk.messages, *question.messages]
            spans, resident = self._made.spans(messages), session.resident(messages)
            answers[question.id] = found(
                [share_resident(spans[2 * at], resident) for at in question.evidence]
            )
        return answers

    def by_fills(
        self, rankings: Rankings, questions: Sequence[Question]
    ) -> dict[str, dict[str, dict[str, bool]]]:
        """Return what each fill has for each question; the turn takes its part of the budget."""
        answers: dict[str, dict[str, dict[str, bool]]] = {}
        n = len(self._talk.texts)
        for question in questions:
            spans = self._made.spans([*self._talk.messages, *question.messages])
            sizes = {at: spans[2 * at][1] - spans[2 * at][0] for at in range(n)}
            room = self._budget - sum(b - a for at, (a, b) in spans.items() if at >= 2 * n)
            orders = rankings.orders(question.text)
            orders["oracle"] = list(dict.fromkeys([*question.evidence, *orders["newest"]]))
            for arm, order in orders.items():
                taken = fill(order, sizes, room)
                has = found([float(at in taken) for at in question.evidence])
                answers.setdefault(arm, {})[question.id] = has
            drawn = random_blocks(spans[2 * n - 2][1], room, f"{question.id} {self._share}")
            answers.setdefault("random", {})[question.id] = found(
                [share_resident(spans[2 * at], drawn) for at in question.evidence]
            )
        return answers


def measure(
    made: Engine, talk: Conversation, shares: Sequence[int], arms: Sequence[Setting]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a conversation: settings of the proxy, and fills in this process."""
    encoders = made.encoders if isinstance(made, InProcess) else {}
    rankings = None
    if encoders:
        rankings = Rankings(talk.texts, encoders.get("built-in"), encoders.get("encoder"))
    for share in shares:
        one = Measurement(made, talk, share)
        answers = {setting.arm: one.by_setting(setting, talk.questions, "") for setting in arms}
        if rankings is not None:
            answers |= one.by_fills(rankings, talk.questions)
        yield from one.rows(answers)


def cells(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return percentages by split, conversation, share and arm."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("split", "conversation", "share", "arm"))
        groups.setdefault(key, []).append(row)
    made = []
    for (split, conversation, share, arm), mine in groups.items():
        counts = {name: mine[0][name] for name in ("budget", "tokens")}
        shares = {kind: percent(r[kind] for r in mine) for kind in ("whole", "half")}
        made.append({"split": split, "conversation": conversation, "share": share, **counts,
                     "questions": len(mine), "arm": arm, **shares})  # fmt: skip
    return made


def grouped(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of one split and share by cell: all, data sets, kinds, conversations.

    Cells of fewer than 10 questions are left out.
    """
    groups: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds = ((2, kind) for kind in row["kinds"])
        for key in ((0, "all"), (1, row["source"]), *kinds, (3, row["conversation"])):
            groups.setdefault(key, []).append(row)
    return {
        name: mine
        for (_, name), mine in sorted(groups.items(), key=lambda each: each[0])
        if len({(row["conversation"], row["question"]) for row in mine}) >= _FEWEST
    }


def tables(summary: Mapping[str, Any], verdicts: Sequence[Row]) -> Iterator[str]:
    """Yield one table for each split and share: whole evidence in percent, by arm and cell.

    The last table has the verdicts.
    """
    for split in (name for name in SPLITS if name in summary):
        for share, said in summary[split].items():
            cells_of = said["arms"]
            rows = [
                {"whole, %": arm, **{cell: arms[arm]["whole"] for cell, arms in cells_of.items()}}
                for arm in _ARMS
                if arm in cells_of["all"]
            ]
            rows[0:0] = [{"whole, %": "questions", **said["questions"]}]
            yield f"{split}, {share}\n{record.table(rows, ('whole, %', *cells_of))}"
    yield record.table(verdicts, criteria.VERDICT_COLUMNS)


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, by split and share: percentages by cell and arm, differences, and verdicts."""
    summary: dict[str, Any] = {}
    for split in dict.fromkeys(row["split"] for row in rows):
        of_split = summary.setdefault(split, {})
        for share in sorted({row["share"] for row in rows}):
            mine = [r for r in rows if (r["split"], r["share"]) == (split, share)]
            if not mine:
                continue
            groups = grouped(mine)
            of_split[f"1/{share}"] = {
                "questions": {
                    name: len({(r["conversation"], r["question"]) for r in group})
                    for name, group in groups.items()
                },
                "arms": {name: _arms(group) for name, group in groups.items()},
                "default minus": _differences(mine),
                "verdicts": [
                    verdict
                    for name, group in groups.items()
                    for verdict in criteria.verdicts(f"{split} 1/{share} {name}", group)
                ],
            }
    return summary


def _arms(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    arms = [arm for arm in _ARMS if any(row["arm"] == arm for row in rows)]
    of = {arm: [row for row in rows if row["arm"] == arm] for arm in arms}
    return {
        arm: {kind: percent(row[kind] for row in mine) for kind in ("whole", "half")}
        for arm, mine in of.items()
    }


def _differences(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    arms = [arm for arm in _ARMS if any(row["arm"] == arm for row in rows)]
    if DEFAULT.arm not in arms:
        return {}
    return {arm: paired_difference(rows, DEFAULT.arm, arm) for arm in arms if arm != DEFAULT.arm}


def verdicts_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the verdicts of all splits and shares."""
    return [v for split in summary.values() for each in split.values() for v in each["verdicts"]]


def misses(rows: Sequence[Mapping[str, Any]], most: int) -> Iterator[str]:
    """Yield the first questions of each conversation whose evidence the default misses."""
    talks = {talk.id: talk for talk in conversations()}
    for name in dict.fromkeys(row["conversation"] for row in rows):
        missed = [
            row for row in rows
            if (row["conversation"], row["arm"], row["whole"]) == (name, DEFAULT.arm, False)
        ]  # fmt: skip
        for row in missed[:most]:
            talk = talks[name]
            question = next(q for q in talk.questions if q.id == row["question"])
            others = [r["arm"] for r in rows if r["whole"] and r["share"] == row["share"]
                      and r["question"] == question.id and r["conversation"] == name]  # fmt: skip
            yield f"\n{name} {question.id} at 1/{row['share']}; found by {', '.join(others)}"
            yield from (f"  needed   {talk.texts[at]}" for at in question.evidence)
            yield from (f"  {m['role']:<9}{m['content']}" for m in question.messages)


def quick(made: Engine, tag: str = "quick") -> list[dict[str, Any]]:
    """Return the rows of the quick form: the default alone."""
    rows = list[dict[str, Any]]()
    for talk in conversations():
        if talk.id in QUICK_CONVERSATIONS:
            one = Measurement(made, talk, QUICK_SHARE)
            asked = talk.questions[:QUICK_QUESTIONS]
            rows += one.rows({DEFAULT.arm: one.by_setting(DEFAULT, asked, tag)})
    return rows


def quick_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the percentages of the quick form."""
    return {kind: percent(row[kind] for row in rows) for kind in ("whole", "half")}


def worse_than_recorded(rows: Sequence[Mapping[str, Any]], recorded: Path = RECORDED) -> list[str]:
    """Return what the default finds less of than recorded, by more than `GUARD_POINTS`."""
    before = json.loads(recorded.read_text("utf-8"))["summary"]["quick"]
    now = quick_summary(rows)
    return [
        f"{kind} evidence at 1/{QUICK_SHARE}: {now[kind]} %, recorded {was} %"
        for kind, was in before.items()
        if now[kind] < was - GUARD_POINTS
    ]


def chosen(args: argparse.Namespace) -> list[Conversation]:
    """Return the conversations that were asked for."""
    wanted = args.conversations.split(",") if args.conversations else list(split_of())
    return [
        talk for talk in conversations()
        if talk.id in wanted and args.split in (split_of()[talk.id], "both")
    ]  # fmt: skip


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all arms; those of the quick form come last, under `quick`."""
    with engine(args.server, _LONGEST, args.embedder) as made:
        for talk in chosen(args):
            yield from measure(made, talk, shares_of(args), settings_of(args))
            print(f"{talk.id}: measured", file=sys.stderr, flush=True)
        yield {"quick": quick(made)}


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report percentages, differences and verdicts; a criterion that is missed is a bar."""
    *mine, last = rows
    summary = summarise(mine)
    verdicts = verdicts_of(summary)
    summary["quick"] = quick_summary(last["quick"])
    said = ["\n\n".join(tables(summary, verdicts)), *misses(mine, args.misses)]
    return Report(summary, criteria.failed(verdicts), rows=cells(mine), said="\n".join(said))


def factorial_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the default with each combination of signals."""
    talks, shares = chosen(args), shares_of(args)

    def of(made: InProcess, setting: Setting) -> Iterator[Row]:
        for talk in talks:
            for share in shares:
                one = Measurement(made, talk, share)
                yield from one.rows(
                    {setting.arm: one.by_setting(setting, talk.questions, "factorial")}
                )

    yield from factorial.measured(of)


def of_factorial(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the effect of each signal by split and share."""
    summary = {
        split: {
            f"1/{share}": factorial.effects(
                [row for row in rows if (row["split"], row["share"]) == (split, share)]
            )
            for share in shares_of(args)
        }
        for split in dict.fromkeys(row["split"] for row in rows)
    }
    return Report(summary, rows=cells(rows))


def both_forms(args: argparse.Namespace) -> Iterator[Row]:
    """Yield what the default has for each question, in this process and on servers."""
    fast = InProcess()
    with servers(_LONGEST) as real:
        for talk in chosen(args):
            for share in shares_of(args):
                asked = talk.questions[: args.questions]
                quick_has, real_has = (
                    Measurement(made, talk, share).by_setting(DEFAULT, asked, "agree")
                    for made in (fast, real)
                )
                for name, has in quick_has.items():
                    named = {"conversation": talk.id, "question": name, "share": share}
                    yield {**named, "in_process": has, "on_servers": real_has[name]}


def of_both_forms(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the questions on which both forms differ."""
    differing = [
        f"{r['conversation']} {r['question']} at 1/{r['share']}: {r['in_process']} in this process,"
        f" {r['on_servers']} on servers"
        for r in rows
        if r["in_process"] != r["on_servers"]
    ]
    return Report({"questions": len(rows), "differ": len(differing)}, differing)


def quick_rows(_: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the quick form, on servers."""
    with servers(_LONGEST) as made:
        yield from quick(made)


def of_quick(_: argparse.Namespace, rows: list[Row]) -> Report:
    """Report the percentages; less than recorded misses the bar."""
    return Report(quick_summary(rows), worse_than_recorded(rows) if RECORDED.exists() else [])


_OPTIONS = (
    option("--split", "both", choices=(*SPLITS, "both")),
    option("--conversations", "", "their names, separated by commas (all)"),
    *OPTIONS,
)
PARTS = {
    "all": Bench(
        "evidence", __doc__, "--split tuning --misses 5", rows_of, report, (), _OPTIONS
    ),
    "factorial": Bench(
        "evidence factorial", __doc__, "--split tuning --shares 8", factorial_rows, of_factorial,
        (), _OPTIONS,
    ),
    "agree": Bench(
        "evidence agree", __doc__, "--conversations bfcl-finance --shares 8", both_forms,
        of_both_forms, ("conversation", "question", "share", "in_process", "on_servers"),
        (*_OPTIONS, option("--questions", 1000, "of a conversation")),
    ),
    "quick": Bench("evidence quick", __doc__, "", quick_rows, of_quick),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, ["all"]))
