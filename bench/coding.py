"""Is what a coding agent repeats in its next message in the cache when the message begins?

Sessions of Claude Code (`bench/data`) are sent request by request, each with the whole history, as
an agent sends them. Of the recorded answer, its text and the arguments of its calls, those words
count that one to three earlier messages have, too: names, paths, numbers. Such a word is present
when all tokens of one place with it are in the cache. Nobody has chosen the words for a search to
find them. The budget is 1/4, 1/8 or 1/16 of a session of about 80,000 tokens; turns whose prompt
fits into the budget are left out. The engine runs in this process (`bench/engines.py`), and no
model answers.

`words` is the share of all such words that are present, `whole` that of the turns with all of them.
`runs` is the share of the runs of six words that any earlier message has, too: text that is copied,
whether it is rare or not. A policy that keeps rare words loses there.
Arms: settings of the proxy as in `bench.evidence`, and fills of the budget with whole messages
beside the system prompt, the last message of the user, the last answer and what follows it:
`newest`; `bm25`, by the last message of the user, the last answer, and the beginning of each
result; `oracle`, by how many of the words, not of the runs, a message has for its length. `random`
has blocks of 64 tokens beside these instead. Each answer is decoded as text, as one that another
server has generated. Sessions are for tuning or for reporting, see the data. None has reminders of
the client; `--notes` adds messages in which the client says that a file has changed.

*Against* the fills, and the proxy without the ranking (`no recall`) or recovery (`discard`).
*Fails* when, of a split and share, the lower 95 % bound of the paired difference in whole turns to
the best fill but the oracle, or to `no recall`, is not above -3 points; and when the share of words
or of runs is less than there."""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench import record
from bench.driver import Bench, Report, Row, listed, numbers, option
from bench.engines import DEFAULT, SETTINGS, InProcess, Ranges
from bench.fills import bm25, fill, random_blocks
from bench.presence import LEAST_POINTS
from bench.stats import paired_difference, percent
from bench.vocabulary import Renderer, qwen2

SESSIONS = Path(__file__).parent / "data" / "coding_sessions.json.gz"
FILLS = ("newest", "random", "bm25", "oracle")
_RARE, _ANSWER_CHARS, _RESULT_CHARS, _ASKED_CHARS = 3, 6000, 700, 1500
_WORD, _ANY_WORD = re.compile(r"[A-Za-z_]\w{4,}|\d{3,}"), re.compile(r"\w+")
_RUN = 6
_SYSTEM = {"role": "system", "content": "You are a coding agent. Read a file before you edit it."}
_NOTE = "<system-reminder>\nNote: {} was modified by a linter.\n{}\n</system-reminder>"
Json = Mapping[str, Any]


def with_notes(messages: Sequence[Json]) -> Iterator[Json]:
    """Yield messages; after about every second step's results one says that a file has changed."""
    for i, (one, after) in enumerate(pairwise([*messages, {}])):
        yield one
        if i % 4 < 2 and one["role"] == "tool" != after.get("role"):
            note = _NOTE.format(f"/home/user/file{i % 7}.go", one["content"][:400])
            yield {"role": "user", "content": note}


def printed(message: Json) -> dict[str, str]:
    """Return a message as chatml templates print it, with its calls of tools."""
    calls = (call["function"] for call in message.get("tool_calls", ()))
    called = (f"\n<tool_call>\n{call['name']} {call['arguments']}\n</tool_call>" for call in calls)
    return {"role": message["role"], "content": "".join([message["content"], *called])}


class _Renderer(Renderer):
    def __call__(self, messages: Sequence[Json]) -> Any:
        return super().__call__([printed(message) for message in messages])


def runs(text: str) -> dict[tuple[int, int], str]:
    """Return the runs of six words of a text, by their first and last character."""
    words = list(_ANY_WORD.finditer(text))
    each = zip(*(words[i:] for i in range(_RUN)), strict=False)
    return {(run[0].start(), run[-1].end()): " ".join(word[0] for word in run) for run in each}


class Session:
    """A recorded session, and where its words are.

    Attributes:
        messages: The messages, a system prompt first.
        texts: What is printed of each.
        starts: Where each begins, in tokens, and where the last one ends.
        answers: Indexes of the messages of the agent.
    """

    def __init__(self, messages: Sequence[Json]) -> None:
        self.messages = [_SYSTEM, *messages]
        self.texts = [printed(message)["content"] for message in self.messages]
        self.answers = [i for i, one in enumerate(self.messages) if one["role"] == "assistant"]
        # Of each word and run where it is: the message, the first token, the one after the last.
        self._occurrences = defaultdict[str, list[tuple[int, int, int]]](list)
        self.starts = [0]
        for at, (message, text) in enumerate(zip(self.messages, self.texts, strict=True)):
            head = f"<|im_start|>{message['role']}\n"
            encoded = qwen2().encode(f"{head}{text}<|im_end|>\n")
            ends = np.array([end for _, end in encoded.offsets]) - len(head)
            found = {word.span(): word[0] for word in _WORD.finditer(text)} | runs(text)
            firsts = ends.searchsorted([start for start, _ in found], "right") + self.starts[-1]
            lasts = ends.searchsorted([end for _, end in found], "left") + self.starts[-1]
            for key, first, last in zip(found.values(), firsts, lasts, strict=True):
                self._occurrences[key].append((at, int(first), int(last) + 1))
            self.starts.append(self.starts[-1] + len(encoded.ids))

    def repeated(self, answer: int, of_runs: bool = False) -> dict[str, list[tuple[int, int, int]]]:
        """Return the rare words, or all runs, of an answer that earlier messages have, and where.

        Of a longer answer the first 6,000 characters are read.
        """
        found, text = {}, self.texts[answer][:_ANSWER_CHARS]
        for key in dict.fromkeys(runs(text).values() if of_runs else _WORD.findall(text)):
            occurrences = [place for place in self._occurrences[key] if place[0] < answer]
            if occurrences and (of_runs or len({at for at, _, _ in occurrences}) <= _RARE):
                found[key] = occurrences
        return found

    def present(self, answer: int, resident: Ranges, of_runs: bool = False) -> list[bool]:
        """Return of each repeated word, or run, of an answer whether a place of it is resident."""
        rows = np.zeros(self.starts[-1] + 1, np.bool_)
        for start, end in resident:
            rows[start:end] = True
        found = self.repeated(answer, of_runs).values()
        return [any(rows[a:b].all() for _, a, b in each) for each in found]

    def fills(self, answer: int, budget: int) -> Iterator[tuple[str, Ranges]]:
        """Yield what each fill has when an answer begins."""
        roles = [message["role"] for message in self.messages[:answer]]
        said = max((i for i in range(answer) if roles[i] == "assistant"), default=0)
        asked = max(i for i in range(answer) if roles[i] == "user")
        fixed = sorted({0, asked, *range(said, answer)}, reverse=True)
        room, first = budget, list[tuple[int, int]]()
        for i in fixed:  # of what does not fit, the beginnings
            start, end = self.starts[i], min(self.starts[i + 1], self.starts[i] + room)
            room -= end - start
            first.append((start, end))
        newest = [i for i in reversed(range(answer)) if i not in fixed]
        sizes = {i: self.starts[i + 1] - self.starts[i] for i in newest}
        results = [text[:_RESULT_CHARS] for text in self.texts[said + 1 : answer]]
        own = self.texts[said][-_ASKED_CHARS:], self.texts[asked][:_ASKED_CHARS]
        ranked = bm25(self.texts[:answer], "\n".join([*own, *results]))
        has = Counter(at for each in self.repeated(answer).values()
                      for at in {place[0] for place in each})  # fmt: skip
        needed = sorted(newest, key=lambda i: -has[i] / sizes[i])
        drawn = random_blocks(self.starts[answer], room, f"{answer} {budget}")
        yield "random", [*first, *drawn]
        orders = {"newest": newest, "bm25": [i for i in ranked if i in sizes], "oracle": needed}
        for arm, order in orders.items():
            taken = fill(order, sizes, room)
            yield arm, [*first, *((self.starts[i], self.starts[i + 1]) for i in taken)]


@cache
def sessions(path: Path = SESSIONS) -> list[Json]:
    """Return the sessions, each with `id`, `split` and `messages`."""
    read: list[Json] = json.loads(gzip.decompress(path.read_bytes()))
    return read


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield one row for each session, share, arm and turn."""
    made = InProcess(renderer=_Renderer())
    arms = args.arms or [DEFAULT.arm, "no recall", "discard", *FILLS]
    for each in sessions():
        if args.split not in (each["split"], "both"):
            continue
        session = Session([*(with_notes if args.notes else iter)(each["messages"])])
        for share in args.shares:
            budget = session.starts[-1] // share
            turns = [at for at in session.answers if session.starts[at] > budget]
            chats = [session.messages[:at] for at in session.answers]
            found = dict[tuple[str, int], Ranges]()
            for setting in (one for one in SETTINGS if one.arm in arms):
                resident = made.resident(setting, budget, each["id"], chats)
                found |= {(setting.arm, at): rows
                          for at, rows in zip(session.answers, resident, strict=True)}  # fmt: skip
            for at in turns:
                found |= {(arm, at): rows for arm, rows in session.fills(at, budget) if arm in arms}
                for arm in arms:
                    copied = session.present(at, found[arm, at], of_runs=True)
                    present = session.present(at, found[arm, at])
                    if present or copied:
                        yield {
                            "split": each["split"], "conversation": each["id"], "share": share,
                            "question": at, "arm": arm, "words": len(present),
                            "present": sum(present), "whole": all(present),
                            "runs": len(copied), "copied": sum(copied),
                        }  # fmt: skip
        print(each["id"], len(session.answers), session.starts[-1], file=sys.stderr, flush=True)


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report shares by split, budget and arm, differences of the default, and its bars."""
    table, missed = list[dict[str, Any]](), list[str]()
    for split, share in dict.fromkeys((row["split"], row["share"]) for row in rows):
        cell = [row for row in rows if (row["split"], row["share"]) == (split, share)]
        of, with_words = dict[str, dict[str, Any]](), [row for row in cell if row["words"]]
        for arm in dict.fromkeys(row["arm"] for row in cell):
            mine = [row for row in cell if row["arm"] == arm]
            words, n_runs = (sum(row[key] for row in mine) for key in ("words", "runs"))
            of[arm] = {
                "split": split, "share": share, "arm": arm, "n_words": words,
                "turns": sum(row["arm"] == arm for row in with_words),
                "words": round(100 * sum(row["present"] for row in mine) / max(1, words), 1),
                "whole": percent(row["whole"] for row in mine if row["words"]), "n_runs": n_runs,
                "runs": round(100 * sum(row["copied"] for row in mine) / max(1, n_runs), 1),
            }  # fmt: skip
        for arm in of if DEFAULT.arm in of else ():
            if arm != DEFAULT.arm:
                of[arm]["default minus"] = paired_difference(with_words, DEFAULT.arm, arm)
        fills = [arm for arm in FILLS[:-1] if arm in of]
        best = [max(fills, key=lambda arm: of[arm]["whole"])] if fills else []
        for arm in [*best, *(arm for arm in ("no recall",) if arm in of)]:
            low = of[arm].get("default minus", {"low": 0.0})["low"]
            if low is not None and low <= LEAST_POINTS:
                missed.append(f"{split} 1/{share}: whole turns against {arm}")
            missed += [f"{split} 1/{share}: {key} against {arm}" for key in ("words", "runs")
                       if DEFAULT.arm in of and of[DEFAULT.arm][key] < of[arm][key]]  # fmt: skip
        table += of.values()
    columns = ("split", "share", "arm", "turns", "n_words", "words", "whole", "n_runs", "runs")
    return Report({"cells": table}, missed, rows=table, said=record.table(table, columns))


BENCH = Bench(
    "coding", __doc__, "--split tuning --shares 8 --arms 'default,no recall'", measure, report, (),
    (option("--split", "both", choices=("tuning", "reporting", "both")),
     option("--shares", "4,8,16", "budgets, as 1/share of a session", type=numbers),
     option("--arms", "", "separated by commas (all)", type=listed),
     option("--notes", False, "the client says when files have changed")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
