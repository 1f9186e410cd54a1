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
def test_the_growth_bench_plans_and_measures_a_turn(arm: str) -> None:
    row = asyncio.run(growth.measure(arm, 200, 2))
    assert row["sessions"] == (1 if arm == "one" else 2)
    assert row["saved"] >= 140
    assert 0 < row["reading_ms"] < row["own_ms"] and row["bytes_ms"] > 0
    assert row["index_mib"] > 0


def test_growth_exponents_compare_each_size_with_the_next() -> None:
    times = ((2, 1), (3, 2), (4, 20))
    measured = [
        {"arm": "one", "blocks": 10**i, "own_ms": ms, "planning_ms": ms / 2} for i, ms in times
    ]
    summary = growth.summarise(measured)
    assert summary["one_own_exponents"] == summary["one_planning_exponents"] == [0.3, 1.0]
    assert summary["one_1000_ms"] == 2
    assert not growth.reached(measured)
    assert growth.reached(measured[:2])


def test_a_chart_has_a_point_for_every_value() -> None:
    svg = lines.chart("title", "x", "y", {"one": [(1, 10), (100, 1000)]}, log=True)
    assert svg.count("<circle") == 2
    assert lines.chart("title", "x", "y", {}) == ""


def slot_file(path: Path, contents: dict[int, bytes]) -> Path:
    """Writes a slot file as llama.cpp does: one layer, keys and values of two bytes per row."""
    data = struct.pack("<III2i", MAGIC, 3, 2, 7, 8) + struct.pack("<II", 1, len(contents))
    data += b"".join(struct.pack("<iI", at, 1) + struct.pack("<i", 0) for at in contents)
    data += struct.pack("<II", 0, 1)
    for part in (slice(0, 2), slice(2, 4)):
        data += struct.pack("<iQ", 1, 2) + b"".join(row[part] for row in contents.values())
    path.write_bytes(data)
    return path


def test_rows_of_a_slot_file_are_read_by_position(tmp_path: Path) -> None:
    contents = {5: b"kKvV", 3: b"abcd"}
    path = slot_file(tmp_path / "slot", contents)
    assert rows(path) == contents
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="too early"):
        rows(path)


def test_the_witness_counts_rows_that_return_with_other_contents() -> None:
    witness = Witness()
    first = {0: b"a", 1: b"b", 2: b"c"}
    assert witness.look(first, 0, 3) == frozenset()
    witness.look({0: b"a"}, 3, 3)
    assert witness.look(first, 3, 3) == {1, 2}
    assert (witness.n_returned, witness.differ) == (2, 0)
    witness.look({0: b"a", 1: b"B", 4: b"!"}, 5, 5)
    assert (witness.unseen, witness.differ) == (1, 1)
    # Rows that are decoded again may differ.
    witness.look({0: b"x"}, 0, 5)
    assert witness.differ == 1


def test_the_agent_script_reads_each_file_before_it_edits_it() -> None:
    steps = agent.script(1, 30)
    assert steps == agent.script(1, 30)
    read_paths = [step.path for step in steps if step.kind == "read"]
    assert len(read_paths) > len(set(read_paths))
    for at, step in enumerate(steps):
        if step.kind == "edit":
            assert [s for s in steps[:at] if s.kind == "read" and s.path == step.path]


def _tool_call(id: str, name: str, path: str) -> list[dict[str, Any]]:
    """The messages of a tool call and its result."""
    arguments = json.dumps({"filePath": path, "oldString": "a"})
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": "done"},
    ]


def test_the_latest_message_that_read_the_edited_file_is_found() -> None:
    messages = [{"role": "user", "content": "begin"}, *_tool_call("1", "read", "a.py")]
    assert watched.reading_before(messages) is None
    messages += _tool_call("2", "read", "b.py")
    assert watched.reading_before(messages) is None
    messages += _tool_call("3", "edit", "a.py")
    assert watched.reading_before(messages) == 2
    messages += _tool_call("4", "read", "a.py")
    assert watched.reading_before(messages) == 2
    messages += _tool_call("5", "edit", "a.py")
    assert watched.reading_before(messages) == 8
    assert watched.reading_before([*messages, {"role": "user", "content": "and?"}]) is None


def test_the_relay_answers_with_the_scripted_calls_and_then_with_the_model() -> None:
    bodies: list[dict[str, Any]] = []
    model_reply = (
        b'data: {"choices": [{"delta": {"content": "noise"}}], "timings": {"evoke": {"n": 1}}}\n'
    )

    class Model(Quiet):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.body()))
            self.send_response(200)
            self.send_header("Content-Length", str(len(model_reply)))
            self.end_headers()
            self.wfile.write(model_reply)

    timings: list[Any] = []
    with listening(Model) as upstream:
        relay = Relay(upstream, lambda body, each: timings.append(each))
        relay.calls.append(("read", {"filePath": "a.py"}))
        with relayed(relay) as port:
            replies = [_events(port, tools) for tools in ([], ["read"], ["read"])]
    (call,) = replies[1][0]["choices"][0]["delta"]["tool_calls"]
    assert call["function"] == {"name": "read", "arguments": '{"filePath": "a.py"}'}
    assert replies[0] == replies[2] == list(events(iter(model_reply.splitlines())))
    assert timings == [{"evoke": {"n": 1}}] * 2 and len(bodies) == 3 and not relay.faults


def _events(port: int, tools: Sequence[str]) -> list[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", json.dumps({"tools": list(tools)}))
    documents = list(events(connection.getresponse()))
    connection.close()
    return documents


def test_a_cuboid_is_centred_on_the_mean_of_its_keys() -> None:
    keys = np.array([[[0.0, 1.0]], [[4.0, 1.0]], [[1.0, 1.0]], [[9.0, 9.0]]], np.float32)
    (cuboid,) = recall.cuboids(keys, [(0, 3)])
    assert np.allclose(cuboid, [[[2 - 5 / 3, 1.0], [2 + 5 / 3, 1.0]]])


def test_a_long_session_asks_for_every_stated_fact_once() -> None:
    planned = long.sections(long.SEED)
    keys = [section.probe.fact.key for section in planned if section.probe]
    assert len(keys) == len(set(keys)) == long.FACTS
    text = ""
    for section in planned:
        assert section.probe is None or section.probe.fact.statement in text
        text += "" if section.probe else section.said


def test_the_cpu_time_includes_worker_threads() -> None:
    def work() -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    start = cpu_s()
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert cpu_s() - start >= 0.02
