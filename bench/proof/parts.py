"""The five measurements of the proof, their bars, and one page of them: HTML and text."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from bench import charts, latency, record, support
from bench.chat_turns import budget_of, first_byte_row, measure_first_bytes
from bench.driver import Row
from bench.engines import InProcess, OnServers, servers
from bench.evidence import __main__ as evidence
from bench.fills import FILLS
from bench.llama import proxied, running
from bench.model import vocab
from bench.presence import measure
from bench.random_models import SHAPES, ensure
from bench.stats import paired_difference, percent
from bench.tasks.__main__ import talk_of
from bench.tasks.cases import Case, cases
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

_INTRODUCTION = (
    "evoke-proxy lets parts of a conversation leave the KV cache of llama-server, and copies them"
    " back when a question needs them. This page is one run on this machine, on questions and texts"
    " that its seed has drawn. Each part has bars that were fixed before; one that does not hold"
    " makes the run fail. What the project does badly is in docs/negative-results.md."
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A bound on one figure, fixed before the run."""

    claim: str  # what the figure is
    # The figure as measured; None when it could not be measured, which misses the bar.
    value: float | None
    least: float | None = None  # the least value that holds, or None
    most: float | None = None  # the largest value that holds, or None

    @property
    def holds(self) -> bool:
        """Whether the figure is measured and within its bounds."""
        if self.value is None:
            return False
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)

    @property
    def wanted(self) -> str:
        """The bounds in words."""
        bounds = (("at least", self.least), ("at most", self.most))
        return ", ".join(f"{name} {bound:g}" for name, bound in bounds if bound is not None)


@dataclass(frozen=True, slots=True)
class Part:
    """One question of the proof and its answer."""

    title: str  # the claim in a few words
    question: str  # what is measured, on which model, and against what
    columns: Sequence[str]  # the columns of the table
    rows: Sequence[Row]  # the rows of the table
    bars: Sequence[Bar]  # the bounds that must hold
    picture: str = ""  # SVG, or ""
    seconds: float = 0.0  # how long the part took
    details: Row = field(default_factory=dict)


def broken(title: str, error: Exception) -> Part:
    """Return a part that could not be measured, which fails the proof."""
    return Part(title, f"not measured: {error!r}", (), (), (Bar(title, None),))


def holds(parts: Sequence[Part]) -> bool:
    """Whether every bar of every part holds."""
    return all(bar.holds for part in parts for bar in part.bars)


def text(parts: Sequence[Part], about: Mapping[str, Any]) -> str:
    """Return the page as plain text."""
    lines = [f"evoke-proxy: proof with seed {about['seed']}", _INTRODUCTION, _summary(parts)]
    lines += [f"{name}: {value}" for name, value in about.items()]
    for number, part in enumerate(parts, 1):
        lines += ["", f"{number}. {part.title} ({part.seconds:.0f} s)", f"   {part.question}", ""]
        if part.rows:
            table = [{name: _value(x) for name, x in row.items()} for row in part.rows]
            lines += [record.table(table, part.columns), ""]
        lines += [f"   {_verdict(bar.holds):5} {bar.claim}: {_value(bar.value)} ({bar.wanted})"
                  for bar in part.bars]  # fmt: skip
    return "\n".join(lines) + "\n"


def html(parts: Sequence[Part], about: Mapping[str, Any]) -> str:
    """Return the page as HTML, without scripts or files of its own."""
    body = [f"<h1>evoke-proxy: proof with seed {about['seed']}</h1>"]
    body.append(f"<p>{escape(_INTRODUCTION)}</p>")
    is_good = holds(parts)
    body.append(f'<p class="{"holds" if is_good else "fails"}">{escape(_summary(parts))}</p>')
    facts = ((escape(str(name)), escape(str(value))) for name, value in about.items())
    body.append(_table(("", ""), facts))
    for number, part in enumerate(parts, 1):
        took = f"{part.question} ({part.seconds:.0f} s)"
        body.append(f"<h2>{number}. {escape(part.title)}</h2><p>{escape(took)}</p>")
        if part.rows:
            cells = ([escape(_value(row.get(name))) for name in part.columns] for row in part.rows)
            body.append(_table([escape(name) for name in part.columns], cells))
        body.append(part.picture)
        bars = (
            (f'<span class="{"holds" if bar.holds else "fails"}">{_verdict(bar.holds)}</span>',
             escape(bar.claim), escape(_value(bar.value)), escape(bar.wanted))
            for bar in part.bars
        )  # fmt: skip
        body.append(_table(("", "bar", "measured", "wanted"), bars))
    page = Path(__file__).with_name("page.html").read_text("utf-8")
    return Template(page).substitute(body="\n".join(body))


def _summary(parts: Sequence[Part]) -> str:
    bars = [bar for part in parts for bar in part.bars]
    missed = [bar.claim for bar in bars if not bar.holds]
    named = f"; missed: {'; '.join(missed)}" if missed else ""
    return f"{len(bars) - len(missed)} of {len(bars)} bars hold{named}"


def _verdict(is_good: bool) -> str:
    return "holds" if is_good else "FAILS"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "not measured" if value is None else str(value)


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    lines = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><tr>{head}</tr>{lines}</table></div>'


QUESTIONS, LENGTH, SHARE, _HAYSTACK = 15, 4000, 8, "statements"
# Cases of the published figures have numbers from 0 on; those of a seed begin far behind them.
_FIRST_FRESH, _CASES_OF_A_SEED = 1000, 100
_LONGEST = 30_000  # tokens of a conversation
ARMS: dict[str, str] = {
    "no eviction": "#7a7a7a",
    "oracle": "#b0b0b0",
    "default": "#1b6e3c",
    "breadcrumb": "#7d3c98",
    "bm25": "#0b6aa8",
    "vectors": "#2a9d8f",
    "random": "#c98a1b",
    "discard": "#b3261e",
}
_ON_SERVERS = ("no eviction", "default", "discard")
_MEMORIES = {"iswa": "sliding windows", "hybrid": "attention and recurrent layers"}
_EXACT_SHAPES = ("tiny-dense", "tiny-gemma", "tiny-jamba", "tiny-qwen35")
_BLOCK_TOKENS, _REPEATS = 640, 5
_HISTORY, _PAIRS = 2048, 60


@dataclass(frozen=True, slots=True)
class Reader:
    """What the reader chose."""

    seed: int  # which questions and texts are drawn
    model: Path | None = None  # a GGUF of the reader's, or None for those of the project
    threads: int = 1  # threads of llama-server


def exact(reader: Reader) -> Iterator[Part]:
    """Evict and load a block, and compare all log probabilities of an answer."""
    models = {"bundled": bundled_model()} | {name: ensure(SHAPES[name]) for name in _EXACT_SHAPES}
    if reader.model is not None:
        models = {reader.model.name: reader.model}
    options = ("-c", "4096", "-np", "1", "-t", str(reader.threads), "--evoke-ram", "256")
    rows: list[dict[str, Any]] = []
    for name, path in models.items():
        with running(ensure_server(), path, *options) as llama:
            trip = support.round_trip(llama, 0, seed=reader.seed % 10_000)
            memory = llama.call("GET", "/props")["evoke"]["memory"]
        rows.append(
            {"model": name, "memory": _MEMORIES.get(memory, memory),
             "log probabilities": trip.compared,
             "same after evict and load": trip.returns, "same without load": not trip.evicts,
             "repeats itself": trip.repeats}
        )  # fmt: skip
    right = sum(r["same after evict and load"] and not r["same without load"] for r in rows)
    yield Part(
        "Evict and load: the same bits",
        "All log probabilities of twelve steps after a block left the cache and came back, against"
        " those of never having left. The control does not load it and must differ: `same without"
        " load` is no. `repeats itself`: without eviction the answer is the same twice.",
        tuple(rows[0]),
        rows,
        [Bar("models whose answers are the same to the bit", right, least=len(rows))],
    )


def in_cache(reader: Reader) -> Iterator[Part]:
    """Measure both parts that ask what is in the cache, on one pair of servers."""
    with servers(_LONGEST) as made:
        yield questions(reader, made)
        yield dialogs(made)


def questions(reader: Reader, on_servers: OnServers) -> Part:
    """Ask fresh questions and look whether all that they need is in the cache."""
    fast, rows = InProcess(), list[dict[str, Any]]()
    others = [arm for arm in ARMS if arm not in _ON_SERVERS]
    for case in fresh_cases(reader.seed):
        talk = talk_of(case)
        found = [*measure(on_servers, talk, [SHARE], _ON_SERVERS)]
        found += measure(fast, talk, [SHARE], others)
        rows += ({**row, "conversation": case.id} for row in found)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    whole = {
        arm: {
            kind: percent(
                r["whole"] for r in rows if r["arm"] == arm and kind in (r["kind"], "all")
            )
            for kind in (*kinds, "all")
        }
        for arm in ARMS
    }
    counts = {k: sum(r["kind"] == k and r["arm"] == "default" for r in rows) for k in kinds}
    table = [{"all needed, %": "questions", **counts, "all": sum(counts.values())}]
    table += [{"all needed, %": arm, **each} for arm, each in whole.items()]
    margins = {arm: paired_difference(rows, "default", arm) for arm in ARMS if arm != "default"}
    return Part(
        "Fresh questions: is all that the answer needs in the cache",
        f"Conversations of about {LENGTH:,} tokens, in which every message tells something like the"
        " planted ones, on a budget of an eighth, and one question. `default` is the proxy as it"
        " is; `no eviction` and `oracle` (the needed messages are known) are what is possible;"
        " `breadcrumb` quotes evicted text instead of copying rows; `bm25`, a search for words,"
        " `vectors`, one by the built-in vectors, and `random` fill the same budget; with `discard`"
        " nothing comes back. Default, discard and no eviction run on the real proxy and"
        " llama-server with random weights, because only rows count; the others run in one process."
        " Not asked here: summaries and lists, which the default has less often (bench.tasks).",
        tuple(table[0]),
        table,
        [
            Bar("default, all questions, %", whole["default"]["all"], least=65),
            *(
                Bar(f"default minus {arm}, points, lower 95 % bound", margins[arm]["low"], least)
                for arm, least in (("bm25", 0), ("vectors", -3), ("discard", 0))
            ),
            Bar("random blocks, %: the test is not trivial", whole["random"]["all"], most=30),
            Bar("oracle, %: the budget suffices", whole["oracle"]["all"], least=95),
        ],
        charts.bars("All needed messages in the cache, % of questions", whole, {}, ARMS),
        details={"default minus": margins, "rows": rows},
    )  # fmt: skip


def fresh_cases(seed: int) -> Iterator[Case]:
    """Yield the cases of a seed: same words, other words, two hops, standing instructions."""
    first = _FIRST_FRESH + seed * _CASES_OF_A_SEED
    for kind, count, name in (
        ("multi-key", QUESTIONS, "same words"),
        ("two hops, same words", QUESTIONS - QUESTIONS // 2, "two hops"),
        ("two hops, other words", QUESTIONS // 2, "two hops"),
        ("standing instructions", QUESTIONS, "instructions"),
    ):
        for case in cases("reporting", kind, LENGTH, range(first, first + count), _HAYSTACK):
            yield replace(case, kind=name)
    other = range(first + 50, first + 50 + QUESTIONS)
    yield from _paraphrases(seed, cases("reporting", "multi-key", LENGTH, other, _HAYSTACK))


def _paraphrases(seed: int, drawn: Sequence[Case]) -> Iterator[Case]:
    """Yield the cases with another fact, which the question names in none of its words."""
    rng = random.Random(f"paraphrases {seed}")
    asked = {**vocab.UNSEEN_PAIRS, **vocab.UNSEEN_NUMBERS, **vocab.NEW_QUESTIONS}
    for case, attribute in zip(drawn, rng.sample(sorted(asked), len(drawn)), strict=True):
        messages = list(case.messages)
        is_number = attribute in vocab.UNSEEN_NUMBERS
        value = str(rng.randrange(10, 100_000)) if is_number else rng.choice(_VALUES)
        messages[case.needed[0]] = {"role": "user", "content": f"My {attribute} is {value}."}
        question = [{"role": "user", "content": asked[attribute]}]
        yield replace(case, kind="other words", messages=messages, asked=question,
                      needed=case.needed[:1])  # fmt: skip


_VALUES = ("amber falcon", "silver maple", "quiet harbor", "crimson lantern", "velvet canyon")


def dialogs(on_servers: OnServers) -> Part:
    """Run the quick form of `bench.evidence`, and fill the same budgets with BM25 and at random."""
    rows = evidence.quick(on_servers)
    fast, share = InProcess(), evidence.QUICK_SHARE
    fills = [row for talk in evidence.quick_talks() for row in measure(fast, talk, [share], FILLS)]
    table: list[Row] = [
        {"arm": arm, "questions": len(mine), "all evidence, %": percent(r["whole"] for r in mine),
         "half of each, %": percent(r["half"] for r in mine)}
        for arm in ("default", "bm25", "newest", "random", "oracle")
        if (mine := [r for r in [*rows, *fills] if r["arm"] == arm])
    ]  # fmt: skip
    found = {row["arm"]: row["all evidence, %"] for row in table}
    recorded = evidence.worse_than_recorded(rows) if evidence.RECORDED.exists() else []
    return Part(
        "Real dialogs: is the labelled evidence in the cache",
        "The quick form of bench.evidence: two long conversations of public data sets (bench/data)"
        " on a budget of an eighth, first questions of each, real servers. These questions are"
        " fixed and were used for tuning; they guard against a worse build.",
        tuple(table[0]),
        table,
        [
            Bar("default minus BM25 fill, points", found["default"] - found["bm25"], least=-3),
            Bar("figures that are worse than recorded", len(recorded), most=0),
        ],
        details={"worse": recorded},
    )


def copies(reader: Reader) -> Iterator[Part]:
    """Save and load a block over HTTP, and decode the same tokens."""
    shape = SHAPES["qwen2.5-7b-kv"]
    model = reader.model or ensure(shape)
    threads = str(reader.threads)
    options = ("-c", "2048", "-np", "1", "--evoke-ram", "2048", "-t", threads, "-tb", threads)
    with running(ensure_server(), model, *options) as llama:
        block = latency.Block(_BLOCK_TOKENS, 2 * _BLOCK_TOKENS, scattered=True, over_http=True)
        row = latency.measure(llama, block, _REPEATS)
    columns = {
        "tokens": "tokens",
        "mb": "MB",
        "save_ms": "save, ms",
        "load_ms": "load, ms",
        "prefill_ms": "decode again, ms",
        "save_load_vs_reprefill": "times cheaper",
    }
    yield Part(
        "Save and load against decoding again",
        f"A block of {_BLOCK_TOKENS} tokens whose rows are scattered in runs of 8 cells, over HTTP,"
        f" at the client; {model.name}, {threads} thread(s) on the CPU. On a GPU the ratio is"
        " smaller.",
        tuple(columns.values()),
        [{name: row[key] for key, name in columns.items()}],
        [Bar("decoding / (save + load)", round(row["save_load_vs_reprefill"], 1), least=5)],
    )


def first_byte(reader: Reader) -> Iterator[Part]:
    """Send the same turns through the proxy on a budget and directly to a stock server."""
    model = reader.model or ensure(SHAPES["long-2"])
    threads, words = str(reader.threads), ("-np", "1", "-c", "8192", "--jinja")
    options = (*words, "-t", threads, "-tb", threads)
    with (
        running(ensure_server(patched=False), model, *options, saves=False) as direct,
        running(ensure_server(), model, *options, "--evoke-ram", "512", saves=False) as patched,
        proxied(patched.port, "--budget", str(budget_of(_HISTORY))) as proxy,
    ):
        pairs = measure_first_bytes(direct.port, proxy, _HISTORY, _PAIRS)
    row = first_byte_row(model.name, _HISTORY, pairs)
    columns = {"template": "model", "tokens": "prompt tokens", "budget": "budget", "turns": "pairs",
               "direct_ms": "direct, ms", "through_ms": "through the proxy, ms",
               "first_byte_added_ms": "added, median, ms",
               "first_byte_added_ms_fastest": "added, fastest, ms"}  # fmt: skip
    yield Part(
        "Time to the first byte",
        f"The same chat turns of about {_HISTORY:,} tokens, to a stock llama-server and through the"
        " proxy on a budget of a quarter, in pairs, each on a new connection, at the client."
        " Other work on the machine lengthens it: a bar that is missed at a load average above 1"
        " says little. `fastest` compares the two fastest.",
        tuple(columns.values()),
        [{name: row[key] for key, name in columns.items()}],
        [Bar("added, ms, median of pairs", round(row["first_byte_added_ms"], 1), most=25)],
    )
