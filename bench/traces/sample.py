"""Reads conversations of coding agents, which are hashes of 64-token blocks, and describes them.

Two formats are read: the traces of `callanjfox/kv-cache-tester`, one JSON file each, and the
compact file in bench/data, which `bench.traces.convert` makes of a sample of them."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


def read(folder: Path) -> list[Agent]:
    """Return the conversations of a folder with original files, in the order of their names."""
    return [read_original(path) for path in sorted(folder.glob("trace_*.json"))]


def read_original(path: Path) -> Agent:
    """Return the conversation of one original file."""
    trace = json.loads(path.read_bytes())
    return _agent(trace["id"], trace, 0.0)


def _agent(name: str, trace: Mapping[str, Any], start_s: float) -> Agent:
    requests: list[Request] = []
    agents: list[Agent] = []
    replied, agents_end = 0.0, 0.0
    for item in trace["requests"]:
        at = float(item["t"])
        if item["type"] == "subagent":
            began = at - _duration_s(item)  # `t` is when its last reply came
            agents.append(_agent(name, item, max(0.0, began - replied)))
            agents_end = max(agents_end, at)
            continue
        wait_s = float(item.get("think_time") or 0.0)
        if agents:
            wait_s = max(0.0, wait_s - max(0.0, agents_end - replied))
        ids = np.array(item["hash_ids"], np.int64)
        if len(ids):
            requests.append(Request(wait_s, int(item["out"]), ids, tuple(agents)))
            agents = []
        replied = at + float(item.get("api_time") or 0.0)
    return Agent(name, int(trace["tool_tokens"]), int(trace["system_tokens"]), requests, start_s)


def _duration_s(agent: Mapping[str, Any]) -> float:
    """Seconds from the first request of a sub-agent to its last reply."""
    if agent["duration_ms"] is not None:
        return float(agent["duration_ms"]) / 1000
    last = agent["requests"][-1]
    return float(last["t"]) + float(last.get("api_time") or 0.0)


def packed(agent: Agent) -> dict[str, Any]:
    """Return an agent as JSON: of each request what differs from the one before, as runs."""
    requests: list[Any] = []
    before = np.zeros(0, np.int64)
    for request in agent.requests:
        kept = common(before, request.ids)
        rest = request.ids[kept:]
        starts = np.flatnonzero(np.diff(rest, prepend=rest[:1] - 2) != 1)
        lengths = np.diff(np.append(starts, len(rest)))
        runs = [int(n) for pair in zip(rest[starts], lengths, strict=True) for n in pair]
        agents = [packed(each) for each in request.agents]
        requests.append([round(request.wait_s, 1), request.n_out, kept, runs, *agents])
        before = request.ids
    head = {"id": agent.id, "tools": agent.n_tools, "system": agent.n_system}
    return {**head, "start": round(agent.start_s, 1), "requests": requests}


def unpacked(value: Mapping[str, Any]) -> Agent:
    """Return the agent of `packed`."""
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


@dataclass(slots=True)
class _Sums:
    n_requests: int = 0
    n_breaks: int = 0
    first: int = 0
    appended: int = 0
    broken: int = 0
    costs: list[int] = field(default_factory=list)


def statistics_of(conversations: Sequence[Agent]) -> dict[str, float]:
    """Return what conversations are like, each agent alone on a server that forgets nothing.

    A request breaks its history when it lacks more than the last block of the request before it.
    Shares of tokens are of those that are newly decoded: first prompts, appended text, breaks.
    """
    sums = _Sums()
    for conversation in conversations:
        for agent in conversation.walk():
            _add(sums, agent)
    total = max(1, sums.first + sums.appended + sums.broken)
    peaks = [max(len(r.ids) for r in each.requests) * BLOCK for each in conversations]
    with_agents = [any(r.agents for r in each.requests) for each in conversations]
    waits = [r.wait_s for each in conversations for r in each.requests[1:]]
    return {
        "conversations": len(conversations),
        "requests": sums.n_requests,
        "median_peak_tokens": statistics.median(peaks),
        "largest_peak_tokens": max(peaks),
        "share_with_agents": sum(with_agents) / len(with_agents),
        "share_breaks": sums.n_breaks / sums.n_requests,
        "median_break_tokens": statistics.median(sums.costs) if sums.costs else 0,
        "new_tokens": total,
        "first_share": sums.first / total,
        "appended_share": sums.appended / total,
        "break_share": sums.broken / total,
        "median_wait_s": statistics.median(waits) if waits else 0.0,
    }


def _add(sums: _Sums, agent: Agent) -> None:
    before: Ids | None = None
    for request in agent.requests:
        sums.n_requests += 1
        if before is None:
            sums.first += len(request.ids) * BLOCK
        else:
            kept = common(before, request.ids)
            n_new = (len(request.ids) - kept) * BLOCK
            if kept >= len(before) - 1:
                sums.appended += n_new
            else:
                sums.n_breaks += 1
                sums.broken += n_new
                sums.costs.append(n_new)
        before = request.ids
