"""How well does a session of eight times its budget recall, along the session and at its end?

The published session has 66K tokens under a budget of 8K, on a model with a context of 32K or more.
The bundled model has a context of 8,192 tokens, so everything is scaled down: the session fills
most of the context, and the budget is the same share of the session. Facts are spread over the
session, in the middle of messages about other subjects. At each quarter three facts that were
stated long before are asked for, at the end all others; each question follows the expected answers
to the earlier ones. No encoder is used. Arms:

* `no_eviction`: a context that is long enough
* `wall`: no eviction, and a context that is too short (the share that 32K is of 66K)
* `evoke`: with the budget
* `discard`: with the budget, without recovery

*Against* the other three. *Fails* below 0.9 of what no eviction recalls, above the published peak,
or over the budget."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.charts import chart
from bench.driver import SERVER, Bench, Report, Row, option
from bench.llama import proxied, running
from bench.model import text, vocab
from bench.model.tasks import Message, Probe, draw_facts, exchange, probe_of
from bench.ruler import right
from bench.stats import share_of
from evoke_proxy.demo.client import DemoError, Turn, chat, read_turn
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

ARMS = ("no_eviction", "wall", "evoke", "discard")
CONTEXT, RATIO, WALL = 8192, 66 / 8.192, 32.768 / 66
FACTS, QUARTERS, ASKED_EACH = 24, 3, 3
SEED = 7_100_000
_TOKENS, _TOKENS_A_SENTENCE, _SENTENCES_A_MESSAGE = 6_100, 12, 15
_ANSWER_TOKENS = 40
PEAK_TIMES = 4.1


@dataclass(frozen=True, slots=True)
class Section:
    """One turn: the user's message and the expected answer; `late` marks those at the end."""

    said: str
    expected: str
    probe: Probe | None = None
    late: bool = False

    def messages(self) -> Sequence[Message]:
        """Both, as they stand in the history from then on."""
        return exchange(self.said, self.expected)


def sections(seed: int) -> list[Section]:
    """The session; equal for equal seeds."""
    rng = random.Random(f"long-{seed}")
    drawn = draw_facts(rng, FACTS, ("my", "my", "para"))
    sentences = [text.sentence(rng) for _ in range(_TOKENS // _TOKENS_A_SENTENCE)]
    for number, fact in reversed(list(enumerate(drawn))):
        place = (number + rng.uniform(0.2, 0.8)) / FACTS
        sentences.insert(round(place * len(sentences)), fact.statement)
    said = [
        " ".join(sentences[start : start + _SENTENCES_A_MESSAGE])
        for start in range(0, len(sentences), _SENTENCES_A_MESSAGE)
    ]
    found: list[Section] = []
    left = list(drawn)
    for number, message in enumerate(said, 1):
        found.append(Section(message, vocab.CHAT_REPLY))
        if (
            number % (len(said) // (QUARTERS + 1)) == 0
            and len(left) > FACTS - QUARTERS * ASKED_EACH
        ):
            stated = [
                fact
                for fact in left
                if any(fact.statement in one for one in said[: number // 2 + 1])
            ]
            for fact in rng.sample(stated, ASKED_EACH):
                left.remove(fact)
                found.append(_asked(probe_of(fact), False))
    rng.shuffle(left)
    return found + [_asked(probe_of(fact), True) for fact in left]


def _asked(probe: Probe, late: bool) -> Section:
    return Section(probe.question, probe.answer, probe, late)


def run(front: int, arm: str, seed: int, budget: int | None) -> tuple[dict[str, Any], list[Turn]]:
    """One session under an arm: its row and its turns."""
    history: list[Message] = [{"role": "system", "content": vocab.SYSTEM_PROMPTS[0]}]
    policy = "no_eviction" if arm == "wall" else arm
    fields = {"evoke_policy": policy} | ({"evoke_budget": budget} if budget else {})
    name = {"X-Evoke-Session": f"{arm}-{seed}", "Authorization": f"Bearer {arm}-{seed}"}
    turns: list[Turn] = []
    marks: dict[bool, list[bool]] = {False: [], True: []}
    died = None
    planned = sections(seed)
    for number, section in enumerate(planned, 1):
        if died is None:
            asked = [*history, {"role": "user", "content": section.said}]
            limit = _ANSWER_TOKENS if section.probe else 1
            body = {"messages": asked, "temperature": 0, "max_tokens": limit, **fields}
            try:
                reply = chat(front, body, name)
            except DemoError as error:
                if "exceed_context_size" not in str(error):
                    raise
                died = number
            else:
                turns.append(read_turn(number, reply))
        if section.probe:
            marks[section.late].append(died is None and right(reply.text, section.probe))
        history += section.messages()
    row = {
        "seed": seed,
        "arm": arm,
        "tokens": turns[-1].prompt,
        "budget": budget,
        "turns": len(turns),
        "died": died,
        "of": len(planned),
        "peak": max(turn.resident_peak for turn in turns),
        "decoded": sum(turn.decoded for turn in turns),
        "recovered": sum(turn.recovered for turn in turns),
        "along": sum(marks[False]),
        "end": sum(marks[True]),
        "asked_along": len(marks[False]),
        "asked_end": len(marks[True]),
        "books": [[t.prompt, t.decoded, t.recovered, t.omitted, t.resident_peak] for t in turns],
    }
    return row, turns


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield every arm on every seed; lengths are those of the arm without eviction."""
    server, lengths = args.server or ensure_server(), dict[int, int]()
    for arm in ARMS:
        context = round(WALL * min(lengths.values())) if arm == "wall" else CONTEXT
        options = ("-np", "1", "-c", str(context), "-t", "1", "--evoke-ram", "256")
        with running(server, bundled_model(), *options, saves=False) as llama:
            with proxied(llama.port) as front:
                n_sessions = args.controls if arm in ("wall", "discard") else args.sessions
                for seed in range(SEED, SEED + n_sessions):
                    budgeted = arm in ("evoke", "discard")
                    budget = round(lengths[seed] / RATIO) if budgeted else None
                    row, _ = run(front.port, arm, seed, budget)
                    lengths.setdefault(seed, row["tokens"])
                    yield row | {"context": context}


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return recall by arm, with Wilson's 95 % interval, and how much lower the peak was."""
    summary: dict[str, Any] = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        for when in ("along", "end"):
            right_, asked = (sum(row[key] for row in mine) for key in (when, f"asked_{when}"))
            summary[f"{arm}_{when}"] = share_of(right_, asked)
    peaks = {(row["arm"], row["seed"]): row["peak"] for row in rows}
    seeds = sorted(seed for arm, seed in peaks if arm == "evoke")
    summary["peak_times_lower"] = min(peaks["no_eviction", s] / peaks["evoke", s] for s in seeds)
    summary["over_budget"] = sum(row["peak"] > row["budget"] for row in rows if row["budget"])
    summary["wall_died"] = [row["died"] for row in rows if row["arm"] == "wall"]
    return summary


def reached(summary: Mapping[str, Any]) -> bool:
    """Whether as much is recalled as without eviction, at a peak as low as the published one."""
    pairs = [(summary[f"evoke_{w}"], summary[f"no_eviction_{w}"]) for w in ("along", "end")]
    recalled = all(ours["right"] >= 0.9 * whole["right"] for ours, whole in pairs)
    return bool(
        recalled and summary["peak_times_lower"] > PEAK_TIMES and not summary["over_budget"]
    )


def picture(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows in the cache along the first session."""
    lines = {
        row["arm"]: [(prompt, peak) for prompt, _, _, _, peak in row["books"]]
        for row in rows
        if row["seed"] == SEED
    }
    title = "Most rows in the cache in a turn, along one session"
    return chart(title, "tokens of the session so far", "rows", lines)


def report(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report recall and peaks, with the picture."""
    summary = summarise(rows)
    bars = f"0.9 of what no eviction recalls, at a peak {PEAK_TIMES} times lower"
    return Report(summary, [] if reached(summary) else [bars], picture=picture(rows))


BENCH = Bench(
    "long", __doc__, "--sessions 1", measure, report,
    ("seed", "arm", "tokens", "budget", "turns", "died", "peak", "decoded", "along", "end"),
    (SERVER, option("--sessions", 3, "with eviction and without"),
     option("--controls", 1, "of them at the wall, discarded")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
