"""Sends budgeted chat turns through the proxy and measures them.

The proxy's own times are read from its log. The time to the first byte is measured by the client,
in pairs, through the proxy and directly: each of the two has its own llama-server with the same
model and template, and the same conversation. Every turn is sent to both; which is first
alternates. Times are from the first written byte of the request to the first byte of the response
body, each on a new connection. The proxy's own times of these turns are in the same row."""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

from bench.llama import Proxy
from bench.model.tasks import exchange
from bench.stats import percentile, spread
from evoke_proxy.demo.client import chat, events
from evoke_proxy.demo.session import SENTENCES, SYSTEM, paragraph, sentence

TURN_GROWTH = 8  # measured turns lengthen a conversation by at most an eighth
_COUNTS = {"evicted_blocks": r"evicted=(\d+)", "recovered_tokens": r"recovered=(\d+)"}
TIMES = ("own", "beside", "after", "render", "block-plan", "cpu", "first_byte")
_LOGGED = re.compile(r"(own|beside|after|render|block-plan|first_byte)_ms=([0-9.]+)")


def question_about(said: Sequence[str], rng: random.Random) -> str:
    """Return a question with six words of one of these texts."""
    words = rng.choice(said).split()
    start = rng.randrange(max(1, len(words) - 6))
    return f"What was that about {' '.join(words[start : start + 6])}"


class Conversation:
    """A chat of small talk; every turn asks about one of many earlier messages."""

    def __init__(self, port: int, seed: int, texts: Iterator[str] | None = None) -> None:
        """Begin a chat; the messages are `texts`, or small talk without them."""
        self._port = port
        self._random = random.Random(seed)
        self._texts = texts
        self._said: list[str] = []
        self.messages = [{"role": "system", "content": SYSTEM}]

    def lengthen(self, n: int) -> None:
        """Add n exchanges that the server has not processed yet."""
        for _ in range(n):
            texts = self._texts
            self._said.append(next(texts) if texts else paragraph(self._random, SENTENCES))
            answer = next(texts) if texts else sentence(self._random)
            self.messages += exchange(self._said[-1], answer)

    def ask(self) -> None:
        """Add a question about an earlier message."""
        asked = question_about(self._said, self._random)
        self.messages.append({"role": "user", "content": asked})

    def turn(self) -> int:
        """One request; how many tokens its prompt had."""
        self.ask()
        body = {"messages": self.messages, "max_tokens": 4, "temperature": 0}
        reply = chat(self._port, body, {})
        self.messages.append({"role": "assistant", "content": reply.text or "Yes."})
        if "evoke" not in reply.timings:
            raise RuntimeError(f"no token counts of the engine: {reply}")
        return int(reply.timings["evoke"]["n_prompt"])


def timed_turn(proxy: Proxy, talk: Conversation) -> dict[str, Any]:
    """One turn of a chat; return its times and counts by the log of the proxy."""
    cpu, n_turns = proxy.cpu_ms(), len(proxy.turns())
    tokens = talk.turn()
    time.sleep(0.02)  # its last line is written when our end of the answer has closed
    line, spent = proxy.turn_after(n_turns, tokens), proxy.cpu_ms() - cpu
    size_of = {"tokens": tokens, "messages": len(talk.messages) - 1}
    return size_of | turn_record(line, spent)


def measure_dialog(proxy: Proxy, texts: Sequence[str], turns: int) -> list[dict[str, Any]]:
    """The last `turns` turns of a chat whose messages are these texts, one record each."""
    talk = Conversation(proxy.port, 1, iter(texts))
    talk.lengthen(len(texts) // 2 - turns)
    talk.turn()
    found = []
    for _ in range(turns):
        talk.lengthen(1)
        found.append(timed_turn(proxy, talk))
    return found


def grow(talk: Conversation, size: int) -> None:
    """Lengthen a conversation to about `size` tokens; the first three exchanges give the scale."""
    talk.lengthen(3)
    first = talk.turn()
    talk.lengthen(max(0, round((size - first) / (first / 3.2))))
    talk.turn()


def turn_record(line: str, cpu_ms: float) -> dict[str, Any]:
    """Parse a log line of the proxy; RuntimeError when the turn was forwarded without a plan."""
    times = {name: float(value) for name, value in _LOGGED.findall(line)}
    counts = {
        name: int(found[1]) if (found := re.search(pattern, line)) else 0
        for name, pattern in _COUNTS.items()
    }
    if "own" not in times or "decision=degraded" in line:
        raise RuntimeError(f"the proxy did not plan this turn: {line}")
    return {**counts, "cpu": cpu_ms, "block-plan": 0.0, "beside": 0.0, **times}


def turn_row(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of the turns, and how far they spread."""
    times = {name: [turn[name] for turn in found] for name in TIMES}
    middle = {
        name: statistics.median(turn[name] for turn in found)
        for name in ("tokens", "messages", *_COUNTS)
    }
    return {
        "turns": len(found),
        **middle,
        **{f"{name}_ms": statistics.median(values) for name, values in times.items()},
        "own_ms_p90": percentile(times["own"], 90),
        "spread": {name: spread(values) for name, values in times.items()},
    }


def budget_of(size: int) -> int:
    """Return the budget of a conversation of this many tokens."""
    return max(256, size // 4)


_PATH = "/v1/chat/completions"


class PairedChat(Conversation):
    """One conversation that two servers hold; its answers are fixed, so that both have the same."""

    def __init__(self, direct: int, through: int, seed: int) -> None:
        super().__init__(through, seed)
        self._ports = {"direct": direct, "through": through}
        self._turns = 0
        self._session = f"pair-{seed}"
        # The milliseconds on each route of the latest turn, and the tokens of its prompt.
        self.latest: dict[str, float] = {}

    def turn(self) -> int:
        """Ask both about an earlier message; return the tokens of the prompt."""
        self.ask()
        body = {"messages": self.messages, "max_tokens": 2, "temperature": 0, "stream": True}
        data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        for route in sorted(self._ports, reverse=bool(self._turns % 2)):
            ms, tokens = _first_byte(self._ports[route], data, self._session)
            self.latest = {**self.latest, route: ms, "tokens": tokens}
        self.messages.append({"role": "assistant", "content": "Yes."})
        self._turns += 1
        return tokens


def _first_byte(port: int, body: bytes, session: str) -> tuple[float, int]:
    headers = {"Content-Type": "application/json", "X-Evoke-Session": session}
    with closing(HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", _PATH, body, headers)
        response = connection.getresponse()
        first = response.read1(1)
        ms = (time.perf_counter() - began) * 1000
        rest = first + response.read()
    if response.status != 200:
        raise RuntimeError(f"{_PATH}: {response.status} {rest[:500]!r}")
    parsed = events(iter(rest.splitlines()))
    tokens = [event["usage"]["prompt_tokens"] for event in parsed if event.get("usage")]
    return ms, int(tokens[-1])


def measure_first_bytes(direct: int, proxy: Proxy, size: int, pairs: int) -> list[dict[str, Any]]:
    """Pairs of turns of conversations whose prompts are about `size` tokens long."""
    found: list[dict[str, Any]] = []
    while len(found) < pairs:
        talk = PairedChat(direct, proxy.port, 1 + len(found))
        grow(talk, size)
        tokens = talk.turn()  # the second that is not counted
        while len(found) < pairs and tokens < size + size // TURN_GROWTH:
            found.append(timed_turn(proxy, talk) | talk.latest)
            tokens = found[-1]["tokens"]
    return found


def first_byte_row(template: str, size: int, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of the pairs, how far their differences spread, and the proxy's own times."""
    direct, through = ([pair[route] for pair in pairs] for route in ("direct", "through"))
    added = [b - a for a, b in zip(direct, through, strict=True)]
    row = {"template": template, "history": size, "budget": budget_of(size), **turn_row(pairs)}
    row |= {"direct_ms": statistics.median(direct), "through_ms": statistics.median(through)}
    row |= {"first_byte_added_ms": statistics.median(added)}
    row |= {f"first_byte_added_ms_p{share}": percentile(added, share) for share in (10, 90)}
    # Of the fastest on each route: what other load on the machine adds is least there.
    row["first_byte_added_ms_fastest"] = min(through) - min(direct)
    row["spread"] |= {"direct": spread(direct), "through": spread(through)}
    return row
