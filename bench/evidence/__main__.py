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
the settings that a request can ask for. --agree runs the default on both.

Conversations are for tuning or for reporting (`bench/evidence/splits.toml`); figures of the two
are never mixed. The bench fails when the default misses a criterion of `bench/criteria.py` in a
cell: all questions, a data set, a kind of question, or a conversation, at one budget.

--factorial measures what each signal of the ranking is worth (`bench/evidence/factorial.py`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import criteria, record
from bench.criteria import paired_difference, percent
from bench.engines import (
    DEFAULT,
    SETTINGS,
    Engine,
    InProcess,
    Setting,
    engine,
    servers,
    share_resident,
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
_EXAMPLES = """examples:
  python -m bench.evidence --split tuning
  python -m bench.evidence --split tuning --conversations bfcl-student --shares 8,16 --misses 5
  python -m bench.evidence --agree --conversations bfcl-finance --shares 8
  python -m bench.evidence --factorial --split tuning --shares 8
  python -m bench.evidence --out bench/results/evidence.json
"""


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


def tables(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield one table for each split and share: whole evidence in percent, by arm and cell."""
    for split, shares in summary.items():
        for share, said in shares.items():
            cells_of = said["arms"]
            rows = [
                {"whole, %": arm, **{cell: arms[arm]["whole"] for cell, arms in cells_of.items()}}
                for arm in _ARMS
                if arm in cells_of["all"]
            ]
            rows[0:0] = [{"whole, %": "questions", **said["questions"]}]
            yield f"{split}, {share}\n{record.table(rows, ('whole, %', *cells_of))}"


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


def differing(talks: Sequence[Conversation], shares: Sequence[int], most: int) -> list[str]:
    """Return the questions on which the form in this process and that on servers differ."""
    said, fast = list[str](), InProcess()
    with servers(_LONGEST) as real:
        for talk in talks:
            for share in shares:
                asked = talk.questions[:most]
                quick_has, real_has = (
                    Measurement(made, talk, share).by_setting(DEFAULT, asked, "agree")
                    for made in (fast, real)
                )
                said += [
                    f"{talk.id} {name} at 1/{share}: {has} in this process, {real_has[name]} on"
                    " servers"
                    for name, has in quick_has.items()
                    if has != real_has[name]
                ]
                print(f"{talk.id} at 1/{share}: {len(asked)} questions", file=sys.stderr)
    return said


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON; 1 when a criterion is missed."""
    args = _parser().parse_args(argv)
    shares = [int(part) for part in args.shares.split(",")]
    chosen = args.conversations.split(",") if args.conversations else list(split_of())
    talks = [
        talk for talk in conversations()
        if talk.id in chosen and args.split in (split_of()[talk.id], "both")
    ]  # fmt: skip
    if args.agree:
        differences = differing(talks, shares, args.questions)
        print("\n".join(differences) or "both forms agree")
        return int(bool(differences))
    if args.quick:
        return _quick()
    if args.factorial:
        return _factorial(talks, shares, args.out)
    rows: list[dict[str, Any]] = []
    with engine(args.server, _LONGEST, args.embedder) as made:
        settings = [each for each in SETTINGS if each.on_servers or not args.server]
        settings = [each for each in settings if each.embedder != "encoder" or args.embedder]
        wanted = args.arms.split(",") if args.arms else _ARMS
        for talk in talks:
            rows += measure(made, talk, shares, [each for each in settings if each.arm in wanted])
            print(f"{talk.id}: measured", file=sys.stderr, flush=True)
        quick_rows = quick(made)
    summary = summarise(rows)
    print("\n\n".join(tables(summary)))
    print("\n".join(misses(rows, args.misses)))
    verdicts = verdicts_of(summary)
    print(record.table(verdicts, criteria.VERDICT_COLUMNS))
    summary["quick"] = quick_summary(quick_rows)
    print(f"written: {record.write('evidence', cells(rows), summary, args.out)}")
    failures = criteria.failed(verdicts)
    print(f"{len(failures)} of {len(verdicts)} criteria missed")
    return int(bool(failures))


def _factorial(talks: Sequence[Conversation], shares: Sequence[int], out: Path | None) -> int:
    rows: list[dict[str, Any]] = []
    for number, signals in enumerate(factorial.combinations(), 1):
        with factorial.only(signals) as setting:
            made = InProcess()
            for talk in talks:
                for share in shares:
                    one = Measurement(made, talk, share)
                    answers = {setting.arm: one.by_setting(setting, talk.questions, "factorial")}
                    rows += ({**row, "signals": signals} for row in one.rows(answers))
        factorial.tell_progress(number)
    summary = {
        split: {
            f"1/{share}": factorial.effects(
                [row for row in rows if (row["split"], row["share"]) == (split, share)]
            )
            for share in shares
        }
        for split in dict.fromkeys(row["split"] for row in rows)
    }
    record.tell("evidence", cells(rows), summary, out or Path("out/bench/evidence_factorial.json"))
    return 0


def _quick() -> int:
    with servers(_LONGEST) as made:
        rows = quick(made)
    print(json.dumps(quick_summary(rows)))
    said = worse_than_recorded(rows) if RECORDED.exists() else []
    for line in said:
        print(f"worse than recorded: {line}", file=sys.stderr)
    return int(bool(said))


def _parser() -> argparse.ArgumentParser:
    parser = record.command("evidence", __doc__, _EXAMPLES)
    parser.add_argument("--split", choices=(*SPLITS, "both"), default="both", help="(both)")
    parser.add_argument(
        "--conversations", default="", help="their names, separated by commas (all)"
    )
    parser.add_argument("--shares", default="4,8,16", help="budgets, as 1/share of a conversation")
    parser.add_argument("--arms", default="", help="of the proxy, separated by commas (all)")
    parser.add_argument("--embedder", type=Path, help="directory of an encoder: two more arms")
    parser.add_argument("--misses", type=int, default=0, help="print so many missed questions")
    parser.add_argument("--server", action="store_true", help="real servers, without fills")
    parser.add_argument("--agree", action="store_true", help="compare both forms of the default")
    parser.add_argument(
        "--questions", type=int, default=1000, help="with --agree, of a conversation (1000)"
    )
    parser.add_argument("--quick", action="store_true", help="a minute of the default on servers")
    parser.add_argument("--factorial", action="store_true", help="what each signal is worth")
    parser.add_argument("--out", type=Path, help="the JSON file (out/bench/evidence.json)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
