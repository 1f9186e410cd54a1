"""What does the vector of a question, or of a block, cost?

Times a question until its vector is there (ms), alone and while blocks are embedded, and blocks
from submission to the last vector (blocks per second). First the built-in word vectors, also called
directly without the service, then all-MiniLM-L6-v2 or the encoder in a directory. No text occurs
twice, so the vector cache has no effect.

*Against* calling the word vectors directly. *Fails* never."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.driver import Bench, Report, Row, option
from bench.export_minilm import ensure
from evoke_proxy.adapters.embedders.word_vectors import WordVectorEncoder
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import EmbedderConfig
from evoke_proxy.engine.embedding.service import EmbeddingService

# Each is one token of BERT's vocabulary.
_WORDS = (
    "the service wrote its log into a file and the pool of workers waited for the next request to"
    " come in before it went on with the other part of the work that was left over"
).split()


class Texts:
    """Texts of a number of tokens, no two alike."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def of(self, tokens: int) -> str:
        """Return a text of this many tokens, including the two that every text gets."""
        return " ".join(self._random.choices(_WORDS, k=tokens - 2))


async def questions(front: EmbeddingService, texts: Texts, tokens: int, n: int) -> list[float]:
    """Return the milliseconds of each of n questions; RuntimeError when one gets no vector."""
    times = []
    for _ in range(n):
        began = time.perf_counter()
        if (await front.embed_queries([texts.of(tokens)]))[0] is None:
            raise RuntimeError("a question got no vector in its time")
        times.append((time.perf_counter() - began) * 1e3)
    return times


async def blocks(front: EmbeddingService, texts: Texts, tokens: int, n: int) -> float:
    """Return the seconds until n blocks, submitted at once, have their vectors."""
    began = time.perf_counter()
    keys = _hand_in(front, [texts.of(tokens) for _ in range(n)])
    while any(front.vector(key) is None for key in keys):
        await asyncio.sleep(0.01)
    return time.perf_counter() - began


def _hand_in(front: EmbeddingService, texts: Sequence[str]) -> list[bytes]:
    pairs = [(front.key(text), text) for text in texts]
    front.submit(pairs)
    return [key for key, _ in pairs]


async def measure(
    front: EmbeddingService, sizes: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """A row for each size of question, alone and beside blocks, and for each size of block."""
    texts, rows = Texts(1), []
    async with front:
        for tokens in sizes:
            rows.append(_row("question", tokens, await questions(front, texts, tokens, repeats)))
        if front.is_immediate:
            return rows + [_at_once(front, texts, tokens, repeats) for tokens in sizes]
        for tokens in sizes:
            taken = await blocks(front, texts, tokens, repeats)
            rows.append({"what": "block", "tokens": tokens, "n": repeats, "per_s": repeats / taken})
        for tokens in sizes:
            _hand_in(front, [texts.of(64) for _ in range(repeats * 4)])
            beside = await questions(front, texts, tokens, repeats)
            rows.append(_row("question beside blocks", tokens, beside))
    return rows


def _at_once(front: EmbeddingService, texts: Texts, tokens: int, n: int) -> dict[str, Any]:
    """The row of n blocks that are embedded in one call, as before a plan."""
    drawn = [texts.of(tokens) for _ in range(n)]
    began = time.perf_counter()
    front.embed_blocks(drawn)
    per_s = n / (time.perf_counter() - began)
    return {"what": "block", "tokens": tokens, "n": n, "per_s": per_s}


def directly(sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each size of question, embedded by the word vectors without the service."""
    table, texts, rows = WordVectorEncoder(), Texts(2), []
    for tokens in sizes:
        times = []
        for _ in range(repeats):
            # The built-in pieces have no marks at the ends.
            text = texts.of(tokens + 2)
            began = time.perf_counter()
            table.queries([text])
            times.append((time.perf_counter() - began) * 1e3)
        rows.append(_row("question directly", tokens, times))
    return rows


def _row(what: str, tokens: int, times: Sequence[float]) -> dict[str, Any]:
    middle = statistics.median(times)
    p95 = statistics.quantiles(times, n=20)[-1]
    times_ms = {"median_ms": middle, "p95_ms": p95, "min_ms": min(times), "max_ms": max(times)}
    return {"what": what, "tokens": tokens, "n": len(times), **times_ms, "per_s": 1e3 / middle}


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the built-in vectors without the service, then of each encoder."""
    logging.basicConfig(level=logging.WARNING)
    yield from ({"encoder": "built-in"} | r for r in directly(args.sizes, 10 * args.repeats))
    encoders = {"built-in": EmbedderConfig(model="built-in", timeout_ms=60_000)}
    if not args.built_in:
        directory = args.directory or ensure()
        # The name of the exported directory ends with its recipe.
        name = directory.name if args.directory else directory.name.rpartition("-")[0]
        encoders[name] = EmbedderConfig(
            directory=str(directory), device=args.device, threads=args.threads, timeout_ms=60_000
        )
    for name, chosen in encoders.items():
        front = EmbeddingService(chosen, Metrics())
        measured = asyncio.run(measure(front, args.sizes, args.repeats))
        yield from ({"encoder": name} | row for row in measured)


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report medians of questions, and blocks a second."""
    figures: dict[str, Any] = {}
    for row in rows:
        name = f"{row['encoder']}_{row['what'].replace(' ', '_')}_{row['tokens']}"
        key = "per_s" if row["what"] == "block" else "median_ms"
        figures[f"{name}_{key.removeprefix('median_')}"] = row[key]
    encoders = list(dict.fromkeys(row["encoder"] for row in rows))
    return Report({**figures, "encoders": encoders, "threads": args.threads})


BENCH = Bench(
    "embedding", __doc__, "--sizes 16 --repeats 20", rows_of, report,
    ("encoder", "what", "tokens", "n", "median_ms", "p95_ms", "min_ms", "max_ms", "per_s"),
    (option("--directory", help="another encoder", type=Path),
     option("--built-in", False, "the built-in vectors alone"),
     option("--device", "cpu", choices=("cpu", "cuda")), option("--threads", 1),
     option("--sizes", (16, 64), "tokens"), option("--repeats", 100)),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
