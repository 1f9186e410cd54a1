"""Measures the time to the first byte of a chat turn, through the proxy and directly, in pairs.

Each of the two has its own llama-server with the same model and template, and the same
conversation. Every turn is sent to both; which is first alternates. The proxy has a budget, so that
blocks move. Times are measured by the client, from the first written byte of the request to the
first byte of the response body, each on a new connection."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.chat_turns import TURN_GROWTH, Conversation, budget_of, grow
from bench.stats import percentile, spread
from evoke_proxy.demo.client import events

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
        body = json.dumps(
            {
                "messages": self.messages,
                "max_tokens": 2,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for route in sorted(self._ports, reverse=bool(self._turns % 2)):
            ms, tokens = _first_byte(self._ports[route], body, self._session)
            self.latest = {**self.latest, route: ms, "tokens": tokens}
        self.messages.append({"role": "assistant", "content": "Yes."})
        self._turns += 1
        return tokens


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
        grow(talk, size)
        tokens = talk.turn()  # the second that is not counted
        while len(found) < pairs and tokens < size + size // TURN_GROWTH:
            tokens = talk.turn()
            found.append(talk.latest)
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
