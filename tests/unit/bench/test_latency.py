"""The latency bench: bars and summaries for blocks of any size."""

from __future__ import annotations

from typing import Any

import pytest

from bench import latency

_ARGS = latency.PARTS["memcpy"].parse([])


def _row(cells: str, tokens: int, **shares: float) -> dict[str, Any]:
    speeds = {"save_vs_memcpy": 1.0, "load_vs_memcpy": 1.0}
    return {"fa": "on", "cells": cells, "tokens": tokens, "bar": None, **speeds, **shares}


def test_sizes_without_a_block_of_64_runs_or_of_one_run_are_reported() -> None:
    eight = _row("8 runs", 160, save_vs_one_run=0.9, load_vs_one_run=0.7)
    rows = [_row("contiguous", 160), eight, _row(latency.FOUR_CLIENTS, 64)]
    report = latency.of_memcpy(_ARGS, rows)
    assert report.summary["worst_of_one_run"] == {"fa_on_8_runs": 0.7} and not report.missed


@pytest.mark.parametrize("cells", ["64 runs", latency.FOUR_CLIENTS])
def test_a_block_in_many_runs_has_a_bar(cells: str) -> None:
    slow = _row(cells, 64, save_vs_one_run=0.9, load_vs_one_run=0.4)
    assert latency.of_memcpy(_ARGS, [slow]).missed == [f"64 tokens, {cells}, -fa on"]


def test_the_summary_names_the_size_that_was_measured() -> None:
    args = latency.PARTS["decoding"].parse(["--sizes", "20", "160"])
    names = ("load_vs_reprefill", "save_load_vs_reprefill", "save_over_load")
    rows = [{"tokens": size, **dict.fromkeys(names, float(size))} for size in (20, 160)]
    summary = latency.of_decoding(args, rows).summary
    assert summary["load_vs_reprefill_160"] == 160 and "load_vs_reprefill_1280" not in summary
