"""Traces: their format, and what the sample is like."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from bench.traces.texts import BLOCK, SHIPPED, Agent, Request, shipped, unpacked
from evoke_proxy.core.prompt.rendered import common_prefix


def _request(ids: list[int], wait_s: float = 1.0, agents: tuple[Agent, ...] = ()) -> Request:
    return Request(wait_s, 70, np.array(ids, np.int64), agents)


def test_a_record_has_what_differs_from_the_request_before() -> None:
    sub = {"id": "one", "tools": 0, "system": 0, "start": 2.5, "requests": [[0.0, 5, 0, [90, 2]]]}
    requests = [[1.0, 70, 0, [1, 3]], [3.5, 71, 2, [9, 2, 4, 1], sub]]
    agent = unpacked({"id": "one", "tools": 128, "system": 64, "start": 0.0, "requests": requests})
    assert [each.ids.tolist() for each in agent.requests] == [[1, 2, 3], [1, 2, 9, 10, 4]]
    last = agent.requests[1]
    assert (last.wait_s, last.n_out, agent.n_tools, agent.n_system) == (3.5, 71, 128, 64)
    (inner,) = last.agents
    assert inner.start_s == 2.5 and inner.requests[0].ids.tolist() == [90, 91]


def statistics_of(conversations: Sequence[Agent]) -> dict[str, float]:
    """Return what conversations are like, each agent alone on a server that forgets nothing.

    A request breaks its history when it lacks more than the last block of the request before it.
    Shares of tokens are of those that are newly decoded: first prompts, appended text, breaks.
    """
    first, appended, broken = list[int](), list[int](), list[int]()
    for agent in (each for conversation in conversations for each in conversation.walk()):
        first += [len(request.ids) * BLOCK for request in agent.requests[:1]]
        for before, request in zip(agent.requests, agent.requests[1:], strict=False):
            kept = common_prefix(before.ids, request.ids)
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


def test_a_break_is_what_does_not_continue_the_request_before() -> None:
    requests = [_request([1, 2, 3, 4]), _request([1, 2, 3, 5, 6]), _request([1, 7, 8])]
    found = statistics_of([Agent("a", 0, 0, requests)])
    assert found["share_breaks"] == pytest.approx(1 / 3)
    assert found["median_break_tokens"] == 2 * 64
    shares = [found[f"{kind}_share"] for kind in ("first", "appended", "break")]
    assert shares == [4 / 8, 2 / 8, 2 / 8]


def test_the_shipped_sample_is_what_its_file_says_and_like_all_traces() -> None:
    with gzip.open(SHIPPED) as file:
        report = json.load(file)
    conversations = shipped()
    assert len(conversations) == 40
    found = statistics_of(conversations)
    assert found == pytest.approx(report["sample"], rel=0.01)
    everything = report["population"]
    assert found["median_peak_tokens"] == pytest.approx(everything["median_peak_tokens"], rel=0.1)
    assert found["break_share"] == pytest.approx(everything["break_share"], abs=0.05)
