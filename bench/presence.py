"""Is what an answer needs in the cache when it begins? What `evidence` and `tasks` share.

A talk is a conversation with turns that ask about it. A turn counts as `whole` when every row of
every message that its answer needs is in the cache when the answer begins, and as `half` when half
of the rows of each is; `messages` is the share of the needed messages that are whole. `exchange`
says, of turns with messages before their question, whether the last two of these are whole, a
question and its answer: a follow-up may refer to them. Fills always take them. All turns follow the
same conversation, as when a user edits the last message. A corpus of talks makes two benches:
`all` arms, and `factorial` (`bench/evidence/factorial.py`).

Criteria of a cell:

* `95 % of the best fusion`: the default has at least 95 % of what the best fused fill has
* `best single fill`, `no recall`: of the paired difference to the best fill by a single signal,
  and to the proxy without recall, the lower 95 % bound is above -3 points. Fewer than 3
  conversations have no interval; there the difference itself is above -3 points.

The best fill is chosen in each cell, by the figures of that cell, which favours the fill. Intervals
draw whole conversations, because the questions of one are alike."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import engines, record
from bench.driver import Bench, Option, Report
from bench.engines import DEFAULT, SETTINGS, Engine, InProcess, Message, Ranges, Setting, Spans
from bench.evidence import factorial
from bench.fills import FILLS, FUSED, SINGLE, Rankings, fill, random_blocks
from bench.stats import paired_difference, percent

SHARE_OF_FUSION, LEAST_POINTS = 0.95, -3.0
FUSION, FILL, NO_RECALL = "95 % of the best fusion", "best single fill", "no recall"
VERDICT_COLUMNS = (
    *("cell", "questions", "criterion", "against", "default", "other", "points", "low", "verdict"),
)
# `conversation`, `question`, `arm` and `whole`: one result of one arm.
Row = Mapping[str, Any]


def verdicts(cell: str, rows: Sequence[Row], arm: str = "default") -> list[dict[str, Any]]:
    """Return one row for each criterion that the arms of a cell allow, with `pass` or `FAIL`."""
    share = {
        name: percent(r["whole"] for r in rows if r["arm"] == name)
        for name in dict.fromkeys(r["arm"] for r in rows)
    }
    if arm not in share:
        return []
    common = {"cell": cell, "questions": sum(r["arm"] == arm for r in rows), "default": share[arm]}

    def verdict(criterion: str, other: str, holds: bool) -> dict[str, Any]:
        against = {"criterion": criterion, "against": other, "other": share[other]}
        return {**common, **against, "verdict": "pass" if holds else "FAIL"}

    found = []
    fusion = _best(share, FUSED)
    if fusion:
        found.append(verdict(FUSION, fusion, share[arm] >= SHARE_OF_FUSION * share[fusion]))
    for criterion, other in ((FILL, _best(share, SINGLE)), (NO_RECALL, _best(share, (NO_RECALL,)))):
        if other:
            interval = paired_difference(rows, arm, other)
            low = interval["points"] if interval["low"] is None else interval["low"]
            holds = low is not None and low > LEAST_POINTS
            found.append({**verdict(criterion, other, holds), **interval})
    return found


def failed(found: Iterable[Row]) -> list[str]:
    """Return the criteria that are missed, in words."""
    return [f"{r['cell']}: {r['criterion']}" for r in found if r["verdict"] == "FAIL"]


def _best(share: Mapping[str, float], arms: Sequence[str]) -> str:
    """Return which of the arms has the largest share; "" when none was measured."""
    return max((arm for arm in arms if arm in share), key=lambda arm: share[arm], default="")


NO_EVICTION = Setting("no eviction")
ARMS = (*(setting.arm for setting in SETTINGS), NO_EVICTION.arm, *FILLS)
LEAST_BUDGET = 256
_COUNTED = ("whole", "half", "messages")


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn that asks about a conversation."""

    id: str  # unique in its conversation
    # The messages that are sent after the conversation; the last one is the question.
    turn: Sequence[Message]
    needed: Sequence[int]  # indexes of the messages that the answer needs
    kinds: Sequence[str] = ()  # what tables group it by


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation, and the turns that ask about it."""

    messages: Sequence[Message]  # the conversation
    asked: Sequence[Asked]  # the turns, each of which follows it
    history: Sequence[Message]  # the messages that are sent before the first turn
    ranked: Sequence[int]  # indexes of the messages that a fill may take
    about: Mapping[str, Any]  # what every row says, among it `conversation`: what intervals draw
    # Indexes of the messages that take their part of a fill's budget first.
    fixed: Sequence[int] = ()


def budget_of(tokens: int, share: int) -> int:
    """Return the budget of a conversation of this many tokens."""
    return max(LEAST_BUDGET, tokens // share)


def measure(
    made: Engine, talk: Talk, shares: Sequence[int], arms: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Yield one row for each share, arm and turn: settings of the proxy, and fills in process."""
    wanted, rankings = set(arms), None
    if isinstance(made, InProcess) and wanted & set(FILLS):
        texts = [talk.messages[index]["content"] for index in talk.ranked]
        rankings = Rankings(texts, made.encoders.get("built-in"), made.encoders.get("encoder"))
    for share in shares:
        for setting in (*SETTINGS, NO_EVICTION):
            if setting.arm in wanted:
                yield from under(made, talk, share, setting)
        if rankings is None:
            continue
        for asked in talk.asked:
            spans = made.spans([*talk.messages, *asked.turn])
            budget = budget_of(_tokens(talk, spans), share)
            for arm, present in fills(talk, asked, spans, (rankings, budget)).items():
                if arm in wanted:
                    yield _row(talk, asked, spans, (share, arm, present, True))


def under(made: Engine, talk: Talk, share: int, setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield the row of each turn under a setting of the proxy, asked one after the other."""
    first = made.spans([*talk.messages, *talk.asked[0].turn])
    budget = budget_of(_tokens(talk, first), share)
    name = f"{talk.about['conversation']} {share} {setting.arm} {time.monotonic_ns()}"
    chats = [talk.history, *([*talk.messages, *asked.turn] for asked in talk.asked)]
    found = made.resident(setting, None if setting is NO_EVICTION else budget, name, chats)
    for asked, messages, resident in zip(talk.asked, chats[1:], found[1:], strict=True):
        spans = made.spans(messages)
        present = shares_of_needed(asked, spans, resident)
        yield _row(
            talk, asked, spans, (share, setting.arm, present, has_exchange(talk, spans, resident))
        )


def shares_of_needed(asked: Asked, spans: Spans, resident: Ranges) -> list[float]:
    """Return which share of the rows of each needed message is there."""
    return [engines.share_resident(spans[index], resident) for index in asked.needed]


def has_exchange(talk: Talk, spans: Spans, resident: Ranges) -> bool:
    """Return whether the turn's last two messages before its question are there."""
    question = max(spans)
    indexes = range(max(len(talk.messages), question - 2), question)
    return all(engines.share_resident(spans[index], resident) >= 1.0 for index in indexes)


def fills(
    talk: Talk, asked: Asked, spans: Spans, by: tuple[Rankings, int]
) -> dict[str, list[float]]:
    """Return what each fill has of the needed messages, by rankings and with a budget.

    The turn takes its part of the budget first, and so do fixed messages.
    """
    rankings, budget = by
    sizes = {at: spans[index][1] - spans[index][0] for at, index in enumerate(talk.ranked)}
    first = [*talk.fixed, *range(len(talk.messages), len(talk.messages) + len(asked.turn))]
    room = budget - sum(spans[index][1] - spans[index][0] for index in first)
    needed = [talk.ranked.index(index) for index in asked.needed]
    orders = rankings.orders(asked.turn[-1]["content"])
    orders["oracle"] = list(dict.fromkeys([*needed, *orders["newest"]]))
    found = {}
    for arm, order in orders.items():
        taken = fill(order, sizes, room)
        found[arm] = [float(at in taken) for at in needed]
    drawn = random_blocks(spans[talk.ranked[-1]][1], room, f"{asked.id} {budget}")
    return {**found, "random": shares_of_needed(asked, spans, drawn)}


def _tokens(talk: Talk, spans: Spans) -> int:
    return spans[len(talk.messages) - 1][1]


def _row(
    talk: Talk, asked: Asked, spans: Spans, result: tuple[int, str, Sequence[float], bool]
) -> dict[str, Any]:
    share, arm, present, exchange = result
    tokens = _tokens(talk, spans)
    return {
        **talk.about,
        "share": share,
        "budget": budget_of(tokens, share),
        "tokens": tokens,
        "question": asked.id,
        "kinds": asked.kinds,
        "arm": arm,
        "whole": min(present) >= 1.0,
        "half": min(present) >= 0.5,
        "messages": round(sum(each >= 1.0 for each in present) / len(present), 3),
        **({"exchange": exchange} if len(asked.turn) > 1 else {}),
    }


def cells(rows: Sequence[Row], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return percentages by these keys, share and arm."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in (*keys, "share", "arm")), []).append(row)
    return [
        {
            **dict(zip((*keys, "share", "arm"), found, strict=True)),
            "budget": mine[0]["budget"],
            "tokens": round(sum(row["tokens"] for row in mine) / len(mine)),
            "questions": len(mine),
            **_counted(mine),
        }
        for found, mine in groups.items()
    ]


def summarise(
    rows: Sequence[Row], by: str, grouped: Callable[[Sequence[Row]], Mapping[str, Sequence[Row]]]
) -> dict[str, Any]:
    """Return, for each value of the key `by` and each share, what the groups of its rows say.

    `questions` and `arms` (percentages) are by cell, `default minus` are paired differences over
    all rows, `verdicts` are those of the criteria in each cell.
    """
    summary: dict[str, Any] = {}
    for value, share in dict.fromkeys((row[by], row["share"]) for row in rows):
        mine = [row for row in rows if (row[by], row["share"]) == (value, share)]
        groups = grouped(mine)
        arms = [arm for arm in ARMS if any(row["arm"] == arm for row in mine)]
        others = [arm for arm in arms if arm != DEFAULT.arm] if DEFAULT.arm in arms else []
        summary.setdefault(str(value), {})[f"1/{share}"] = {
            "questions": {
                name: len({(row["conversation"], row["question"]) for row in group})
                for name, group in groups.items()
            },
            "arms": {name: _percentages(group, arms) for name, group in groups.items()},
            "default minus": {arm: paired_difference(mine, DEFAULT.arm, arm) for arm in others},
            "verdicts": [
                verdict
                for name, group in groups.items()
                for verdict in verdicts(f"{value} 1/{share} {name}", group)
            ],
        }
    return summary


def _percentages(rows: Sequence[Row], arms: Sequence[str]) -> dict[str, dict[str, float]]:
    of = {arm: [row for row in rows if row["arm"] == arm] for arm in arms}
    return {arm: _counted(mine) for arm, mine in of.items() if mine}


def _counted(rows: Sequence[Row]) -> dict[str, float]:
    """Return the percentages of rows; `exchange` is that of the turns that have one."""
    found = {kind: percent(row[kind] for row in rows) for kind in _COUNTED}
    whole = [row["exchange"] for row in rows if "exchange" in row]
    return found | ({"exchange": percent(whole)} if whole else {})


def verdicts_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all verdicts of a summary."""
    return [v for shares in summary.values() for each in shares.values() for v in each["verdicts"]]


def tables(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield one table for each part of a summary, whole evidence in percent, and the verdicts."""
    for value, shares in summary.items():
        for share, said in shares.items():
            by_cell = said["arms"]
            arms = [arm for arm in ARMS if any(arm in found for found in by_cell.values())]
            # Of the first cell that has it: of all rows where these are a cell.
            exchange = {
                arm: each["exchange"]
                for found in reversed(by_cell.values())
                for arm, each in found.items()
                if "exchange" in each
            }
            rows = [{"whole, %": "questions", **said["questions"]}]
            rows += [
                {"whole, %": arm, "exchange": exchange.get(arm)}
                | {cell: found[arm]["whole"] for cell, found in by_cell.items() if arm in found}
                for arm in arms
            ]
            columns = ["whole, %", *by_cell, *(["exchange"] if exchange else [])]
            yield f"{value}, {share}\n{record.table(rows, columns)}"
    yield record.table(verdicts_of(summary), VERDICT_COLUMNS)


def misses(rows: Sequence[Row], talks: Iterable[Talk], most: int) -> Iterator[str]:
    """Yield the first turns of each talk that the default misses, in words."""
    for talk in talks if most else ():
        asked = {each.id: each for each in talk.asked}
        about = talk.about.items()
        mine = [row for row in rows if about <= row.items() and row["question"] in asked]
        missed = [row for row in mine if row["arm"] == DEFAULT.arm and not row["whole"]]
        for row in missed[:most]:
            named = f"{row['question']} at 1/{row['share']}"
            others = [r["arm"] for r in mine if r["whole"] and _turn(r) == _turn(row)]
            yield f"\n{row['conversation']} {named}; found by {', '.join(others)}"
            each = asked[row["question"]]
            yield from (f"  needed   {talk.messages[at]['content']}" for at in each.needed)
            yield from (f"  {message['role']:<9}{message['content']}" for message in each.turn)


def _turn(row: Row) -> tuple[object, object]:
    return row["question"], row["share"]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The talks of one bench, and how their rows are grouped."""

    name: str
    about: str | None  # its help
    # Yields, by options, the longest conversation in tokens and talks up to that length.
    batches: Callable[[argparse.Namespace], Iterator[tuple[int, Iterable[Talk]]]]
    by: str  # the key of rows by whose values the summary is divided
    # Divides the rows of one value and share into cells.
    grouped: Callable[[Sequence[Row]], Mapping[str, Sequence[Row]]]
    keys: Sequence[str]  # the keys of the rows that are recorded, besides share and arm
    options: Sequence[Option]  # those that choose the talks

    def parts(
        self, report: Callable[[argparse.Namespace, list[Row]], Report], example: str
    ) -> dict[str, Bench]:
        """Return the two benches; `report` is that of all arms."""
        options = (*self.options, *engines.OPTIONS)
        return {
            "all": Bench(self.name, self.about, example, self.rows, report, (), options),
            "factorial": Bench(
                f"{self.name} factorial", self.about, example, self._combined, self._effects, (),
                options,
            ),
        }  # fmt: skip

    def rows(self, args: argparse.Namespace) -> Iterator[Row]:
        """Yield the rows of all arms, or of those that are asked for."""
        arms = [setting.arm for setting in engines.settings_of(args)]
        arms += [arm for arm in (NO_EVICTION.arm, *FILLS) if arm in args.arms or not args.arms]
        for length, talks in self.batches(args):
            with engines.engine(args.server, length, args.embedder) as made:
                for talk in talks:
                    yield from measure(made, talk, args.shares, arms)
                    print(talk.asked[0].id, talk.about, file=sys.stderr, flush=True)

    def talks(self, args: argparse.Namespace) -> list[Talk]:
        """Return the talks that were asked for."""
        return [talk for _, talks in self.batches(args) for talk in talks]

    def report(
        self, args: argparse.Namespace, rows: Sequence[Row], summary: Mapping[str, Any]
    ) -> Report:
        """Report all tables of a summary and what was missed; a missed criterion is a bar."""
        said = ["\n\n".join(tables(summary)), *misses(rows, self.talks(args), args.misses)]
        recorded = cells(rows, self.keys)
        return Report(summary, failed(verdicts_of(summary)), rows=recorded, said="\n".join(said))

    def _combined(self, args: argparse.Namespace) -> Iterator[Row]:
        """Yield the rows of the first talks with each combination of signals."""
        _, talks = next(self.batches(args))
        pairs = [(talk, share) for talk in talks for share in args.shares]

        def of(made: InProcess, setting: Setting) -> Iterator[Row]:
            for talk, share in pairs:
                yield from under(made, talk, share, setting)

        return factorial.measured(of)

    def _effects(self, args: argparse.Namespace, rows: Sequence[Row]) -> Report:
        """Report the effect of each signal by value, share and cell."""
        summary: dict[str, dict[str, Any]] = {}
        for value, share in dict.fromkeys((row[self.by], row["share"]) for row in rows):
            mine = [row for row in rows if (row[self.by], row["share"]) == (value, share)]
            by_cell = {name: factorial.effects(one) for name, one in self.grouped(mine).items()}
            summary.setdefault(str(value), {})[f"1/{share}"] = by_cell
        return Report(summary, rows=cells(rows, self.keys))
