"""Figures that documents quote are those of the files in `bench/results`, which are all listed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench/results"
FIGURES = tomllib.loads((RESULTS / "published.toml").read_text("utf-8"))["figure"]


@cache
def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def found(path: Sequence[Any]) -> Any:
    """Return the value at a path of `published.toml`."""
    if path[0] in ("least", "most"):
        return (min if path[0] == "least" else max)(matching(path[1:]))
    return matching(path)[0]


def matching(path: Sequence[Any]) -> list[Any]:
    """Return all values at a path."""
    values = [result(path[0])]
    for key in path[1:]:
        if isinstance(key, Mapping):
            values = [row for value in values for row in value if has(row, key)]
        elif isinstance(key, list):
            values = [value[each] for value in values for each in key if each in value]
        elif isinstance(key, float):
            values = [value * key for value in values]
        else:
            values = [value[key] for value in values]
    return values


def has(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(
        row.get(key) in (value if isinstance(value, list) else [value])
        for key, value in wanted.items()
    )


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure["text"][:40])
def test_a_quoted_figure_is_that_of_its_file(figure: Mapping[str, Any]) -> None:
    text = figure["text"].format(*map(found, figure["values"]))
    for page in figure["pages"]:
        assert text in " ".join((ROOT / page).read_text("utf-8").split()), page


def test_every_file_of_results_is_listed_with_commit_machine_and_model() -> None:
    lines = (RESULTS / "README.md").read_text("utf-8").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| [")]
    listed = [row[0].split("](")[1].rstrip(") ") for row in rows]
    files = [str(path.relative_to(RESULTS)) for path in sorted(RESULTS.rglob("*.json"))]
    assert sorted(listed) == sorted(files)
    assert all(cell.strip() for row in rows for cell in row)
