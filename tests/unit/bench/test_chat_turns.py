"""Turns of the overhead bench: times from log lines, and rows."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from bench.chat_turns import (
    Conversation,
    budget_of,
    first_byte_row,
    timed_turn,
    turn_record,
    turn_row,
)
from bench.llama import Proxy
from bench.overhead import summarise

LINE = (
    "2026-01-01 INFO evoke_proxy.request id=1 POST /v1/chat/completions 200 decision=evoke:moved"
    " session=a slot=0 evicted=51+2 prompt=31735 decoded=60 recovered=2672 resident_before=5000"
    " omitted=24003 peak=8190 own_ms=12.20 after_ms=0.15 render_ms=92.40 queue_ms=0.04"
    " block-plan_ms=11.60 first_byte_ms=280 ms=301"
)


def test_the_times_of_a_turn_are_read_from_its_log_line() -> None:
    times = turn_record(LINE, 20.3)
    assert (times["own"], times["after"], times["render"]) == (12.2, 0.15, 92.4)
    assert (times["block-plan"], times["first_byte"], times["cpu"]) == (11.6, 280.0, 20.3)
    assert (times["evicted_blocks"], times["recovered_tokens"]) == (51, 2672)


def test_a_turn_without_a_block_call_has_a_block_plan_time_of_0() -> None:
    assert turn_record(LINE.replace("block-plan_ms=11.60", ""), 1.0)["block-plan"] == 0.0


@pytest.mark.parametrize("line", [LINE.replace("evoke:moved", "degraded:render"), "200 ms=3"])
def test_a_log_line_of_a_turn_that_was_not_planned_is_an_error(line: str) -> None:
    with pytest.raises(RuntimeError, match="did not plan"):
        turn_record(line, 1.0)


def test_the_line_of_a_turn_is_awaited_and_not_that_of_the_turn_before(tmp_path: Path) -> None:
    log = tmp_path / "proxy.log"
    late = LINE.replace("prompt=31735", "prompt=31000").replace("own_ms=12.20", "own_ms=99.00")
    log.write_text(f"{late}\n")

    class Talk(Conversation):
        def turn(self) -> int:
            threading.Timer(0.2, lambda: log.write_text(f"{late}\n{late}\n{LINE}\n")).start()
            return 31735

    proxy = Proxy(0, log, os.getpid())
    assert timed_turn(proxy, Talk(0, 1))["own"] == 12.2


def turn(own: float) -> dict[str, Any]:
    return {**turn_record(LINE, 2.0), "own": own, "tokens": 1000, "messages": 9}


def test_a_row_has_the_median_of_its_turns() -> None:
    row = turn_row([turn(1.0), turn(9.0), turn(2.0)])
    assert row["own_ms"] == 2.0 and row["spread"]["own"] == {"median": 2.0, "min": 1.0, "max": 9.0}
    assert row["turns"] == 3


def pair(direct: float, through: float) -> dict[str, Any]:
    return {**turn(2.0), "direct": direct, "through": through}


def test_the_added_time_to_the_first_byte_is_the_median_over_pairs() -> None:
    row = first_byte_row("bundled", 1024, [pair(10, 15), pair(50, 56), pair(30, 33)])
    assert row["first_byte_added_ms"] == 5 and row["direct_ms"] == 30 and row["through_ms"] == 33
    assert row["first_byte_added_ms_p10"] == 3 and row["first_byte_added_ms_p90"] == 6
    assert row["first_byte_added_ms_fastest"] == 5 and row["budget"] == budget_of(1024) == 256
    assert row["own_ms"] == 2.0 and row["spread"]["own"]["max"] == 2.0
    worse = first_byte_row("qwen3.5", 1024, [pair(10, 19)])
    assert summarise([row, worse])["first_byte_added_ms_1k_p50"] == 9
