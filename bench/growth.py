"""What does a turn cost the proxy when 100 to 100,000 blocks have been saved?

Arms: `one` has all blocks in one conversation, `many` has 100 blocks in each conversation, one of
which continues. The whole engine runs in this process, in front of a server that answers at once
(`bench.growth_server`); network and server are left out. Times are processor time of this
process in ms, worker threads included, so that other load does not count. Blocks have 64 tokens
and are ranked by words and by the built-in word vectors; with `--embedder none` by words alone,
with `--embedder DIRECTORY` by words and by an encoder.
`--policy streaming --embedder none` ranks nothing: what remains is the cost of everything else.

* `own`: all work before the request can be forwarded, the sum of the next two
* `reading`: parsing the request and the server's rendering of its prompt
* `planning`: everything else before the request is forwarded
* `after`: work after the end of the answer
* `bytes`: the unavoidable part while clients send the whole conversation: compare the bytes with
  those of the previous request and copy them twice; measured separately, and part of `own` too

*Against* the same with a tenth of the blocks. *Fails* when a turn takes more than 5 ms and ten
times as long."""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import multiprocessing
import random
import resource
import statistics
import sys
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

import bench.policies  # noqa: F401 -- registers the policies to compare with
from bench.driver import Bench, Report, Row, option
from bench.engine_in_process import engine_before, exchanged
from bench.growth_server import SilentServer, Talk, cpu_s
from bench.stats import spread as spread_of
from evoke_proxy.core.policy.registry import saves_evicted
from evoke_proxy.core.prompt.rendered import common_prefix
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.demo.session import paragraph
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.web.garbage_collection import NEW_OBJECTS

SIZES = (100, 1_000, 10_000, 100_000)
ARMS = ("one", "many")
BLOCK, A_MESSAGE, EACH = 64, 4, 100
BUDGET = 8192
MOST_MS = 5.0
_SENTENCES = 18  # as many words as four blocks have tokens, roughly
_COLUMNS = (
    *("arm", "blocks", "sessions", "prompt", "turns", "own_ms", "reading_ms", "planning_ms"),
    *("bytes_ms", "after_ms", "first_ms", "rss_mib", "index_mib"),
)


@dataclass(slots=True)
class TimedEngine:
    """The engine, its server, and the time spent on reading."""

    engine: ModelRouter
    server: SilentServer
    random: random.Random
    reading_s: float = 0.0
    before: bytes = b""

    def __post_init__(self) -> None:
        parser = self.engine.parser
        read = parser._parse

        def timed(*arguments: Any) -> Any:
            began = cpu_s()
            try:
                return read(*arguments)
            finally:
                self.reading_s += cpu_s() - began

        parser._parse = timed  # type: ignore[method-assign,assignment]

    def grow(self, talk: Talk, blocks: int) -> None:
        """Add this many blocks of new messages."""
        for _ in range(0, blocks, 2 * A_MESSAGE):
            texts = [paragraph(self.random, _SENTENCES) for _ in range(2)]
            roles = zip(("user", "assistant"), texts, strict=True)
            talk.add([(role, text, A_MESSAGE * BLOCK) for role, text in roles])

    def ask(self, talk: Talk) -> None:
        """Add a question about an earlier message."""
        words = self.random.choice(talk.messages[: len(talk.messages) // 2 + 1])["content"].split()
        start = self.random.randrange(max(1, len(words) - 6))
        talk.add([("user", f"What was that about {' '.join(words[start : start + 6])}", 16)])

    async def turn(self, talk: Talk, name: str) -> dict[str, float]:
        """Run one turn and return its times in ms."""
        self.server.talk, body, self.reading_s = talk, talk.body(), 0.0
        began, others, parsed = cpu_s(), self.server.own_s, self.server.parsing_s
        headers = {"X-Evoke-Session": name}
        async with exchanged(self.engine, body, headers) as (exchange, trace):
            own = (cpu_s() - began - (self.server.own_s - others)) * 1000
            reading = (self.reading_s + self.server.parsing_s - parsed) * 1000
            answer = orjson.dumps({"choices": [], "timings": self.server.decode()})
            exchange.observe(answer)
            began, others = cpu_s(), self.server.own_s
        await asyncio.sleep(0.001)  # the tasks of the request end, as between two requests
        while self.engine.server.resources.background.busy:
            await asyncio.sleep(0.001)
        after = cpu_s() - began - (self.server.own_s - others)
        if trace.facts.get("prompt") is None:
            raise RuntimeError(f"no plan: {trace.facts}")
        talk.add([("assistant", paragraph(self.random, 1), 16)])
        moved, self.before = _bytes(self.before, body), body
        found = {"own": own, "after": after * 1000, "reading": reading, "planning": own - reading}
        return found | {"bytes": moved}


def _bytes(before: bytes, body: bytes) -> float:
    """Return the ms to compare a request with the previous one and to copy it twice."""
    began = cpu_s()
    common_prefix(np.frombuffer(before, np.uint8), np.frombuffer(body, np.uint8))
    for _ in range(2):
        b"".join((b"{", body))
    return (cpu_s() - began) * 1000


async def measure(
    arm: str, blocks: int, turns: int, embedder: str = "auto", policy: str = "evoke"
) -> dict[str, Any]:
    """Return a row: medians over the turns of one conversation with this many saved blocks.

    `embedder` is the setting `embedder.model`, or the directory of an encoder; `policy` is
    `policy.name`.
    """
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])  # as it is served
    n_sessions = max(1, blocks // EACH) if arm == "many" else 1
    each = blocks // n_sessions
    settings: dict[str, object] = {
        "policy.budget": min(BUDGET, each * BLOCK // 4),
        "limits.sessions": n_sessions + 1,
    }
    settings["policy.name"] = policy
    settings["embedder.directory" if Path(embedder).is_dir() else "embedder.model"] = embedder
    server = SilentServer()
    async with engine_before(server, settings) as engine:
        bench = TimedEngine(engine, server, random.Random(f"growth-{arm}-{blocks}"))
        empty, first = _rss_mib(), 0.0
        for number in range(n_sessions):
            talk = Talk(number)
            bench.grow(talk, each)
            bench.ask(talk)
            server.empty()
            first = (await bench.turn(talk, f"talk-{number}"))["own"]
        found = []
        for _ in range(turns + 1):
            bench.ask(talk)
            found.append(await bench.turn(talk, f"talk-{n_sessions - 1}"))
        saved = sum(len(conversation.labels) for conversation in engine.conversations)
        if saves_evicted(engine.server.conversations.policy) and not 0.7 * blocks <= saved:
            raise RuntimeError(f"{saved} of {blocks} blocks are saved")
        rss, index = _rss_mib() - empty, _index_mib(engine)
    middle = {f"{name}_ms": statistics.median(one[name] for one in found[1:]) for name in found[0]}
    spread = {name: spread_of([one[name] for one in found[1:]]) for name in found[0]}
    row = {"arm": arm, "blocks": blocks, "sessions": n_sessions, "saved": saved}
    row |= {"prompt": len(talk.tokens), "turns": turns, **middle, "first_ms": first}
    return row | {"rss_mib": rss, "index_mib": index, "spread": spread}


def _index_mib(engine: ModelRouter) -> float:
    """Return the size of an index of all blocks, built once more and traced."""
    tracemalloc.start()
    made = [Index() for _ in engine.conversations]
    for index, conversation in zip(made, engine.conversations, strict=True):
        index.topic_similarity(None, conversation.session.layout.blocks)
    size = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    return size


def _rss_mib() -> float:
    """Return the resident memory of this process in MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return by arm the time of a turn, and the exponents of its growth.

    An exponent is that from one number of blocks to the next: below 1, ten times the blocks cost
    less than ten times as much.
    """
    summary: dict[str, Any] = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        for row in mine:
            summary[f"{arm}_{row['blocks']}_ms"] = round(row["own_ms"], 3)
        pairs = list(zip(mine, mine[1:], strict=False))
        for key in ("own", "planning"):
            summary[f"{arm}_{key}_exponents"] = [_exponent(a, b, f"{key}_ms") for a, b in pairs]
    return summary


def _exponent(a: Mapping[str, Any], b: Mapping[str, Any], key: str) -> float:
    return round(math.log(b[key] / a[key]) / math.log(b["blocks"] / a["blocks"]), 2)


def reached(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a turn takes 5 ms at most, or grows more slowly than the number of blocks."""
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        for a, b in zip(mine, mine[1:], strict=False):
            if b["own_ms"] > MOST_MS and _exponent(a, b, "own_ms") >= 1:
                return False
    return True


def _measured(arm: str, blocks: int, args: argparse.Namespace) -> dict[str, Any]:
    return asyncio.run(measure(arm, blocks, args.turns, args.embedder, args.policy))


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each arm and size, each measured in a process of its own for its memory."""
    context = multiprocessing.get_context("spawn")
    for arm in args.arms:
        for blocks in args.sizes:
            with ProcessPoolExecutor(1, mp_context=context) as alone:
                yield alone.submit(_measured, arm, blocks, args).result()


def report(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report times and exponents."""
    missed = [] if reached(rows) else [f"a turn of {MOST_MS} ms that grows as the blocks do"]
    return Report(summarise(rows), missed)


BENCH = Bench(
    "growth", __doc__, "--sizes 100 1000 --turns 5", rows_of, report, _COLUMNS,
    (option("--turns", 20, "turns to take the median of"),
     option("--sizes", SIZES, "numbers of saved blocks"), option("--arms", ARMS, choices=ARMS),
     option("--embedder", "auto", "auto, none, or the directory of an encoder"),
     option("--policy", "evoke", "policy.name")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
