"""Is the evidence in the cache when the answer begins, in real conversations?

Conversations with labelled evidence (`bench/data`) are sent with a question at their end, see
`bench.presence`. Answers are not graded. The budget is 1/4, 1/8 or 1/16 of the conversation.

Arms of the proxy: `default`; `default + encoder`, with the encoder of --embedder; `words only`;
`breadcrumb`, a policy that quotes evicted text (counts as present); `no recall`, keep-scores alone;
`discard`, nothing returns; `infllm`; where --arms names them `infllm 2`, `4` and `16` (blocks of a
look-up) and `blocks of 32` and `128` tokens. All others are fills of the same budget without the
proxy (`bench/fills.py`). Not measured: `recall: model` and `fused`, which need a model that
understands the question, and `truncate`, which is the fill `newest`.

The engine runs in this process; with --server the proxy and the patched server run, with
the settings that a request can ask for. Conversations are for tuning or for reporting
(`bench/evidence/splits.toml`); figures of the two are never mixed. Parts besides `all`: `factorial`
measures what each signal of the ranking is worth (`bench/evidence/factorial.py`), `quick` takes a
minute on servers.

*Against* the fills, and other settings of the proxy. *Fails* when the default misses a criterion of
`bench/presence.py` in a cell (all questions, a data set, a kind of question, a conversation, at one
budget), when less is found than recorded (`quick`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.driver import Bench, Report, Row, listed, option, run_parts
from bench.engines import DEFAULT, Engine, engine, servers
from bench.evidence.conversations import SPLITS, Conversation, conversations, kinds_of, split_of
from bench.presence import Asked, Corpus, Talk, measure, summarise
from bench.stats import percent

RECORDED = Path(__file__).parents[1] / "results/evidence.json"
# The quick form: short conversations for tuning, one share, the first questions, on servers.
QUICK_CONVERSATIONS = ("bfcl-finance", "mtrag-clapnq")
QUICK_SHARE, QUICK_QUESTIONS = 8, 18
# How much fewer questions, of 100, the quick form may find than recorded.
GUARD_POINTS = 8.0
_LONGEST = 30_000
# Cells of fewer questions say nothing.
_FEWEST = 10


def talk_of(source: Conversation) -> Talk:
    """Return a conversation with its questions; fills take the user's messages only."""
    asked = [
        Asked(each.id, each.messages, [2 * at for at in each.evidence], kinds_of(source, each))
        for each in source.questions
    ]
    data_set = source.id.split("-")[0]  # `bfcl` or `mtrag`
    about = {"split": split_of()[source.id], "source": data_set, "conversation": source.id}
    ranked = range(0, len(source.messages), 2)
    return Talk(source.messages, asked, source.messages[:-1], ranked, about)


def batches(args: argparse.Namespace) -> Iterator[tuple[int, list[Talk]]]:
    """Yield the conversations that were asked for, as one batch."""
    yield _LONGEST, [
        talk_of(each) for each in conversations()
        if each.id in args.conversations or not args.conversations
        if args.split in (split_of()[each.id], "both")
    ]  # fmt: skip


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of one split and share by cell: all, data sets, kinds, conversations.

    Cells of fewer than 10 questions are left out.
    """
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        kinds = ((2, kind) for kind in row["kinds"])
        for key in ((0, "all"), (1, row["source"]), *kinds, (3, row["conversation"])):
            groups.setdefault(key, []).append(row)
    return {
        name: mine
        for (_, name), mine in sorted(groups.items(), key=lambda each: each[0])
        if len({(row["conversation"], row["question"]) for row in mine}) >= _FEWEST
    }


def quick_talks() -> list[Talk]:
    """Return the conversations of the quick form with their first questions."""
    talks = [talk_of(each) for each in conversations() if each.id in QUICK_CONVERSATIONS]
    return [replace(talk, asked=talk.asked[:QUICK_QUESTIONS]) for talk in talks]


def quick(made: Engine) -> list[dict[str, Any]]:
    """Return the rows of the quick form: the default alone."""
    return [
        row for talk in quick_talks() for row in measure(made, talk, [QUICK_SHARE], [DEFAULT.arm])
    ]


def quick_summary(rows: Sequence[Row]) -> dict[str, float]:
    """Return the percentages of the quick form."""
    return {kind: percent(row[kind] for row in rows) for kind in ("whole", "half")}


def worse_than_recorded(rows: Sequence[Row], recorded: Path = RECORDED) -> list[str]:
    """Return what the default finds less of than recorded, by more than `GUARD_POINTS`."""
    before = json.loads(recorded.read_text("utf-8"))["summary"]["quick"]
    now = quick_summary(rows)
    return [
        f"{kind} evidence at 1/{QUICK_SHARE}: {now[kind]} %, recorded {was} %"
        for kind, was in before.items()
        if now[kind] < was - GUARD_POINTS
    ]


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all arms; those of the quick form come last, under `quick`."""
    yield from CORPUS.rows(args)
    with engine(args.server, _LONGEST) as made:
        yield {"quick": quick(made)}


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report percentages, differences and verdicts; a criterion that is missed is a bar."""
    *mine, last = rows
    found = CORPUS.report(args, mine, summarise(mine, CORPUS.by, grouped))
    return replace(found, summary={**found.summary, "quick": quick_summary(last["quick"])})


def quick_rows(_: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the quick form, on servers."""
    with servers(_LONGEST) as made:
        yield from quick(made)


def of_quick(_: argparse.Namespace, rows: list[Row]) -> Report:
    """Report the percentages; less than recorded misses the bar."""
    return Report(quick_summary(rows), worse_than_recorded(rows) if RECORDED.exists() else [])


CORPUS = Corpus(
    "evidence", __doc__, batches, "split", grouped, ("split", "conversation"),
    (option("--split", "both", choices=(*SPLITS, "both")),
     option("--conversations", "", "their names, separated by commas (all)", type=listed)),
)  # fmt: skip
PARTS = CORPUS.parts(report, "--split tuning --shares 8 --misses 5")
PARTS["all"] = replace(PARTS["all"], measure=rows_of)
PARTS["quick"] = Bench("evidence quick", __doc__, "", quick_rows, of_quick)

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, ["all"]))
