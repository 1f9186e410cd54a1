"""The results of `make test-matrix` name the command that repeats them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
MATRIX = runpy.run_path(str(TESTS / "matrix.py"))


@pytest.mark.parametrize(
    ("chosen", "command"),
    [
        ([], "make test-matrix TARGET=pins"),
        (["--no-alone"], "make test-matrix TARGET=pins ARGS=--no-alone"),
        (["a.py", "-k", "x y"], "make test-matrix TARGET=pins ARGS='a.py -k '\"'\"'x y'\"'\"''"),
    ],
)
def test_the_command_has_the_chosen_tests_and_options(chosen: list[str], command: str) -> None:
    assert MATRIX["make_command"]("pins", chosen) == command


def test_the_closing_line_is_the_last_that_is_not_empty() -> None:
    run = MATRIX["FinishedRun"]("a command", 0, ("first", "2 passed, 0 failed", " ", ""))
    assert run.closing == "2 passed, 0 failed"
    assert MATRIX["FinishedRun"]("a command", 0, ()).closing == ""


@pytest.mark.parametrize("path", sorted((TESTS / "results").glob("*.json")), ids=lambda p: p.stem)
def test_a_recorded_result_names_its_target_and_its_command(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["target"] == path.stem in MATRIX["TARGETS"]
    assert record["command"].startswith(f"make test-matrix TARGET={path.stem}")
