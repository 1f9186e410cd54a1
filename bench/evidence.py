"""Is the evidence in the cache when the answer begins, in real conversations?

The proxy runs as a process in front of the patched server, with random weights and a real
vocabulary, so that token counts are those of common models. A conversation with labelled evidence
is sent with a question at its end. After one generated token the server reports the resident rows,
which are compared with the rows of each message that holds the answer. Answers are not graded.
Every question follows the same conversation, as when a user edits the last message.

`whole` counts a question when every row of every evidence message is resident, `half` when half of
the rows of each is. Arms:

* `default`: the proxy with its default settings and a budget
* `none`: the proxy without a budget
* `random`: random blocks of 64 tokens that fill the same budget
* `newest`, `bm25`, `oracle`: whole messages that fill the same budget: the newest, the best by
  plain BM25, those with the evidence"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import record
from bench.llama import Llama, running
from bench.metrics import samples
from bench.random_models import SHAPES, ensure
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.processes import free_port, proxy_command, serving
from evoke_proxy.server_build import ensure_server

DATA = Path(__file__).parent / "data"
RECORDED = Path(__file__).parent / "results/evidence.json"
SHARES = (4, 8, 16)
FILLS = ("oracle", "bm25", "newest", "random")
ARMS = ("default", "none", *FILLS)
# The quick form: short conversations, one share, the first questions.
QUICK_CONVERSATIONS, QUICK_SHARES, QUICK_QUESTIONS = (
    ("bfcl-finance", "bfcl-healthcare", "mtrag-clapnq"),
    (8,),
    12,
)
# How much fewer questions, of 100, the quick form may find than recorded.
GUARD_POINTS = 8.0
_LEAST_BUDGET, _BLOCK, _SETTLE_S = 256, 64, 60.0
_COLUMNS = ("conversation", "share", "budget", "tokens", "questions", "arm", "whole", "half")
_EXAMPLES = """examples:
  python -m bench.evidence --quick
  python -m bench.evidence --conversations bfcl-student --shares 8,16
  python -m bench.evidence --out bench/results/evidence.json
"""
Message = Mapping[str, str]
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the turns directly before it, and the indexes of the messages that answer it."""

    id: str
    text: str
    evidence: tuple[int, ...]
    before: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> list[Message]:
        """What is sent behind the conversation."""
        roles = {"user": "user", "agent": "assistant"}
        turns = [{"role": roles[speaker], "content": text} for speaker, text in self.before]
        return [*turns, {"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a user, which are answered with one word each, and the questions about them."""

    id: str
    texts: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def messages(self) -> list[Message]:
        """As a chat; message `n` of the user is at `2 * n`."""
        noted = {"role": "assistant", "content": "Noted."}
        return [m for text in self.texts for m in ({"role": "user", "content": text}, noted)]


def conversations(folder: Path = DATA) -> list[Conversation]:
    """All that are shipped."""
    found = []
    for name in ("bfcl_memory.json", "mtrag_un.json"):
        for each in json.loads((folder / name).read_text("utf-8")):
            questions = (
                Question(
                    id=asked["id"],
                    text=asked["text"],
                    evidence=tuple(asked["evidence"]),
                    before=tuple((speaker, text) for speaker, text in asked.get("before", ())),
                )
                for asked in each["questions"]
            )
            found.append(Conversation(each["id"], tuple(each["messages"]), tuple(questions)))
    return found


def share_resident(span: tuple[int, int], resident: Spans) -> float:
    """How much of a span of positions has rows, 0 to 1."""
    start, end = span
    rows = sum(max(0, min(end, b) - max(start, a)) for a, b in resident)
    return rows / (end - start)


def found(shares: Sequence[float]) -> dict[str, bool]:
    """Return whether all evidence is resident, as a whole and by half."""
    return {"whole": min(shares) >= 1.0, "half": min(shares) >= 0.5}


def fill(order: Sequence[int], sizes: Mapping[int, int], room: int) -> set[int]:
    """Return the messages, in this order, that still fit into the room."""
    taken = set()
    for message in order:
        if sizes[message] <= room:
            room -= sizes[message]
            taken.add(message)
    return taken


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def bm25(texts: Sequence[str], asked: str, k1: float = 1.2, b: float = 0.75) -> list[int]:
    """Indexes of the texts, the best match first, of equals the newest (Robertson and others)."""
    counts = [Counter(words(text)) for text in texts]
    lengths = [sum(count.values()) for count in counts]
    mean = sum(lengths) / len(lengths)
    in_texts = Counter(word for count in counts for word in count)

    def score(at: int) -> float:
        total = 0.0
        for word in set(words(asked)):
            n = counts[at][word]
            rarity = math.log(1 + (len(texts) - in_texts[word] + 0.5) / (in_texts[word] + 0.5))
            total += rarity * n * (k1 + 1) / (n + k1 * (1 - b + b * lengths[at] / mean))
        return total

    return sorted(range(len(texts)), key=lambda at: (-score(at), -at))


class World:
    """The server and the proxy; reports what is resident for a question."""

    def __init__(self, llama: Llama, proxy: int) -> None:
        self._llama = llama
        self._proxy = proxy

    def spans(self, messages: Sequence[Message]) -> tuple[dict[int, tuple[int, int]], int]:
        """Positions of each message, by its index, and the number of tokens of the prompt."""
        body = {"dialect": "chat", "body": {"messages": list(messages)}}
        answer = self._llama.call("POST", "/evoke/render", body)
        spans = {span["index"]: (span["p0"], span["p1"]) for span in answer["spans"]}
        return spans, max(end for _, end in spans.values())

    def resident(
        self, messages: Sequence[Message], session: str, budget: int | None
    ) -> list[tuple[int, int]]:
        """Ask, and return which positions had rows when the answer began."""
        body: dict[str, Any] = {"messages": list(messages), "max_tokens": 1, "temperature": 0}
        if budget is not None:
            body["evoke_budget"] = budget
        # A tenant of its own: a session takes no copies over from another arm's.
        headers = {"X-Evoke-Session": session, "Authorization": f"Bearer {session}"}
        reply = chat(self._proxy, body, headers)
        accounting = reply.timings.get("evoke")
        if not isinstance(accounting, Mapping) or accounting.get("marker") != "ok":
            raise RuntimeError(f"the proxy did not plan this turn: {reply}")
        answer = self._llama.call("GET", "/slots/0/blocks")
        return [(start, end) for start, end in answer["resident"]]

    def settle(self) -> None:
        """Wait until every block has its vector, as during a user's pause; TimeoutError if not."""
        until = time.monotonic() + _SETTLE_S
        while samples(self._proxy).get("evoke_embed_waiting", 0.0) > 0:
            if time.monotonic() > until:
                raise TimeoutError(f"blocks without vectors after {_SETTLE_S:.0f} s")
            time.sleep(0.02)


@contextmanager
def world(context: int) -> Iterator[World]:
    """Run a patched server and a proxy with default settings in front of it."""
    model = ensure(SHAPES["qwen2-vocabulary"])
    options = ("-c", str(context), "-np", "1", "-t", "1", "--evoke-ram", "512")
    with running(ensure_server(), model, *options, "--chat-template", "chatml") as llama:
        port = free_port()
        log = Path("out/bench/evidence-proxy.log")
        with serving(proxy_command(port, llama.port), port, log):
            yield World(llama, port)


def ask_all(
    world: World, talk: Conversation, share: int, most: int, tag: str
) -> list[dict[str, Any]]:
    """Return one row for each question and arm, with a budget of 1/share of the conversation."""
    base = talk.messages
    _, total = world.spans(base)
    budget = max(_LEAST_BUDGET, total // share)
    rows: list[dict[str, Any]] = []
    for number, question in enumerate(talk.questions[:most]):
        messages = [*base, *question.messages]
        spans, _ = world.spans(messages)
        wanted = [spans[2 * index] for index in question.evidence]
        resident = world.resident(messages, f"{talk.id}-{share}-{tag}", budget)
        arms = {"default": found([share_resident(span, resident) for span in wanted])}
        if number == 0:
            resident = world.resident(messages, f"{talk.id}-none-{tag}", None)
            arms["none"] = found([share_resident(span, resident) for span in wanted])
        arms |= _fills(talk, question, spans, budget, share)
        common = {"conversation": talk.id, "share": share, "budget": budget, "tokens": total}
        rows += [{**common, "question": question.id, "arm": arm, **arms[arm]} for arm in arms]
    return rows


def _fills(
    talk: Conversation,
    question: Question,
    spans: Mapping[int, tuple[int, int]],
    budget: int,
    share: int,
) -> dict[str, dict[str, bool]]:
    sizes = {at: spans[2 * at][1] - spans[2 * at][0] for at in range(len(talk.texts))}
    asked = sum(end - start for at, (start, end) in spans.items() if at >= 2 * len(talk.texts))
    newest = list(reversed(range(len(talk.texts))))
    orders = {
        "oracle": [*question.evidence, *newest],
        "bm25": bm25(talk.texts, " ".join(m["content"] for m in question.messages[-1:])),
        "newest": newest,
    }
    end = spans[2 * len(talk.texts) - 2][1]
    blocks = [(p0, min(end, p0 + _BLOCK)) for p0 in range(0, end, _BLOCK)]
    chance = random.Random(f"{question.id} {share}")
    drawn = chance.sample(blocks, max(0, min(len(blocks), (budget - asked) // _BLOCK)))
    wanted = [spans[2 * index] for index in question.evidence]
    found_by = {"random": found([share_resident(span, drawn) for span in wanted])}
    for arm, order in orders.items():
        taken = fill(list(dict.fromkeys(order)), sizes, budget - asked)
        found_by[arm] = found([float(at in taken) for at in question.evidence])
    return found_by


def cells(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Percentages, for each conversation, share and arm."""
    keys = sorted({(r["conversation"], r["share"], r["arm"]) for r in rows}, key=_cell_order)
    made = []
    for conversation, share, arm in keys:
        mine = [r for r in rows if (r["conversation"], r["share"], r["arm"]) == (
            conversation, share, arm)]  # fmt: skip
        cell = {name: mine[0][name] for name in ("conversation", "share", "budget", "tokens")}
        percent = {kind: _percent(r[kind] for r in mine) for kind in ("whole", "half")}
        made.append({**cell, "questions": len(mine), "arm": arm, **percent})
    return made


def _cell_order(key: tuple[str, int, str]) -> tuple[str, int, int]:
    return key[0], key[1], ARMS.index(key[2])


def _percent(values: Iterable[bool]) -> float:
    listed = list(values)
    return round(100 * sum(listed) / len(listed), 1)


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For each share: every arm over all questions, and default minus BM25, paired."""
    summary: dict[str, Any] = {}
    for share in sorted({row["share"] for row in rows}):
        mine = [row for row in rows if row["share"] == share]
        arms = {
            arm: {
                kind: _percent(r[kind] for r in mine if r["arm"] == arm)
                for kind in ("whole", "half")
            }
            for arm in ARMS
            if any(row["arm"] == arm for row in mine)
        }
        paired = {"default_minus_bm25_whole": paired_difference(mine, "default", "bm25")}
        summary[f"1/{share}"] = {**arms, **paired}
    return summary


def paired_difference(
    rows: Sequence[Mapping[str, Any]], arm: str, other: str, draws: int = 2000
) -> dict[str, float]:
    """Points by which one arm has all evidence more often, with a 95 % interval that draws whole
    conversations, since the questions of one are alike."""
    by_talk: dict[str, list[int]] = {}
    of: dict[tuple[str, str, str], int] = {
        (r["conversation"], r["question"], r["arm"]): int(r["whole"]) for r in rows
    }
    for conversation, question, name in of:
        if name == arm:
            difference = of[conversation, question, arm] - of[conversation, question, other]
            by_talk.setdefault(conversation, []).append(difference)
    chance, talks = random.Random(1), list(by_talk.values())

    def mean(drawn: Sequence[Sequence[int]]) -> float:
        values = [value for talk in drawn for value in talk]
        return 100.0 * sum(values) / len(values)

    means = sorted(mean(chance.choices(talks, k=len(talks))) for _ in range(draws))
    low, high = means[draws * 25 // 1000], means[draws * 975 // 1000]
    return {"points": round(mean(talks), 1), "low": round(low, 1), "high": round(high, 1)}


def quick(world: World, tag: str = "quick") -> list[dict[str, Any]]:
    """The rows of the quick form."""
    talks = [talk for talk in conversations() if talk.id in QUICK_CONVERSATIONS]
    return [
        row
        for talk in talks
        for share in QUICK_SHARES
        for row in ask_all(world, talk, share, QUICK_QUESTIONS, tag)
    ]


def worse_than_recorded(rows: Sequence[Mapping[str, Any]], recorded: Path = RECORDED) -> list[str]:
    """Return what the default finds less of than recorded, by more than `GUARD_POINTS`."""
    before = json.loads(recorded.read_text("utf-8"))["summary"]["quick"]
    now = summarise(rows)
    said = []
    for share, arms in before.items():
        for kind in ("whole", "half"):
            was, is_now = arms["default"][kind], now[share]["default"][kind]
            if is_now < was - GUARD_POINTS:
                said.append(f"{kind} evidence at {share}: {is_now} %, recorded {was} %")
    return said


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; 1 when the quick form is worse than recorded."""
    args = _parser().parse_args(argv)
    talks = conversations()
    chosen = args.conversations.split(",") if args.conversations else [talk.id for talk in talks]
    shares = [int(part) for part in args.shares.split(",")]
    rows: list[dict[str, Any]] = []
    with world(context=65536) as made:
        quick_rows = quick(made)
        for talk in () if args.quick else (talk for talk in talks if talk.id in chosen):
            for share in shares:
                rows += ask_all(made, talk, share, args.questions, "full")
                print(record.table(cells(rows)[-len(ARMS) :], _COLUMNS), flush=True)
    found_cells = cells(rows or quick_rows)
    print(record.table(found_cells, _COLUMNS))
    summary = {**summarise(rows), "quick": summarise(quick_rows)}
    print(json.dumps(summary, indent=1))
    print(f"written: {record.write('evidence', found_cells, summary, args.out)}")
    said = worse_than_recorded(quick_rows) if args.quick and RECORDED.exists() else []
    for line in said:
        print(f"worse than recorded: {line}", file=sys.stderr)
    return int(bool(said))


def _parser() -> argparse.ArgumentParser:
    parser = record.command("evidence", __doc__, _EXAMPLES)
    parser.add_argument("--quick", action="store_true", help="the quick form alone")
    parser.add_argument(
        "--conversations", default="", help="their names, separated by commas (all)"
    )
    parser.add_argument("--shares", default="4,8,16", help="budgets, as 1/share of a conversation")
    parser.add_argument(
        "--questions", type=int, default=1000, help="most questions of a conversation (1000)"
    )
    parser.add_argument("--out", type=Path, help="the JSON file (out/bench/evidence.json)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
