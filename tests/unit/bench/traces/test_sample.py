"""Traces: both formats, and what the sample is like."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from bench.traces.sample import (
    SHIPPED,
    Agent,
    Request,
    packed,
    read_original,
    shipped,
    statistics_of,
    unpacked,
)


def _request(ids: list[int], wait_s: float = 1.0, agents: tuple[Agent, ...] = ()) -> Request:
    return Request(wait_s, 70, np.array(ids, np.int64), agents)


def _same(one: Agent, other: Agent) -> bool:
    if (one.id, one.n_tools, one.n_system) != (other.id, other.n_tools, other.n_system):
        return False
    pairs = list(zip(one.requests, other.requests, strict=True))
    return all(
        (a.wait_s, a.n_out, a.ids.tolist()) == (b.wait_s, b.n_out, b.ids.tolist())
        and all(map(_same, a.agents, b.agents))
        and len(a.agents) == len(b.agents)
        for a, b in pairs
    )


def test_packing_keeps_everything() -> None:
    sub = Agent("one", 64, 0, (_request([90, 91]), _request([90, 91, 93])), 2.5)
    requests = (_request([1, 2, 3, 7]), _request([1, 2, 9, 10, 4]), _request([5], 3.5, (sub,)))
    agent = Agent("one", 128, 64, requests)
    back = unpacked(json.loads(json.dumps(packed(agent))))
    assert _same(agent, back)
    assert next(iter(back.requests[2].agents)).start_s == 2.5


def test_the_original_format_has_times_relative_to_replies(tmp_path: Path) -> None:
    def entry(at: float, think: float, ids: list[int]) -> dict[str, object]:
        common = {"type": "n", "out": 5, "api_time": 2.0}
        return {"t": at, "think_time": think, "hash_ids": ids, **common}

    agent = {"t": 40.0, "type": "subagent", "duration_ms": 30_000, "tool_tokens": 64}
    agent |= {"system_tokens": 0, "requests": [entry(0.0, 0.0, [9])]}
    requests = [entry(0.0, 0.0, [1]), agent, entry(45.0, 43.0, [1, 2])]
    trace = {"id": "t", "tool_tokens": 0, "system_tokens": 0, "requests": requests}
    path = tmp_path / "trace_1.json"
    path.write_text(json.dumps(trace), encoding="utf-8")
    found = read_original(path)
    sub = next(iter(found.requests[1].agents))
    # The first reply came at 2 s, the sub-agent ran from 10 to 40 s, the request came at 45 s.
    assert (sub.start_s, found.requests[1].wait_s) == (8.0, 5.0)


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
