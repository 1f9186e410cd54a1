"""Reads conversations of coding agents, which are hashes of 64-token blocks, and describes them."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 64
SHIPPED = Path(__file__).parents[1] / "data" / "agent_traces.json.gz"
# A request that decodes more tokens than this which were decoded before is a miss.
MISS_TOKENS = 1000

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of an agent.

    Attributes:
        wait_s: Seconds from the reply before it, or from the end of its sub-agents, to the request.
        n_out: Tokens of its reply.
        ids: Hashes of the whole 64-token blocks of its prompt. Equal hashes within a conversation
            mean that everything up to the end of the block is equal.
        agents: Sub-agents that run at the same time, before the request is sent.
    """

    wait_s: float
    n_out: int
    ids: Ids
    agents: Sequence[Agent] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Agent:
    """A conversation, or a sub-agent of one.

    Attributes:
        id: The name of the conversation; sub-agents have that of theirs.
        n_tools: Tokens of its tool schemas, with which each prompt begins.
        n_system: Tokens of its system prompt, which follows them.
        requests: Its requests in order.
        start_s: Of a sub-agent: seconds from the reply before it to its first request.
    """

    id: str
    n_tools: int
    n_system: int
    requests: Sequence[Request]
    start_s: float = 0.0

    def walk(self) -> Iterator[Agent]:
        """Yield the agent and its sub-agents."""
        yield self
        for request in self.requests:
            for agent in request.agents:
                yield from agent.walk()


def common(one: Ids, other: Ids) -> int:
    """Return the length of the common prefix of two lists of hashes."""
    n = min(len(one), len(other))
    differs = one[:n] != other[:n]
    return int(differs.argmax()) if differs.any() else n


def unpacked(value: Mapping[str, Any]) -> Agent:
    """Return the agent of a record: each request is what differs from the one before, as runs."""
    requests: list[Request] = []
    before = np.zeros(0, np.int64)
    for wait_s, n_out, kept, runs, *agents in value["requests"]:
        pairs = zip(runs[::2], runs[1::2], strict=True)
        parts = [np.arange(start, start + n, dtype=np.int64) for start, n in pairs]
        before = np.concatenate([before[:kept], *parts])
        requests.append(Request(wait_s, n_out, before, tuple(map(unpacked, agents))))
    return Agent(value["id"], value["tools"], value["system"], requests, value["start"])


def shipped(path: Path = SHIPPED) -> list[Agent]:
    """Return the conversations of the compact file."""
    with gzip.open(path) as file:
        return [unpacked(each) for each in json.load(file)["conversations"]]


def statistics_of(conversations: Sequence[Agent]) -> dict[str, float]:
    """Return what conversations are like, each agent alone on a server that forgets nothing.

    A request breaks its history when it lacks more than the last block of the request before it.
    Shares of tokens are of those that are newly decoded: first prompts, appended text, breaks.
    """
    first, appended, broken = list[int](), list[int](), list[int]()
    for agent in (each for conversation in conversations for each in conversation.walk()):
        first += [len(request.ids) * BLOCK for request in agent.requests[:1]]
        for before, request in zip(agent.requests, agent.requests[1:], strict=False):
            kept = common(before.ids, request.ids)
            continues = kept >= len(before.ids) - 1
            (appended if continues else broken).append((len(request.ids) - kept) * BLOCK)
    total = max(1, sum(first) + sum(appended) + sum(broken))
    n_requests = len(first) + len(appended) + len(broken)
    peaks = [max(len(r.ids) for r in each.requests) * BLOCK for each in conversations]
    with_agents = [any(r.agents for r in each.requests) for each in conversations]
    waits = [r.wait_s for each in conversations for r in each.requests[1:]]
    return {
        "conversations": len(conversations),
        "requests": n_requests,
        "median_peak_tokens": statistics.median(peaks),
        "largest_peak_tokens": max(peaks),
        "share_with_agents": sum(with_agents) / len(with_agents),
        "share_breaks": len(broken) / n_requests,
        "median_break_tokens": statistics.median(broken) if broken else 0,
        "new_tokens": total,
        "first_share": sum(first) / total,
        "appended_share": sum(appended) / total,
        "break_share": sum(broken) / total,
        "median_wait_s": statistics.median(waits) if waits else 0.0,
    }
