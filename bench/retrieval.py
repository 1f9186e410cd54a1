"""Does retrieval find the block with the answer, and how long does the search take?

There is no server and no budget: a haystack of blocks, some with one fact each, six kinds of
questions, and the rank of the block with the fact. Questions with other words than the fact use a
trained encoder, all-MiniLM-L6-v2, which `bench.export_minilm` fetches, or the built-in vectors.

*Against* each signal alone. *Fails* never."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench import record
from bench.driver import Bench, Report, Row, option
from bench.export_minilm import ensure
from bench.stats import wilson
from evoke_proxy.adapters.embedders.onnx_encoder import OnnxEncoder
from evoke_proxy.adapters.embedders.word_vectors import WordVectorEncoder
from evoke_proxy.config import EmbedderConfig
from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.retrieval.bm25 import FUNCTION_WORDS
from evoke_proxy.core.retrieval.encoding import Encoder, Vectors
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.retrieval.vectors import chunks_of

BLOCK = 64
ARMS: Mapping[str, Sequence[str]] = {
    "bm25": ("words", "names"),
    "+ngrams": ("words", "grams", "names"),
    "dense": ("vectors", "names"),
    "bm25+dense": ("words", "vectors", "names"),
    "fused": ("words", "grams", "vectors", "names"),
}
KINDS: Mapping[str, str] = {
    "lexical": "in the words of the fact",
    "paraphrase": "no content word in common",
    "clauses": "three questions in one sentence",
    "numbers": "identifiers, codes, settings",
    "typos": "a typing error in every content word",
    "inflected": "other forms of the words",
}
DEPTHS = (1, 4, 8)


@dataclass(frozen=True, slots=True)
class FactTexts:
    """A statement, a question in its words, and one that means the same in others."""

    fact: str
    lexical: str
    paraphrase: str


TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
FACTS = tuple(FactTexts(*line) for line in TEXTS["facts"])


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the indexes of the blocks that answer it."""

    kind: str
    text: str
    gold: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Haystack:
    """Blocks in order, and the questions about them."""

    blocks: BlockTable
    questions: Sequence[Asked]


def haystack(seed: int, n_blocks: int) -> Haystack:
    """Facts, each in its own block among sentences about nothing; equal for equal arguments."""
    rng = random.Random(f"retrieval-{seed}-{n_blocks}")
    stated = [(fact, _filled(rng, fact.fact)) for fact in FACTS]
    bent = [(question, _filled(rng, fact)) for fact, question in TEXTS["bent"]]
    coded = list(_coded(rng))
    said = [*(s for _, s in stated), *(s for _, s in bent), *(s for _, s in coded)]
    positions = rng.sample(range(n_blocks), len(said))
    blocks = _blocks(rng, n_blocks, dict(zip(positions, said, strict=True)))
    at = dict(zip(said, positions, strict=True))
    questions = [Asked("lexical", fact.lexical, (at[s],)) for fact, s in stated]
    questions += [Asked("paraphrase", fact.paraphrase, (at[s],)) for fact, s in stated]
    questions += [Asked("typos", mistyped(rng, fact.lexical), (at[s],)) for fact, s in stated]
    questions += [Asked("inflected", question, (at[s],)) for question, s in bent]
    questions += [Asked("numbers", question, (at[s],)) for question, s in coded]
    for _ in range(len(stated) // 2):
        three = rng.sample(stated, 3)
        gold = tuple(at[s] for _, s in three)
        questions.append(Asked("clauses", _joined([fact.lexical for fact, _ in three]), gold))
    return Haystack(BlockTable(blocks), questions)


def mistyped(rng: random.Random, text: str) -> str:
    """A text with one letter left out, doubled, swapped or replaced in each longer content word."""
    return " ".join(_mistyped(rng, word) for word in text.split())


def _mistyped(rng: random.Random, word: str) -> str:
    letters = word.rstrip("?.,")
    if len(letters) < 5 or letters.lower() in FUNCTION_WORDS or not letters.isalpha():
        return word
    at, rest = rng.randrange(1, len(letters) - 1), word[len(letters) :]
    begin, one, two, end = letters[:at], letters[at], letters[at + 1], letters[at + 2 :]
    other = rng.choice("aeiourstln".replace(one.lower(), ""))
    bent = (begin + two + end, begin + one + one + two + end, begin + two + one + end,
            begin + other + two + end)  # fmt: skip
    return rng.choice(bent) + rest


def _joined(questions: Sequence[str]) -> str:
    first, second, third = (question[0].lower() + question[1:-1] for question in questions)
    return f"{first[0].upper()}{first[1:]}, {second} and {third}?"


def _filled(rng: random.Random, fact: str) -> str:
    return fact.format(rng.choice((_name(rng), str(rng.randrange(100, 9999)))))


def _name(rng: random.Random) -> str:
    sounds = ("ba", "do", "ke", "li", "mo", "na", "ri", "su", "ta", "vo", "we", "zu")
    return "".join(rng.choice(sounds) for _ in range(3)).capitalize()


def _code(rng: random.Random, length: int = 8) -> str:
    signs = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
    return "".join(rng.choice(signs) for _ in range(length))


def _coded(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Return questions and statements that differ from others only in a number or an identifier."""
    for number in rng.sample(range(1000, 9999), 12):
        yield f"Who closed ticket {number}?", f"Ticket {number} was closed by {_name(rng)}."
    for _ in range(12):
        code = f"{_code(rng, 4)}-{_code(rng, 4)}"
        yield f"Where is order {code}?", f"Order {code} is stored in hall {_name(rng)}."
    for path, name in rng.sample([(f, s) for f in TEXTS["files"] for s in TEXTS["settings"]], 24):
        yield f"What is {name} in {path}?", f"{path}: {name} = {_code(rng)}"


def _blocks(rng: random.Random, count: int, said: Mapping[int, str]) -> Iterator[Block]:
    for number in range(count):
        sentences = [_sentence(rng) for _ in range(4)]
        if number in said:
            sentences[rng.randrange(4)] = said[number]
        span = Span(number * BLOCK, number * BLOCK + BLOCK)
        text = " ".join(sentences)
        yield Block(f"user:{number}#0", f"b/{number}", span, Role.USER, number, number, text)


def _sentence(rng: random.Random) -> str:
    parts = (rng.choice(TEXTS[name]) for name in ("subjects", "verbs", "objects"))
    return f"{' '.join(parts)}."


def find(stack: Haystack, encoder: Encoder | None) -> list[dict[str, Any]]:
    """A row for each arm and each fact asked for: the place of its block, from 1; 0 if none."""
    vectors = _vectors(stack.blocks, encoder) if encoder is not None else ()
    rows = []
    questions = [_embedded(Query.of(asked.text), encoder) for asked in stack.questions]
    for arm, signals in ARMS.items():
        if encoder is None and "vectors" in signals:
            continue
        index = Index(signals)
        index.relevance(Query.of("hold them"), stack.blocks)
        index.add_vectors(vectors)
        for asked, question in zip(stack.questions, questions, strict=True):
            scores = index.relevance(question, stack.blocks)
            for gold in asked.gold:
                place = int((scores > scores[gold]).sum()) + 1 if scores[gold] > 0 else 0
                rows.append({"arm": arm, "kind": asked.kind, "place": place})
    return rows


def _vectors(blocks: BlockTable, encoder: Encoder) -> list[tuple[str, Vectors]]:
    chunks = [(block.label, chunks_of(block.text)) for block in blocks]
    flat = iter(encoder.documents([piece for _, parts in chunks for piece in parts]))
    return [(label, np.stack(list(islice(flat, len(parts))))) for label, parts in chunks]


def _embedded(question: Query, encoder: Encoder | None) -> Query:
    if encoder is None:
        return question
    return question.embedded(list(encoder.queries(question.clauses)))


def recall(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each kind and arm the share of facts whose block is among the first k."""
    found = []
    for kind in KINDS:
        for arm in ARMS:
            positions = [row["place"] for row in rows if (row["arm"], row["kind"]) == (arm, kind)]
            if not positions:
                continue
            line: dict[str, Any] = {"kind": kind, "arm": arm, "n": len(positions)}
            for depth in DEPTHS:
                hits = sum(0 < place <= depth for place in positions)
                low, high = wilson(hits / len(positions), len(positions))
                line[f"@{depth}"] = hits / len(positions)
                line[f"@{depth} 95%"] = f"{low:.3f}-{high:.3f}"
            found.append(line)
    return found


def speed(n_blocks: int, turns: int, dimensions: int = 384) -> list[dict[str, Any]]:
    """What one turn costs: 8 new blocks, then a question; milliseconds of this thread's CPU time.

    Words are drawn as unevenly as in prose, vectors are random, four a block.
    """
    rng, numbers = np.random.default_rng(n_blocks), random.Random(n_blocks)
    words = [_code(numbers, numbers.randrange(3, 10)).lower() for _ in range(30_000)]
    blocks = [_drawn(rng, words, number) for number in range(n_blocks + 8 * turns)]
    rows = []
    for kind, signals in (("words", ARMS["+ngrams"]), ("words and vectors", ARMS["fused"])):
        index, table = Index(signals), BlockTable(blocks[:n_blocks])
        index.relevance(Query.of("hold them"), table)
        if "vectors" in signals:
            index.add_vectors((label, _directions(rng, 4, dimensions)) for label in table.labels)
        for clauses in (1, 3):
            took = []
            for _ in range(turns):
                table += BlockTable(blocks[len(table) : len(table) + 8])
                question = _random_query(rng, words, clauses, dimensions)
                began = time.thread_time()
                index.relevance(question, table)
                took.append(1000 * (time.thread_time() - began))
            row = {"blocks": n_blocks, "signals": kind, "clauses": clauses}
            p90 = sorted(took)[int(0.9 * len(took))]
            rows.append(row | {"median_ms": statistics.median(took), "p90_ms": p90})
            table = table[:n_blocks]
    return rows


def _drawn(rng: np.random.Generator, words: Sequence[str], number: int) -> Block:
    at = np.minimum(rng.zipf(1.2, 45) - 1, len(words) - 1)
    text = " ".join(words[i] for i in at.tolist())
    span = Span(number * BLOCK, number * BLOCK + BLOCK)
    return Block(f"user:{number}#0", f"b/{number}", span, Role.USER, number, number, text)


def _directions(rng: np.random.Generator, count: int, dimensions: int) -> Vectors:
    drawn = rng.standard_normal((count, dimensions), dtype=np.float32)
    unit: Vectors = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return unit


def _random_query(
    rng: np.random.Generator, words: Sequence[str], clauses: int, dimensions: int
) -> Query:
    """Clauses of ten words each, four of them rare, two of them mistyped."""
    parts = []
    for _ in range(clauses):
        at = np.minimum(rng.zipf(1.2, 6) - 1, len(words) - 1).tolist()
        chosen = [words[i] for i in [*at, *rng.integers(100, len(words), 4).tolist()]]
        chosen[-2:] = [word[:-1] + "x" for word in chosen[-2:]]
        parts.append(" ".join(chosen))
    vectors = tuple(_directions(rng, clauses, dimensions))
    return Query(" ".join(parts), tuple(parts), vectors)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the share by kind and arm, then the times."""
    encoder = _encoder(args)
    seeds = range(args.first, args.first + args.seeds)
    yield from recall([row for seed in seeds for row in find(haystack(seed, args.blocks), encoder)])
    for size in args.sizes:
        yield from speed(size, args.turns)


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the times apart from the shares."""
    times = [row for row in rows if "median_ms" in row]
    print(record.table(times, ("blocks", "signals", "clauses", "median_ms", "p90_ms")))
    found = [row for row in rows if "kind" in row]
    seeds = list(range(args.first, args.first + args.seeds))
    return Report({"blocks": args.blocks, "seeds": seeds, "times": times}, rows=found, table=found)


def _encoder(args: argparse.Namespace) -> Encoder | None:
    if args.lexical:
        return None
    if args.built_in:
        return WordVectorEncoder()
    return OnnxEncoder(EmbedderConfig(directory=str(ensure())))


BENCH = Bench(
    "retrieval", __doc__, "--seeds 1 --sizes 10000", measure, report,
    ("kind", "arm", "n", *(f"@{depth}" for depth in DEPTHS), "@8 95%"),
    (option("--seeds", 4, "haystacks"), option("--first", 1000, "the first seed"),
     option("--blocks", 512, "of a haystack"), option("--lexical", False, "without an encoder"),
     option("--built-in", False, "with the built-in word vectors"),
     option("--sizes", (10_000, 100_000), "saved blocks to time with", nargs="*"),
     option("--turns", 20, "timed of each")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
