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


def test_files_of_tests_may_follow_an_option() -> None:
    parse = MATRIX["_parser"]().parse_known_intermixed_args
    args, options = parse(["cuda", "--jobs", "3", "a.py", "b.py", "-k", "one"])
    assert (args.target, args.jobs, args.rest) == ("cuda", 3, ["a.py", "b.py"])
    assert options == ["-k", "one"]


def test_the_closing_line_is_the_last_that_is_not_empty() -> None:
    run = MATRIX["FinishedRun"]("tests", 0, ("first", "2 passed, 0 failed", " ", ""))
    assert run.closing == "2 passed, 0 failed"
    assert MATRIX["FinishedRun"]("tests", 0, ()).closing == ""


def test_the_total_adds_what_each_run_says() -> None:
    total = MATRIX["total"]
    assert total(["9 passed, 0 failed", "7 passed, 2 failed, 1 skipped"]) == (
        "16 passed, 2 failed, 1 skipped"
    )
    assert total(["68 objects compiled"]) == "68 objects compiled"


def test_a_run_of_some_files_keeps_the_results_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, run = MATRIX["_record"], MATRIX["FinishedRun"]
    monkeypatch.setitem(record.__globals__, "RESULTS", tmp_path)
    record("vulkan", "make a", [run("a.py", 1, ("FAILED a", "1 passed, 1 failed"))])
    both = record("vulkan", "make b", [run("b.py", 0, ("3 passed, 0 failed",))])
    assert (both["exit_status"], both["result"]) == (1, "4 passed, 1 failed")
    mended = record("vulkan", "make a", [run("a.py", 0, ("2 passed, 0 failed",))])
    assert (mended["exit_status"], mended["result"]) == (0, "5 passed, 0 failed")
    assert json.loads((tmp_path / "vulkan.json").read_text("utf-8")) == mended
    path = tmp_path / "vulkan.json"
    path.write_text(path.read_text("utf-8").replace(mended["series"], "of other C++ code"))
    later = record("vulkan", "make b", [run("b.py", 0, ("3 passed, 0 failed",))])
    assert list(later["runs"]) == ["b.py"]


@pytest.mark.parametrize("path", sorted((TESTS / "results").glob("*.json")), ids=lambda p: p.stem)
def test_a_recorded_result_names_its_target_and_its_command(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["target"] == path.stem in MATRIX["TARGETS"]
    assert record["command"].startswith(f"make test-matrix TARGET={path.stem}")
