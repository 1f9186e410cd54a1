"""Runs sessions in parallel lanes of one server and one proxy each, and keeps their records.

Each turn resends the whole history with the scripted answers, so that the history is the same in
every arm. Questions follow one another in the session, each after the expected answers to the
earlier ones: a wrong answer cannot affect a later one, but later questions find resident what
earlier ones recovered."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import queue
import re
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np

import bench
import evoke_proxy
from bench.driver import MODEL, SERVER, listed, option
from bench.llama import Llama
from bench.proxy import tuned_proxy_command
from bench.quality.plan import Arm, Unit
from bench.quality.sessions import REPORTING, TUNING, Script, right
from bench.record import Journal
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Span, clipped, count, merged
from evoke_proxy.core.prompt.rendered import Rendered, common_prefix
from evoke_proxy.core.prompt.segment import CutOptions, Draft, cut
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.demo.client import Reply, Turn, chat, read_turn
from evoke_proxy.demo.processes import free_port, server_command, serving
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

CONTEXT = 12288
_UNKNOWN = "\0"  # pieces of the template, which no fact contains

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stack:
    """The ports of one server with one slot and of its proxy."""

    upstream: int
    front: int

    def clear(self) -> None:
        """Empty the slot, and drop the copies of the run before.

        Each run is a tenant of its own. When host memory is full, the tenant with most copies loses
        some: that would be the running one.
        """
        llama = Llama(self.upstream)
        before = llama.call("GET", "/slots/0/blocks")["tenant"]
        llama.act("block-drop", all=True, tenant=before)
        llama.erase()


@dataclass(frozen=True, slots=True)
class Reading:
    """A script as tokens.

    `ends[i]` is where message i ends; a prompt has `generation` tokens behind its last message, and
    the next prompt lacks the last `opening` of them (`<think>`). `gold[i]` are the places where
    probe i's fact is told, `blocks` what the proxy cuts the prompt into."""

    ends: Sequence[int]
    generation: int
    gold: Sequence[Sequence[Range]]
    blocks: Sequence[Draft]
    opening: int = 0

    def prompt(self, n_messages: int) -> int:
        """How many tokens a request with the first messages has."""
        return self.ends[n_messages - 1] + self.generation


@contextmanager
def stack(server: Path, model: Path, options: Sequence[str], logs: Path) -> Iterator[Stack]:
    """Run both until the block is left; `options` are those of the server."""
    upstream, front = free_port(), free_port()
    command = server_command(server, model, upstream, blocks=True)
    command[command.index("-c") + 1] = str(CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        # Without a folder no slot can be erased.
        command += ["--slot-save-path", folder, *options]
        with serving(command, upstream, logs / f"{upstream}-llama-server.log"):
            proxy = [*tuned_proxy_command(front, upstream, {}), "--log-level", "warning"]
            with serving(proxy, front, logs / f"{upstream}-proxy.log"):
                yield Stack(upstream, front)


def read(upstream: int, script: Script) -> Reading:
    """Ask the server for the tokens of a script and find the facts among them.

    ValueError when a fact is not where the generator said it.
    """
    body = {"messages": list(script.messages[:-1])}
    rendered = Llama(upstream).rendered(body)
    words = _pieces(upstream, [message["content"] for message in script.messages])
    pieces = [words.get(token, _UNKNOWN) for token in rendered["tokens"]]
    ends = [span["p1"] for span in sorted(rendered["spans"], key=lambda span: span["index"])]
    if len(ends) != len(script.messages) - 1:
        raise ValueError(f"{script.name}: {len(ends)} of {len(script.messages) - 1} messages found")
    first_probe = script.turns[-len(script.probes)] - 1
    history = "".join(pieces[: ends[first_probe - 1]])
    starts = [0, *accumulate(len(piece) for piece in pieces)]
    gold = []
    for probe in script.probes:
        if probe.value is None:
            gold.append(list[Range]())
            continue
        gold.append(_occurrences(history, probe.fact.statement, starts))
        if not gold[-1]:
            raise ValueError(f"{script.name}: {probe.fact.statement!r} is not in the prompt")
    generation = len(pieces) - rendered["generation"]
    tokens = np.array(rendered["tokens"])
    shared = common_prefix(tokens[-generation:], tokens[ends[script.turns[0] - 1] :])
    options = CutOptions(PolicyConfig().block_tokens, [PolicyConfig().sink_tokens])
    blocks = cut(Rendered.parse(rendered), parse_chat("chat", body).messages, options)
    return Reading(ends, generation, gold, blocks, generation - shared)


def _occurrences(text: str, wanted: str, starts: Sequence[int]) -> list[Range]:
    spans = (match.span() for match in re.finditer(re.escape(wanted), text))
    return [(bisect_right(starts, a) - 1, bisect_right(starts, b - 1)) for a, b in spans]


def _pieces(upstream: int, texts: Sequence[str]) -> dict[int, str]:
    """Return the text of every token of these texts; each text begins a line, as in the prompt."""
    body = {"content": "\n".join(texts), "with_pieces": True}
    answer = Llama(upstream).call("POST", "/tokenize", body)
    return {item["id"]: str(item["piece"]) for item in answer["tokens"]}


ANSWER_TOKENS, THOUGHT_TOKENS = 40, 60
Spans = Sequence[Span]
ORACLE = "oracle"
TURN_FIELDS = ("prompt", "decoded", "recovered", "resident_before", "omitted", "resident_peak")


def run(stack: Stack, script: Script, reading: Reading, arm: Arm) -> dict[str, Any]:
    """Run a session; return `probes`, `turns` (TURN_FIELDS of each) and `faults` in words."""
    stack.clear()
    tokens = reading.prompt(script.turns[-1])
    budget, began = arm.budget(tokens), time.perf_counter()
    headers = _headers(script, arm)
    turns: list[Turn] = []
    probes: list[dict[str, Any]] = []
    faults: list[str] = []
    first_probe = len(script.turns) - len(script.probes)
    most = ANSWER_TOKENS + (THOUGHT_TOKENS if reading.opening else 0)
    for number, end in enumerate(script.turns):
        probing = number >= first_probe
        body = {
            "messages": list(script.messages[:end]),
            "temperature": 0,
            "max_tokens": most if probing else 1,
            **arm.body(tokens),
        }
        if probing and arm.policy == ORACLE:
            body["evoke_oracle"] = _gold_names(reading, number - first_probe)
        reply = chat(stack.front, body, headers)
        turns.append(read_turn(number + 1, reply))
        planned = reply.headers.get("x-evoke-policy", "no plan")
        if planned != arm.policy:
            faults.append(f"turn {number + 1}: {planned}")
        sent = reading.prompt(end)
        if turns[-1].prompt < sent and arm.policy != "truncate":
            faults.append(f"turn {number + 1}: a prompt of {turns[-1].prompt}, sent {sent}")
        if probing:
            answer, asked = (reply.text, _seen(stack, reply)), (number - first_probe, end)
            probes.append(_probe(script, reading, asked, turns[-1], answer))
    turn_by_turn = _decoded_and_new(turns, reading.opening)
    # The answers to probes were generated, but the next turn has the scripted ones.
    of_probes = turn_by_turn[first_probe:]
    return {
        "session": script.name,
        "task": script.task,
        "arm": arm.name,
        "policy": arm.policy,
        "ratio": arm.ratio,
        "tokens": tokens,
        "budget": budget,
        "probes": probes,
        "turns": [[getattr(turn, name) for name in TURN_FIELDS] for turn in turns],
        "again": sum(max(0, decoded - max(0, new)) for decoded, new in turn_by_turn),
        "answers_again": sum(decoded >= new for decoded, new in of_probes),
        "faults": [*faults, *_faults(turns, budget)],
        "wall_s": round(time.perf_counter() - began, 3),
    }


def _headers(script: Script, arm: Arm) -> dict[str, str]:
    """Return the headers of a run, which is a tenant of its own: arms share no rows."""
    name = hashlib.sha256(f"{script.name} {arm.name}".encode()).hexdigest()[:24]
    return {"X-Evoke-Session": name, "Authorization": f"Bearer {name}"}


def _gold_names(reading: Reading, index: int) -> list[str]:
    """Return the proxy's names of the blocks with the latest statement of the probe's fact."""
    spans = [Span(*place) for place in reading.gold[index][-1:]]
    return [block.display_name for block in reading.blocks if clipped(spans, block.span)]


def _seen(stack: Stack, reply: Reply) -> Spans:
    """Return the spans resident at the end of an answer, or evicted during it."""
    usage = reply.timings.get("evoke") or {}
    resident = Llama(stack.upstream).call("GET", "/slots/0/blocks")["resident"]
    ranges = [*resident, *usage.get("auto_evicted", ())]
    return merged(Span(int(start), int(end)) for start, end, *_ in ranges)


def _probe(
    script: Script, reading: Reading, asked: tuple[int, int], turn: Turn, answer: tuple[str, Spans]
) -> dict[str, Any]:
    """Return the record of one probe: its answer, and whether the rows of its fact were there.

    `asked` is the index of the probe and the number of messages that the request had, `answer` the
    text and the spans of the prompt whose rows were resident during the turn.
    """
    (index, end), (text, seen), probe = asked, answer, script.probes[asked[0]]
    # Messages removed from the request itself followed the system message.
    gold = _moved(reading.gold[index], reading.ends[0], reading.prompt(end) - turn.prompt)
    cursor = turn.prompt - turn.decoded
    visible = [span for span in gold if count(clipped(seen, Span(*span))) == span[1] - span[0]]
    correct = right(text, probe)
    return {
        "question": probe.question,
        "expected": probe.answer,
        "kind": probe.fact.kind,
        "type": probe.fact.type,
        "known": probe.value is not None,
        "depth": script.depths[index] if script.depths else None,
        "answer": text,
        "right": correct,
        "gold": [list(span) for span in reading.gold[index]],
        "visible": bool(visible),
        "decoded_again": any(span[1] > cursor for span in gold),
        # What was resident instead, to analyse a miss.
        "seen": [] if correct else [[span.start, span.end] for span in seen],
    }


def _moved(gold: Sequence[Range], system: int, left_out: int) -> list[Range]:
    """Return the gold ranges in a prompt that lacks this many tokens after its system message."""
    moved = [(start - left_out, end - left_out) for start, end in gold]
    return [span for span in moved if left_out == 0 or span[0] >= system]


def _decoded_and_new(turns: Sequence[Turn], opening: int) -> list[tuple[int, int]]:
    """Tokens decoded in each turn after the first, and those that the prompt before it lacks."""
    pairs = zip(turns, turns[1:], strict=False)
    return [(now.decoded, now.prompt - before.prompt + opening) for before, now in pairs]


def _faults(turns: Sequence[Turn], budget: int | None) -> list[str]:
    found = []
    for turn in turns:
        total = turn.decoded + turn.recovered + turn.resident_before + turn.omitted
        if not turn.from_engine:
            found.append(f"turn {turn.number}: no token counts of the engine")
        elif total != turn.prompt:
            found.append(f"turn {turn.number}: token counts sum to {total} of {turn.prompt}")
        if budget is not None and turn.resident_peak > budget:
            found.append(f"turn {turn.number}: peak {turn.resident_peak} over {budget}")
    return found


Record = Mapping[str, Any]
# The options of every bench that runs sessions under arms.
OPTIONS = (
    SERVER,
    MODEL,
    option("--tuning", False, "sessions that may be tuned on"),
    option("--seed", 0, "other sessions of the same kind"),
    option("--cells", "", "only these, separated by commas", type=listed),
    option("--lanes", max(1, (os.cpu_count() or 2) // 2), "servers at once"),
    option("--minutes", math.inf, "stop after so many, to be resumed"),
    option("--server-args", "", "more options of the server, such as '-ctk q8_0 -ctv q8_0 -fa on'"),
    option("--show", False, "run nothing, report what is there"),
    option("--journal", Path("out/bench/quality.jsonl"), "the file of finished sessions"),
)
# What decides an answer: all of the proxy that runs, and how sessions are made and driven.
_OURS = ("adapters", "config", "core", "engine", "web")
_BENCH = (
    *(f"model/{name}" for name in ("facts.py", "lists.toml", "tasks.py", "text.py", "vocab.py")),
    *(f"quality/{name}.py" for name in ("plan", "sessions", "work")),
    *("fills.py", "policies/baselines.py"),
)


def fingerprint(model: Path, server: Path, *options: str) -> str:
    """Return a hash of all that a result depends on: model, server and its options, sources."""
    package, benches = Path(evoke_proxy.__file__).parent, Path(bench.__file__).parent
    sources = [path for name in _OURS for path in sorted((package / name).rglob("*.py"))]
    sources += [benches / name for name in _BENCH]
    total = hashlib.sha256(" ".join([server.resolve().parent.name, *options]).encode())
    for path in (model, *sources):
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def first_seed(args: argparse.Namespace) -> int:
    """Return the seed of the sessions for tuning, or of those for reporting."""
    return (TUNING if args.tuning else REPORTING).start + int(args.seed)


def recorded(args: argparse.Namespace, todo: Sequence[Unit]) -> Sequence[Record]:
    """Run the units that the journal lacks, and return the records; RuntimeError without any."""
    server, model = args.server or ensure_server(), args.model or bundled_model()
    options = args.server_args.split()
    journal = Journal(args.journal, fingerprint(model, server, *options))
    if not args.show:
        deadline = time.monotonic() + 60 * args.minutes
        Work(server, model, journal, deadline, options).run(todo, args.lanes)
    done = journal.records()
    found = [done[unit.key] for unit in todo if unit.key in done]
    if not found:
        raise RuntimeError("nothing has been run with this model, server and proxy")
    print(f"{len(found)} of {len(todo)} sessions x arms", file=sys.stderr)
    return found


@dataclass(frozen=True, slots=True)
class Work:
    """Runs the units that are left, and writes their records."""

    server: Path
    model: Path
    journal: Journal
    deadline: float = math.inf  # monotonic
    options: Sequence[str] = ()  # of the server

    def run(self, units: Sequence[Unit], lanes: int) -> None:
        """Run what is not in the journal; returns early, between two units, at the deadline."""
        done = self.journal.records().keys()
        left = [unit for unit in units if unit.key not in done]
        sessions: queue.SimpleQueue[list[Unit]] = queue.SimpleQueue()
        for _, mine in groupby(left, lambda unit: unit.script.name):
            sessions.put(list(mine))
        with ThreadPoolExecutor(max(1, lanes)) as pool:
            list(pool.map(self._lane, [sessions] * min(lanes, sessions.qsize())))

    def _lane(self, sessions: queue.SimpleQueue[list[Unit]]) -> None:
        """Run session after session on one server."""
        logs = self.journal.path.parent / "quality-logs"
        with stack(self.server, self.model, self.options, logs) as running, suppress(queue.Empty):
            while units := sessions.get_nowait():
                reading = read(running.upstream, units[0].script)
                for unit in units:
                    if time.monotonic() > self.deadline:
                        return
                    record = run(running, unit.script, reading, unit.arm)
                    self.journal.append(unit.key, {"cell": unit.cell, **record})
                    right = sum(probe["right"] for probe in record["probes"])
                    said = f"{unit.key}: {right} of {len(record['probes'])}"
                    print(f"{sessions.qsize()} sessions wait; {said}", file=sys.stderr, flush=True)
