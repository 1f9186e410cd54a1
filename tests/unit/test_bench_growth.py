"""The benches of growth and of agents: what they measure with, on little."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import pytest

from bench import agent, growth, lines, long
from bench.agent_rows import MAGIC, Witness, rows


@pytest.mark.parametrize("way", growth.WAYS)
def test_a_turn_is_planned_and_measured(way: str) -> None:
    row = asyncio.run(growth.measure(way, 200, 2))
    assert row["sessions"] == (1 if way == "one" else 2)
    assert row["saved"] >= 140
    assert 0 < row["reading_ms"] < row["own_ms"]
    assert row["index_mib"] > 0


def test_growth_is_measured_from_each_number_to_the_next() -> None:
    taken = ((2, 1), (3, 2), (4, 20))
    made = [{"way": "one", "blocks": 10**i, "own_ms": ms, "planning_ms": ms / 2} for i, ms in taken]
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
    assert (witness.came_back, witness.differ) == (2, 0)
    witness.look({0: b"a", 1: b"B", 4: b"!"}, 5, 5)
    assert (witness.unseen, witness.differ) == (1, 1)
    # What is decoded again may be anything.
    witness.look({0: b"x"}, 0, 5)
    assert witness.differ == 1


def test_an_agent_reads_before_it_edits_and_again_after() -> None:
    steps = agent.script(1, 30)
    assert steps == agent.script(1, 30)
    known = [step.path for step in steps if step.kind == "read"]
    assert len(known) > len(set(known))
    for at, step in enumerate(steps):
        if step.kind == "edit":
            before = [one for one in steps[:at] if one.kind == "read" and one.path == step.path]
            assert before


def test_a_long_session_asks_for_every_fact_once() -> None:
    planned = long.sections(long.SEED)
    asked = [section.probe.fact.key for section in planned if section.probe]
    assert len(asked) == len(set(asked)) == long.FACTS
    told = ""
    for section in planned:
        assert section.probe is None or section.probe.fact.told in told
        told += "" if section.probe else section.said
