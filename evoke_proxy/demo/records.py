"""What one turn and one arm of the demo left behind: the books, the answer, the times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: its books in tokens as the engine reported them, `ttft_ms` as the client saw it.

    `evicted` counts tokens that left during the turn, by the plan or by the engine's stream.
    `from_engine` is False when the reply had no `timings.evoke`: the books are then what stock
    timings can say, and nothing is known about omitted or recovered tokens. `resident` are the
    ranges in the cache after the answer, None when nobody said.
    """

    number: int
    prompt: int
    decoded: int
    recovered: int
    resident_before: int
    omitted: int
    resident_peak: int
    resident_end: int
    evicted: int
    evictions: int
    recoveries: int
    ttft_ms: float
    answer: str
    from_engine: bool
    resident: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One session under one policy."""

    arm: str
    expected: str
    recalled: bool
    turns: tuple[Turn, ...]
    wall_s: float

    @property
    def answer(self) -> str:
        """What was said to the last turn's question."""
        return self.turns[-1].answer

    @property
    def peak_resident(self) -> int:
        """The most tokens the cache held at any time, prefill and generation included."""
        return max(turn.resident_peak for turn in self.turns)

    @property
    def evictions(self) -> int:
        """How many blocks left the cache."""
        return sum(turn.evictions for turn in self.turns)

    @property
    def recoveries(self) -> int:
        """How many blocks came back."""
        return sum(turn.recoveries for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer: the text, the last `timings` seen, the response headers."""

    text: str
    timings: Mapping[str, Any]
    headers: Mapping[str, str]
    ttft_ms: float


def read_turn(number: int, reply: Reply) -> Turn:
    """Return the turn's books. Without `timings.evoke` they are taken from the stock timings."""
    books = reply.timings.get("evoke")
    if not isinstance(books, dict):
        return _stock_turn(number, reply)
    auto = [span[1] - span[0] for span in books.get("auto_evicted", [])]
    planned = read_count(reply.headers.get("x-evoke-evicted", ""))
    loaded = read_count(reply.headers.get("x-evoke-recovered", ""))
    return Turn(
        number=number,
        prompt=int(books["n_prompt"]),
        decoded=int(books["decoded"]),
        recovered=int(books["recovered"]),
        resident_before=int(books["resident_before"]),
        omitted=int(books["omitted"]),
        resident_peak=int(books["n_resident_peak"]),
        resident_end=int(books["n_resident"]),
        evicted=planned["tokens"] + sum(auto),
        evictions=planned["blocks"] + len(auto),
        recoveries=loaded["blocks"],
        ttft_ms=reply.ttft_ms,
        answer=reply.text,
        from_engine=True,
    )


def _stock_turn(number: int, reply: Reply) -> Turn:
    decoded = int(reply.timings.get("prompt_n", 0))
    cached = int(reply.timings.get("cache_n", 0))
    # The last token of an answer is sampled, never decoded: it takes no cell.
    end = decoded + cached + max(0, int(reply.timings.get("predicted_n", 0)) - 1)
    return Turn(
        number=number,
        prompt=decoded + cached,
        decoded=decoded,
        recovered=0,
        resident_before=cached,
        omitted=0,
        resident_peak=end,
        resident_end=end,
        evicted=0,
        evictions=0,
        recoveries=0,
        ttft_ms=reply.ttft_ms,
        answer=reply.text,
        from_engine=False,
    )


def read_count(header: str) -> dict[str, int]:
    """Return `blocks` and `tokens` of a header such as `blocks=3;tokens=180`, 0 where absent."""
    counts = {"blocks": 0, "tokens": 0}
    for part in header.split(";"):
        key, _, value = part.strip().partition("=")
        if key in counts and value.isdigit():
            counts[key] = int(value)
    return counts
