"""A streaming client of the chat API, which reads text, token counts and times of an answer."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.reply.event_stream import EventReader

TIMEOUT_S = 120.0
_SLOT_TIMEOUT_S = 10.0
_MAX_EVENT_BYTES = 32 << 20


class DemoError(Exception):
    """The demo cannot continue; the message says what failed and where to look."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer.

    Attributes:
        text: The answer, without white space around it.
        timings: The last `timings` object of the stream; empty when there was none.
        headers: The response headers, names in lower case.
        ttft_ms: Milliseconds from sending the request to the first text.
    """

    text: str
    timings: Mapping[str, Any]
    headers: Mapping[str, str]
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Token accounting of one request.

    Attributes:
        number: Position in the session, from 1.
        prompt: Tokens of the prompt.
        decoded: Prompt tokens that were decoded.
        recovered: Prompt tokens copied back into the cache.
        resident_before: Prompt tokens that were in the cache already.
        omitted: Prompt tokens left out of the cache.
        resident_peak: Most tokens in the cache during the turn.
        resident_end: Tokens in the cache after the answer.
        evicted: Tokens evicted during the turn, by the plan or by the server.
        evictions: Blocks evicted during the turn.
        recoveries: Blocks recovered during the turn.
        ttft_ms: Milliseconds until the first text, measured at the client.
        answer: Text of the answer.
        from_engine: Whether the reply had token accounting (`timings.evoke`). Otherwise the counts
            come from stock timings, which do not report omitted, recovered and evicted tokens.
        resident: Ranges [start, end) of tokens in the cache after the answer; None when the server
            did not report them.
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
    """One session under one policy.

    Attributes:
        arm: The policy.
        expected: The planted value.
        recalled: Whether the last answer is that value.
        turns: The turns in order; never empty.
        wall_s: Seconds that the session took.
    """

    arm: str
    expected: str
    recalled: bool
    turns: tuple[Turn, ...]
    wall_s: float

    @property
    def answer(self) -> str:
        """The answer to the last question."""
        return self.turns[-1].answer

    @property
    def peak_resident(self) -> int:
        """Most tokens in the cache at any time, prefill and generation included."""
        return max(turn.resident_peak for turn in self.turns)

    @property
    def evictions(self) -> int:
        """Number of evicted blocks."""
        return sum(turn.evictions for turn in self.turns)

    @property
    def recoveries(self) -> int:
        """Number of recovered blocks."""
        return sum(turn.recoveries for turn in self.turns)


def chat(port: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
    """Send one streaming chat request to 127.0.0.1 and return the complete answer.

    Raises DemoError when the connection fails or the answer is not 200.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    started = time.perf_counter()
    try:
        payload = json.dumps({**body, "stream": True}).encode()
        sent = {"Content-Type": "application/json", **headers}
        connection.request("POST", "/v1/chat/completions", payload, sent)
        return _read(connection.getresponse(), started)
    except (OSError, http.client.HTTPException) as error:
        raise DemoError(f"the request to port {port} failed: {error!r}") from error
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, started: float) -> Reply:
    if response.status != 200:
        raise DemoError(f"the request got {response.status}: {response.read(2000).decode()}")
    headers = {name.lower(): value for name, value in response.getheaders()}
    text, first = "", None
    timings: dict[str, Any] = {}
    for event in events(response):
        if "error" in event:
            raise DemoError(f"the stream broke off: {event['error']}")
        delta = content(event)
        if delta and first is None:
            first = time.perf_counter()
        text += delta
        timings = event.get("timings", timings)
    # An empty answer has no first token: count the time until its end.
    elapsed = (first if first is not None else time.perf_counter()) - started
    return Reply(text.strip(), timings, headers, round(elapsed * 1000, 2))


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an event stream, without comments and `[DONE]`."""
    reader = EventReader(_MAX_EVENT_BYTES)
    for line in lines:
        yield from _objects(reader.feed(line.rstrip(b"\r\n") + b"\n"))
    yield from _objects(reader.close())


def _objects(found: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    return (json.loads(data) for data in found if data.startswith(b"{"))


def content(event: Mapping[str, Any]) -> str:
    """Return the piece of the answer in an event, "" when it contains none."""
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


_TIMEOUT_S = 10.0

Ranges = list[list[int]]


def read_turn(number: int, reply: Reply) -> Turn:
    """Return the accounting of a turn, from `timings.evoke` if the reply has it.

    Otherwise the counts come from the stock timings.
    """
    accounting = reply.timings.get("evoke")
    if not isinstance(accounting, dict):
        return _stock_turn(number, reply)
    auto_evicted = [span[1] - span[0] for span in accounting.get("auto_evicted", [])]
    planned = read_count(reply.headers.get("x-evoke-evicted", ""))
    loaded = read_count(reply.headers.get("x-evoke-recovered", ""))
    return Turn(
        number=number,
        prompt=int(accounting["n_prompt"]),
        decoded=int(accounting["decoded"]),
        recovered=int(accounting["recovered"]),
        resident_before=int(accounting["resident_before"]),
        omitted=int(accounting["omitted"]),
        resident_peak=int(accounting["n_resident_peak"]),
        resident_end=int(accounting["n_resident"]),
        evicted=planned["tokens"] + sum(auto_evicted),
        evictions=planned["blocks"] + len(auto_evicted),
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


def resident_now(port: int) -> list[list[int]] | None:
    """Return the ranges [start, end) of tokens in slot 0; None when the server does not report
    them.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SLOT_TIMEOUT_S)
    try:
        connection.request("GET", "/slots/0/blocks")
        response = connection.getresponse()
        answer = json.loads(response.read()) if response.status == 200 else {}
        resident = answer.get("resident") if isinstance(answer, dict) else None
        return (
            [[int(start), int(end)] for start, end in resident]
            if isinstance(resident, list)
            else None
        )
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return None
    finally:
        connection.close()
