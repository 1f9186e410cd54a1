"""The overhead bench: its summaries and its dialogs."""

from __future__ import annotations

from typing import Any

from bench import overhead
from bench.chat_turns import first_byte_row, turn_record
from bench.overhead import summarise

LINE = (
    "2026-01-01 INFO evoke_proxy.request id=1 POST /v1/chat/completions 200 decision=evoke:moved"
    " session=a slot=0 evicted=51+2 prompt=31735 decoded=60 recovered=2672 resident_before=5000"
    " omitted=24003 peak=8190 own_ms=12.20 after_ms=0.15 render_ms=92.40 queue_ms=0.04"
    " block-plan_ms=11.60 first_byte_ms=280 ms=301"
)


def turn(own: float) -> dict[str, Any]:
    record = {**turn_record(LINE, 2.0), "own": own, "tokens": 1000, "messages": 9}
    return {**record, "direct": 10.0, "through": 10.0 + own}


def test_the_summary_has_the_worst_model_of_each_length() -> None:
    relay = [{"request": "a", "added_ms": 0.4}, {"request": "b", "added_ms": 0.7}]
    rows = [
        first_byte_row("bundled", 32768, [turn(3.0)]),
        first_byte_row("qwen3.5", 32768, [turn(4.0)]),
        first_byte_row("bundled", 1024, [turn(1.0)]),
    ]
    summary = summarise([*relay, *rows])
    assert summary["passthrough_added_ms_p50"] == 0.7
    assert summary["own_ms_32k_p50"] == 4.0 and summary["own_ms_1k_p50"] == 1.0
    assert summary["render_ms_32k_p50"] == 92.4 and summary["plan_ms_1k_p50"] == 11.6


def test_a_dialog_has_its_messages_and_about_its_tokens() -> None:
    for tokens, messages in overhead.DIALOGS:
        texts = overhead.dialog_texts(tokens, messages)
        assert len(texts) == messages
        characters = sum(map(len, texts))
        assert 0.9 * tokens < characters / 4.75 + 5 * messages < 1.1 * tokens


def test_dialogs_have_figures_of_their_own() -> None:
    row = {"template": "dialog", "history": 14_000, "own_ms": 5.0, "own_ms_p90": 9.0}
    summary = overhead.summarise([row, first_byte_row("bundled", 1024, [turn(2.0)])])
    assert (summary["dialog_own_ms_p50"], summary["dialog_own_ms_p90"]) == (5.0, 9.0)
    assert summary["own_ms_1k_p50"] == 2.0 and "own_ms_13k_p50" not in summary


def test_the_time_to_the_first_byte_has_a_bar_at_each_length() -> None:
    rows = [first_byte_row("bundled", size, [turn(9.0)]) for size in (1024, 8192, 32768)]
    assert overhead.report(overhead.BENCH.parse([]), rows).missed == [
        "first_byte_added_ms_8k_p50 at most 8"
    ]
