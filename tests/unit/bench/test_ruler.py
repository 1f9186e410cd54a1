"""The ruler bench: which answers are right, the summary, and finished cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import ruler
from bench.model import facts
from bench.model.tasks import sessions
from bench.quality.journal import Journal
from bench.ruler import right, summarise


def test_an_answer_is_right_only_with_the_exact_value() -> None:
    probe = next(p for s in sessions(3, "codes", 500, 1) for p in s.probes)
    assert right(probe.answer, probe)
    assert not right(probe.answer.replace(probe.fact.value, probe.fact.value[:-1] + "x"), probe)
    assert not right(probe.fact.unknown_answer, probe)
    missing = sessions(3, "unknown", 500, 1)[0].probes[0]
    assert right(missing.answer, missing)
    assert not right(missing.fact.answer, missing)


def test_the_summary_counts_by_task_and_length() -> None:
    row = {"task": "needle", "length": 1000, "right": True, "answer": "a.", "tokens": 10}
    wrong = row | {"right": False, "answer": f"It is {facts.UNKNOWN_VALUE}", "tokens": 12}
    other = row | {"length": 4000}
    summary = summarise([row, wrong, other])
    assert summary["all"]["n"] == 3 and summary["all"]["right"] == 2
    first, second = summary["cells"]
    assert (first["length"], first["n"], first["right"], first["false_unknown"]) == (1000, 2, 1, 1)
    assert first["tokens_max"] == 12
    assert (second["length"], second["share"]) == (4000, 1.0)
    assert 0 < first["interval_95"][0] < 0.5 < first["interval_95"][1] < 1


def test_a_finished_cell_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"right": True, "answer": "a.", "tokens": 10, "expected": "a"}
    monkeypatch.setattr(ruler, "ask", lambda *_: [row])
    Journal(tmp_path / "cells", "one").append("needle 1000", {"rows": [row | {"tokens": 11}]})

    def tokens(identity: str, task: str, length: int) -> list[int]:
        journal = Journal(tmp_path / "cells", identity)
        drawn = sessions(3, task, length, 1)
        return [row["tokens"] for row in ruler.cell(1, journal, drawn, length, 1)]

    assert tokens("one", "needle", 1000) == [11]
    for cell in (("other", "needle", 1000), ("one", "needle", 500), ("one", "codes", 1000)):
        assert tokens(*cell) == [10]
    assert tokens("one", "needle", 1000) == [11] and tokens("one", "codes", 1000) == [10]
