"""What time does a budget cost, in long conversations and in many at once?

Long: a conversation of 4K, 16K and 64K tokens goes on for some turns, each of which asks about an
earlier message. Arms: llama-server alone with the whole conversation in its cache (`direct`), the
proxy without a budget (`no_eviction`), the proxy with a quarter of the conversation in the cache
(`evoke`), and llama-server alone with a client that drops the oldest messages until the prompt is a
quarter (`truncate`) or, each time that it is more, an eighth (`truncate_half`): what users do
without us. The arms take turns.

Many: as many conversations at once as the server has slots, each with a quarter of its tokens in
the cache; each sends its next turn as soon as it has its answer. Result: generated tokens per
second through the proxy, divided by those of llama-server alone, in pairs.

What was said before the measured turns is decoded once for each model, saved as slot files, and
restored from there in every run. Before the first measured turn one more turn is sent: it is not
in the times. An answer has 128 tokens; of those of the recorded coding agents in bench/data four
of five are longer. The resent history has fixed answers, so that all arms but those that truncate
have the same prompts. The share of attention in the operations of a token is that of a 7B model at
the same length; a row has it as `attention` (at its end).

*Against* llama-server alone with and without truncation, and the proxy without a budget. *Fails*
above 1.05 times the time of the proxy without a budget, or below 0.95 of the tokens per second of
llama-server with many; and when a conversation is compressed less than 4 times or recovers
nothing."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.chat_turns import question_about
from bench.driver import SERVER, Bench, Report, Row, option
from bench.llama import Llama, fronted, running
from bench.random_models import SHAPES, Shape, ensure
from bench.stats import spread
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.session import SYSTEM, paragraph
from evoke_proxy.server_build import ensure_server
from evoke_proxy.server_build.cache import cache_dir

LONG_MOST, MANY_LEAST, COMPRESSION_LEAST = 1.05, 0.95, 4.0
LENGTHS = (4096, 16384, 65536)
COMPRESSION = 4
_SENTENCES, _ANSWER_SENTENCES = 5, 3
_FIRST_ANSWER = 8  # tokens of the answer before the measured turns
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Arm:
    """How requests reach the server."""

    name: str  # the name of the arm in rows
    # Fields that are added to each request; None: llama-server gets it without the proxy.
    fields: Mapping[str, Any] | None = None
    # To what share of the budget the client cuts a prompt that exceeds it; 0: it does not.
    keeps: float = 0.0


def arms(budget: int) -> dict[str, Arm]:
    """Return all arms by name."""
    found = (
        Arm("direct"),
        Arm("no_eviction", {"evoke_policy": "no_eviction"}),
        Arm("evoke", {"evoke_policy": "evoke", "evoke_budget": budget}),
        Arm("truncate", keeps=1.0),
        Arm("truncate_half", keeps=0.5),
    )
    return {arm.name: arm for arm in found}


class Talk:
    """A conversation that is drawn from a seed: what was said before, then turns about it."""

    def __init__(self, seed: int) -> None:
        self.messages: list[Message] = [{"role": "system", "content": SYSTEM}]
        self.sizes: list[int] = []  # tokens of each, with what the template adds, by `count`
        self._random = random.Random(f"session-{seed}")
        self._said: list[str] = []

    def lengthen(self, llama: Llama, tokens: int) -> None:
        """Add exchanges until the prompt has about so many tokens."""
        while sum(self.sizes) < tokens:
            for _ in range(8):
                self._said.append(paragraph(self._random, _SENTENCES))
                self.messages.append({"role": "user", "content": self._said[-1]})
                self.answer()
            self.count(llama)

    def count(self, llama: Llama) -> None:
        """Count the tokens of the messages that are new, as they are within a prompt."""
        for message in self.messages[len(self.sizes) :]:
            text = llama.prompt_text([message], add_generation_prompt=False)
            self.sizes.append(len(llama.tokens(text, parse_special=True)))

    def ask(self, llama: Llama) -> None:
        """Add a question about an earlier message."""
        asked = question_about(self._said, self._random)
        self.messages.append({"role": "user", "content": asked})
        self.count(llama)

    def answer(self) -> None:
        """Add the fixed answer to what was asked last."""
        said = paragraph(self._random, _ANSWER_SENTENCES)
        self.messages.append({"role": "assistant", "content": said})

    def oldest_beyond(self, tokens: int) -> int:
        """Return how many messages after the first must go so that these tokens hold the rest."""
        total, dropped = sum(self.sizes), 0
        while total > tokens and dropped < len(self.sizes) - 2:
            dropped += 1
            total -= self.sizes[dropped]
        return dropped


class Client:
    """Sends the turns of one conversation as one arm does, and adds up what the replies report."""

    def __init__(self, port: int, arm: Arm, seed: int, budget: int) -> None:
        self._port, self._arm, self._budget = port, arm, budget
        self._headers = {"X-Evoke-Session": f"{arm.name}-{seed}"} if arm.fields else {}
        self._dropped = 0
        self.total = {"generated": 0, "decoded": 0, "recovered": 0}
        self.prompt = self.peak = 0
        self.first_ms: list[float] = []

    def turn(self, talk: Talk, answer: int) -> None:
        """Ask what the conversation ends with."""
        reply = chat(self._port, self._body(talk, answer), self._headers)
        timings, usage = reply.timings, reply.timings.get("evoke") or {}
        self.total["generated"] += int(timings["predicted_n"])
        self.total["decoded"] += int(timings["prompt_n"])
        self.total["recovered"] += int(usage.get("recovered", 0))
        self.prompt = int(usage.get("n_prompt", timings["prompt_n"] + timings["cache_n"]))
        self.peak = max(self.peak, int(usage.get("n_resident_peak", self.prompt + answer)))
        self.first_ms.append(reply.ttft_ms)

    def _body(self, talk: Talk, answer: int) -> dict[str, Any]:
        if self._arm.keeps:
            most = self._budget - answer
            if sum(talk.sizes) - sum(talk.sizes[1 : 1 + self._dropped]) > most:
                self._dropped = talk.oldest_beyond(int(most * self._arm.keeps))
        body = {"messages": [talk.messages[0], *talk.messages[1 + self._dropped :]]}
        fixed = {"temperature": 0, "max_tokens": answer, "ignore_eos": True}
        return body | fixed | dict(self._arm.fields or {})

    def forget(self) -> None:
        """Leave what was counted so far out of the results."""
        self.total = dict.fromkeys(self.total, 0)
        self.peak, self.first_ms = 0, []


@dataclass(frozen=True, slots=True)
class Bed:
    """What conversations run on."""

    server: Path  # a patched llama-server
    shape: Shape  # the shape of its model
    options: Sequence[str]  # options of the server that all arms have
    files: Path  # where slot files are kept

    def llama(self, *options: str) -> AbstractContextManager[Llama]:
        """A server on this bed."""
        return running(self.server, ensure(self.shape), *self.options, *options)

    def restored(self, llama: Llama, slot: int, seed: int, tokens: int) -> Talk:
        """Put a conversation of so many tokens into a slot, from its file or by decoding it."""
        talk = Talk(seed)
        talk.lengthen(llama, tokens)
        slots = llama.call("GET", "/props")["total_slots"]  # a file fits no other number of them
        build = self.server.stat()
        key = [build.st_size, build.st_mtime_ns, slots, repr(self.shape), talk.messages]
        name = f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.bin"
        kept, own = self.files / name, (llama.folder or Path()) / name
        if kept.exists():
            own.symlink_to(kept)
            llama.call("POST", f"/slots/{slot}?action=restore", {"filename": name})
            return talk
        body = {"messages": talk.messages, "max_tokens": 1, "temperature": 0, "id_slot": slot}
        llama.call("POST", "/v1/chat/completions", body)
        llama.call("POST", f"/slots/{slot}?action=save", {"filename": name})
        shutil.move(own, kept.with_suffix(".part"))
        kept.with_suffix(".part").replace(kept)
        return talk


def attention_share(shape: Shape, tokens: int) -> float:
    """Return the share of attention in the multiplications of one token at this length.

    A layer multiplies each weight once, and K and V of each earlier token with each query head.
    """
    heads = shape.heads * shape.head_size
    weights = shape.width * (2 * heads + 2 * shape.kv_heads * shape.head_size + 3 * shape.ff)
    attention = 2 * heads * tokens
    return attention / (attention + weights)


def long(bed: Bed, args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each run of each length and arm, each on a server of its own."""
    for length in args.lengths:
        budget = length // COMPRESSION
        for repeat in range(args.repeats):
            names = [name for name in arms(budget) if repeat == 0 or "truncate" not in name]
            for name in names[:: -1 if repeat % 2 else 1]:
                head = {"part": "long", "length": length, "arm": name, "repeat": repeat}
                yield head | _long(bed, arms(budget)[name], length, args)


def _long(bed: Bed, arm: Arm, length: int, args: argparse.Namespace) -> dict[str, Any]:
    budget = length // COMPRESSION
    cells = length + 4096 + 2 * args.turns * (args.answer + 256)
    ram = 512 + length * bed.shape.kv_bytes // 2**20
    options = ("-np", "1", "-c", str(cells), "--evoke-ram", str(ram))
    with bed.llama(*options) as llama:
        if arm.keeps:
            talk = Talk(length)
            talk.lengthen(llama, length)
        else:
            talk = bed.restored(llama, 0, length, length)
        with fronted(llama.port, arm.fields is not None) as port:
            client = Client(port, arm, length, budget)
            _turns(client, talk, llama, 1, _FIRST_ANSWER)
            client.forget()
            wall = _turns(client, talk, llama, args.turns, args.answer)
    return _row(wall, [client], bed.shape, args.turns)


def _turns(client: Client, talk: Talk, llama: Llama, turns: int, answer: int) -> float:
    """Run turns; return the seconds that requests took."""
    wall = 0.0
    for _ in range(turns):
        talk.ask(llama)
        began = time.perf_counter()
        client.turn(talk, answer)
        wall += time.perf_counter() - began
        talk.answer()
    return wall


def many(bed: Bed, args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each run of many conversations at once, each on a server of its own."""
    for repeat in range(args.repeats):
        for name in ("direct", "evoke")[:: -1 if repeat % 2 else 1]:
            head = {"part": "many", "length": args.history, "arm": name, "repeat": repeat}
            yield head | _many(bed, name, args)


def _many(bed: Bed, name: str, args: argparse.Namespace) -> dict[str, Any]:
    arm = arms(args.history // COMPRESSION)[name]
    each = args.history + 1024 + args.each * (args.answer + 256)
    ram = 512 + args.sessions * each * bed.shape.kv_bytes // 2**20
    options = ("-np", str(args.sessions), "-c", str(args.sessions * each), "-no-kvu")
    with bed.llama(*options, "--evoke-ram", str(ram)) as llama:
        seeds = range(args.sessions)
        talks = [bed.restored(llama, slot, 1000 + slot, args.history) for slot in seeds]
        with (
            fronted(llama.port, arm.fields is not None) as port,
            ThreadPoolExecutor(args.sessions) as pool,
        ):
            clients = [Client(port, arm, seed, 0) for seed in seeds]
            for client, talk in zip(clients, talks, strict=True):
                _turns(client, talk, llama, 1, _FIRST_ANSWER)
                client.forget()
            began = time.perf_counter()
            measured = partial(_turns, llama=llama, turns=args.each, answer=args.answer)
            list(pool.map(measured, clients, talks))
            wall = time.perf_counter() - began
    return _row(wall, clients, bed.shape, args.sessions * args.each)


def _row(wall: float, clients: Sequence[Client], shape: Shape, turns: int) -> dict[str, Any]:
    """The columns of a row that are measured: `wall_s` in seconds, counts, tokens per second."""
    total = {name: sum(c.total[name] for c in clients) for name in clients[0].total}
    first = statistics.median(ms for client in clients for ms in client.first_ms)
    return {
        "wall_s": round(wall, 3),
        "turns": turns,
        **total,
        "least_recovered": min(client.total["recovered"] for client in clients),
        "prompt": max(client.prompt for client in clients),
        "peak": max(client.peak for client in clients),
        "compression": round(min(client.prompt / client.peak for client in clients), 2),
        "first_ms": round(first, 1),
        "tokens_per_s": round(total["generated"] / wall, 2),
        "attention": round(attention_share(shape, max(c.prompt for c in clients)), 3),
    }


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the medians over the repeats, with minimum and maximum where a bar applies."""
    summary: dict[str, Any] = {}
    for length in dict.fromkeys(row["length"] for row in rows if row["part"] == "long"):
        of = [row for row in rows if row["part"] == "long" and row["length"] == length]
        found: dict[str, Any] = {}
        for below in ("no_eviction", "direct", "truncate", "truncate_half"):
            if ratios := _ratios(of, "evoke", below, "wall_s"):
                found[f"evoke_over_{below}"] = spread(ratios)
        summary[f"long_{length}"] = found
    shared = _ratios([row for row in rows if row["part"] == "many"], "evoke", "direct")
    if shared:
        summary["many_tokens_per_s_over_direct"] = spread(shared)
    return summary


def _ratios(rows: Sequence[Row], above: str, below: str, name: str = "tokens_per_s") -> list[float]:
    """The values of one arm divided by those of another, in pairs of the same repeat."""
    values = {(row["arm"], row["repeat"]): float(row[name]) for row in rows}
    repeats = sorted({repeat for arm, repeat in values if arm == above})
    return [values[above, i] / values[below, i] for i in repeats if (below, i) in values]


def missed(rows: Sequence[Row], summary: Mapping[str, Any]) -> list[str]:
    """Return the bars that are missed, in words."""
    found = [
        f"{name}: {of['evoke_over_no_eviction']['median']:.2f} times the time without a budget, "
        f"at most {LONG_MOST}"
        for name, of in summary.items()
        if name.startswith("long_") and "evoke_over_no_eviction" in of
        if of["evoke_over_no_eviction"]["median"] > LONG_MOST
    ]
    shared = summary.get("many_tokens_per_s_over_direct")
    if shared and shared["median"] < MANY_LEAST:
        found.append(f"many: {shared['median']:.2f} of direct, at least {MANY_LEAST}")
    for row in rows:
        if row["arm"] == "evoke":
            where = f"{row['part']} {row['length']}, repeat {row['repeat']}"
            if row["compression"] < COMPRESSION_LEAST:
                found.append(f"{where}: compressed {row['compression']} times, at least 4")
            if not row["least_recovered"]:
                found.append(f"{where}: a conversation recovered nothing")
    return found


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of both parts."""
    threads = str(args.threads)
    files = args.files or cache_dir() / "sessions"
    files.mkdir(parents=True, exist_ok=True)
    options = ("-t", threads, "-tb", threads, *args.server_args.split())
    bed = Bed(args.server or ensure_server(), SHAPES[args.model], options, files)
    if args.turns:
        yield from long(bed, args)
    if args.each:
        yield from many(bed, args)


def report(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the medians that the bars apply to."""
    summary = summarise(rows)
    return Report(summary, missed(rows, summary))


BENCH = Bench(
    "session", __doc__, "--lengths 4096 --turns 4 --each 2 --repeats 1", measure, report,
    ("part", "length", "arm", "repeat", "wall_s", "first_ms", "tokens_per_s", "prompt", "decoded",
     "recovered", "peak", "compression", "attention"),
    (SERVER, option("--model", "attention-7b", choices=sorted(SHAPES)),
     option("--lengths", LENGTHS, "tokens of the long conversations"),
     option("--turns", 8, "measured turns of each, 0: none"),
     option("--sessions", 16, "conversations at once"),
     option("--history", 3072, "tokens of each of these before its measured turns"),
     option("--each", 4, "measured turns of each of these, 0: none"),
     option("--answer", 128, "tokens of every answer"),
     option("--repeats", 3, "pairs to take the median of; arms that truncate run once"),
     option("--threads", max(1, (os.cpu_count() or 2) - 1), "of the server; one core is free"),
     option("--files", help="folder of slot files (default: in the cache)", type=Path),
     option("--server-args", "", "more options of the server")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
