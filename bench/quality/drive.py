"""Runs one session under one arm: sends every turn through the proxy and records its counts.

Each turn resends the whole history with the scripted answers, so that the history is the same in
every arm. Questions follow one another in the session, each after the expected answers to the
earlier ones: a wrong answer cannot affect a later one, but later questions find resident what
earlier ones recovered."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from bench.quality.plan import Arm
from bench.quality.sessions import Script, right
from bench.quality.stack import Range, Reading, Stack
from evoke_proxy.core.model.blocks import Span, clipped, count, merged
from evoke_proxy.demo.client import Reply, Turn, chat, read_turn

ANSWER_TOKENS = 40
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
    for number, end in enumerate(script.turns):
        probing = number >= first_probe
        body = {
            "messages": list(script.messages[:end]),
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS if probing else 1,
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
        "again": _redecoded_tokens(turns),
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
    evicted = [(item[0], item[1]) for item in usage.get("auto_evicted", ())]
    return merged(Span(int(a), int(b)) for a, b in [*stack.resident(), *evicted])


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


def _redecoded_tokens(turns: Sequence[Turn]) -> int:
    """Tokens decoded that an earlier turn's prompt had already."""
    pairs = zip(turns, turns[1:], strict=False)
    return sum(max(0, now.decoded - max(0, now.prompt - before.prompt)) for before, now in pairs)


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
