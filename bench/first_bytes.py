"""Measures the time to the first byte of a chat turn, through the proxy and directly, in pairs.

Each of the two has its own llama-server with the same model and template, and the same
conversation. Every turn is sent to both; which is first alternates. The proxy has a budget, so that
blocks move. Times are measured by the client, from the first written byte of the request to the
first byte of the response body, each on a new connection."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.chat_turns import budget_of
from bench.stats import percentile, spread
from evoke_proxy.demo.client import events
from evoke_proxy.demo.session import SENTENCES, paragraph, sentence

_PATH = "/v1/chat/completions"
_WARM_UP = 2
# Measured turns lengthen a conversation by at most this fraction (the divisor).
_GROWTH = 8
Message = dict[str, str]


class PairedChat:
    """One conversation that two servers hold; its answers are fixed, so that both have the same."""

    def __init__(self, direct: int, through: int, seed: int) -> None:
        self._ports = {"direct": direct, "through": through}
        self._random = random.Random(seed)
        self._said: list[str] = []
        self._turns = 0
        self._session = f"pair-{seed}"
        self.messages: list[Message] = [
            {"role": "system", "content": "You are a small assistant. Be brief."}
        ]

    def lengthen(self, n: int) -> None:
        """Add n exchanges that the servers have not processed yet."""
        for _ in range(n):
            self._said.append(paragraph(self._random, SENTENCES))
            self.messages.append({"role": "user", "content": self._said[-1]})
            self.messages.append({"role": "assistant", "content": sentence(self._random)})

    def turn(self) -> dict[str, float]:
        """Ask both about an earlier message; return the ms of each and the prompt's tokens."""
        words = self._random.choice(self._said).split()
        start = self._random.randrange(len(words) - 6)
        asked = f"What was that about {' '.join(words[start : start + 6])}"
        self.messages.append({"role": "user", "content": asked})
        body = json.dumps(
            {
                "messages": self.messages,
                "max_tokens": 2,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        found: dict[str, float] = {}
        for route in sorted(self._ports, reverse=bool(self._turns % 2)):
            ms, tokens = _first_byte(self._ports[route], body, self._session)
            found |= {route: ms, "tokens": tokens}
        self.messages.append({"role": "assistant", "content": "Yes."})
        self._turns += 1
        return found


def _first_byte(port: int, body: bytes, session: str) -> tuple[float, int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json", "X-Evoke-Session": session}
    try:
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", _PATH, body, headers)
        response = connection.getresponse()
        first = response.read1(1)
        ms = (time.perf_counter() - began) * 1000
        rest = first + response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"{_PATH}: {response.status} {rest[:500]!r}")
    parsed = events(iter(rest.splitlines()))
    tokens = [event["usage"]["prompt_tokens"] for event in parsed if event.get("usage")]
    return ms, int(tokens[-1])


def measure(direct: int, through: int, size: int, pairs: int) -> list[dict[str, float]]:
    """Pairs of turns of conversations whose prompts are about `size` tokens long."""
    found: list[dict[str, float]] = []
    seed = 1
    while len(found) < pairs:
        talk = PairedChat(direct, through, seed + len(found))
        talk.lengthen(3)
        first = talk.turn()["tokens"]
        talk.lengthen(max(0, round((size - first) / (first / 3.2))))
        for _ in range(_WARM_UP):
            tokens = talk.turn()["tokens"]
        while len(found) < pairs and tokens < size + size // _GROWTH:
            found.append(talk.turn())
            tokens = found[-1]["tokens"]
    return found


def row(template: str, size: int, pairs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians of the pairs, and how far their differences spread."""
    added = [pair["through"] - pair["direct"] for pair in pairs]
    return {
        "template": template,
        "history": size,
        "budget": budget_of(size),
        "pairs": len(pairs),
        "tokens": statistics.median(pair["tokens"] for pair in pairs),
        "direct_ms": statistics.median(pair["direct"] for pair in pairs),
        "through_ms": statistics.median(pair["through"] for pair in pairs),
        "first_byte_added_ms": statistics.median(added),
        "first_byte_added_ms_p10": percentile(added, 10),
        "first_byte_added_ms_p90": percentile(added, 90),
        # Of the fastest on each route: what other load on the machine adds is least there.
        "first_byte_added_ms_fastest": min(pair["through"] for pair in pairs)
        - min(pair["direct"] for pair in pairs),
        "spread": {
            route: spread([pair[route] for pair in pairs]) for route in ("direct", "through")
        },
    }
