"""The benches of growth and of agents: what they measure with, on little."""

from __future__ import annotations

import asyncio
import http.client
import json
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import agent, growth, lines, long, recall, watched
from bench.agent_rows import MAGIC, Witness, rows
from bench.growth_server import cpu_s
from bench.listening import Quiet, listening
from bench.scripted import Relay, relayed
from evoke_proxy.demo.client import events


@pytest.mark.parametrize("arm", growth.ARMS)
def test_a_turn_is_planned_and_measured(arm: str) -> None:
    row = asyncio.run(growth.measure(arm, 200, 2))
    assert row["sessions"] == (1 if arm == "one" else 2)
    assert row["saved"] >= 140
    assert 0 < row["reading_ms"] < row["own_ms"] and row["bytes_ms"] > 0
    assert row["index_mib"] > 0


def test_growth_is_measured_from_each_number_to_the_next() -> None:
    taken = ((2, 1), (3, 2), (4, 20))
    made = [{"arm": "one", "blocks": 10**i, "own_ms": ms, "planning_ms": ms / 2} for i, ms in taken]
    summary = growth.summarise(made)
    assert summary["one_own_exponents"] == summary["one_planning_exponents"] == [0.3, 1.0]
    assert summary["one_1000_ms"] == 2
    assert not growth.reached(made)
    assert growth.reached(made[:2])


def test_a_line_has_a_point_for_every_value() -> None:
    drawn = lines.chart("title", "x", "y", {"one": [(1, 10), (100, 1000)]}, log=True)
    assert drawn.count("<circle") == 2
    assert lines.chart("title", "x", "y", {}) == ""


def slot_file(path: Path, held: dict[int, bytes]) -> Path:
    """As llama.cpp writes one: one layer, keys and values of two bytes each."""
    data = struct.pack("<III2i", MAGIC, 3, 2, 7, 8) + struct.pack("<II", 1, len(held))
    data += b"".join(struct.pack("<iI", at, 1) + struct.pack("<i", 0) for at in held)
    data += struct.pack("<II", 0, 1)
    for part in (slice(0, 2), slice(2, 4)):
        data += struct.pack("<iQ", 1, 2) + b"".join(row[part] for row in held.values())
    path.write_bytes(data)
    return path


def test_rows_are_read_by_position(tmp_path: Path) -> None:
    held = {5: b"kKvV", 3: b"abcd"}
    path = slot_file(tmp_path / "slot", held)
    assert rows(path) == held
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="too early"):
        rows(path)


def test_a_row_that_came_back_otherwise_is_seen() -> None:
    witness = Witness()
    first = {0: b"a", 1: b"b", 2: b"c"}
    assert witness.look(first, 0, 3) == frozenset()
    witness.look({0: b"a"}, 3, 3)
    assert witness.look(first, 3, 3) == {1, 2}
    assert (witness.n_returned, witness.differ) == (2, 0)
    witness.look({0: b"a", 1: b"B", 4: b"!"}, 5, 5)
    assert (witness.unseen, witness.differ) == (1, 1)
    # What is decoded again may be anything.
    witness.look({0: b"x"}, 0, 5)
    assert witness.differ == 1


def test_an_agent_reads_before_it_edits_and_again_after() -> None:
    steps = agent.script(1, 30)
    assert steps == agent.script(1, 30)
    probe_of = [step.path for step in steps if step.kind == "read"]
    assert len(probe_of) > len(set(probe_of))
    for at, step in enumerate(steps):
        if step.kind == "edit":
            before = [one for one in steps[:at] if one.kind == "read" and one.path == step.path]
            assert before


def _called(id: str, name: str, path: str) -> list[dict[str, Any]]:
    """A call and its result."""
    arguments = json.dumps({"filePath": path, "oldString": "a"})
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": "done"},
    ]


def test_which_message_showed_a_file_before() -> None:
    messages = [{"role": "user", "content": "begin"}, *_called("1", "read", "a.py")]
    assert watched.reading_before(messages) is None
    messages += _called("2", "read", "b.py")
    assert watched.reading_before(messages) is None
    messages += _called("3", "edit", "a.py")
    assert watched.reading_before(messages) == 2
    messages += _called("4", "read", "a.py")
    assert watched.reading_before(messages) == 2
    messages += _called("5", "edit", "a.py")
    assert watched.reading_before(messages) == 8
    assert watched.reading_before([*messages, {"role": "user", "content": "and?"}]) is None


def test_an_agent_gets_the_scripts_calls_for_answers_and_then_the_models_own() -> None:
    asked: list[dict[str, Any]] = []
    own = b'data: {"choices": [{"delta": {"content": "noise"}}], "timings": {"evoke": {"n": 1}}}\n'

    class Front(Quiet):
        def do_POST(self) -> None:
            asked.append(json.loads(self.body()))
            self.send_response(200)
            self.send_header("Content-Length", str(len(own)))
            self.end_headers()
            self.wfile.write(own)

    seen: list[Any] = []
    with listening(Front) as front:
        relay = Relay(front, lambda body, timings: seen.append(timings))
        relay.calls.append(("read", {"filePath": "a.py"}))
        with relayed(relay) as port:
            replies = [_events(port, tools) for tools in ([], ["read"], ["read"])]
    (called,) = replies[1][0]["choices"][0]["delta"]["tool_calls"]
    assert called["function"] == {"name": "read", "arguments": '{"filePath": "a.py"}'}
    assert replies[0] == replies[2] == list(events(iter(own.splitlines())))
    assert seen == [{"evoke": {"n": 1}}] * 2 and len(asked) == 3 and not relay.faults


def _events(port: int, tools: Sequence[str]) -> list[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", json.dumps({"tools": list(tools)}))
    found = list(events(connection.getresponse()))
    connection.close()
    return found


def test_a_cuboid_is_within_the_bounds_and_around_their_middle() -> None:
    keys = np.array([[[0.0, 1.0]], [[4.0, 1.0]], [[1.0, 1.0]], [[9.0, 9.0]]], np.float32)
    (drawn,) = recall.cuboids(keys, [(0, 3)])
    assert np.allclose(drawn, [[[2 - 5 / 3, 1.0], [2 + 5 / 3, 1.0]]])


def test_a_long_session_asks_for_every_fact_once() -> None:
    planned = long.sections(long.SEED)
    asked = [section.probe.fact.key for section in planned if section.probe]
    assert len(asked) == len(set(asked)) == long.FACTS
    text = ""
    for section in planned:
        assert section.probe is None or section.probe.fact.statement in text
        text += "" if section.probe else section.said


def test_the_clock_counts_worker_threads() -> None:
    def work() -> None:
        ends = time.thread_time() + 0.02
        while time.thread_time() < ends:
            pass

    began = cpu_s()
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert cpu_s() - began >= 0.02
