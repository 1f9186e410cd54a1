"""bench.coding: which words count, when they are present, and what misses its bars."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench import coding
from bench.coding import Session, with_notes

CALL = {"function": {"name": "Read", "arguments": '{"file_path": "src/parse_queue.py"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Where is the limit of open_requests?"},
    {"role": "assistant", "content": "I read it.", "tool_calls": [CALL]},
    {"role": "tool", "content": "MAX_WAITING = 4096\n" + "filler text\n" * 40},
    {"role": "assistant", "content": "MAX_WAITING limits open_requests, not other_things: 4096."},
]


def test_a_note_of_a_changed_file_follows_every_second_result() -> None:
    steps = [*MESSAGES[:3], MESSAGES[1], MESSAGES[2], MESSAGES[2], MESSAGES[3]]
    noted = list(with_notes(steps))
    assert [one for one in noted if one in steps] == steps
    (at,) = (i for i, one in enumerate(noted) if one not in steps)
    assert at == 6 and noted[at]["role"] == "user" and "MAX_WAITING" in noted[at]["content"]


def test_words_of_an_answer_count_that_earlier_messages_have() -> None:
    session = Session(MESSAGES)
    assert session.answers == [2, 4]
    assert list(session.repeated(4)) == ["MAX_WAITING", "open_requests", "4096"]
    assert not session.repeated(2), "parse_queue was not there before"


def test_a_word_is_present_when_all_tokens_of_a_place_are() -> None:
    session = Session(MESSAGES)
    whole = [(0, session.starts[4])]
    assert session.present(4, whole) == [True, True, True]
    assert session.present(4, [(0, session.starts[3])]) == [False, True, False]
    _, first, last = session.repeated(4)["MAX_WAITING"][0]
    assert session.present(4, [(first, last)])[0]
    assert not session.present(4, [(first, last - 1)])[0]


def test_runs_of_six_words_count_that_earlier_messages_have() -> None:
    copied = {"role": "assistant", "content": "Where, is the 'limit' of open_requests? Is it?"}
    session = Session([*MESSAGES, copied])
    run = "Where is the limit of open_requests"
    assert list(session.repeated(5, of_runs=True)) == [run]
    assert session.present(5, [(0, session.starts[2])], of_runs=True) == [True]
    assert session.present(5, [(0, session.starts[2] - 4)], of_runs=True) == [False]
    assert not coding.runs("five words are too few")
    often = Session([*[MESSAGES[0]] * 4, *MESSAGES[1:], copied])
    assert "open_requests" not in often.repeated(8)
    assert list(often.repeated(8, of_runs=True)) == [run], "however many messages have it"


def test_a_fill_has_the_question_and_the_results_first() -> None:
    session = Session([*MESSAGES, MESSAGES[0], MESSAGES[1], MESSAGES[2], MESSAGES[3]])
    found = dict(session.fills(8, 10_000))
    assert set(found) == set(coding.FILLS)
    drawn = found.pop("random")
    assert len(drawn) > 4 and max(end for _, end in drawn) == session.starts[8]
    for resident in found.values():
        assert sorted(resident)[0][0] == 0 and sum(b - a for a, b in resident) == session.starts[8]
    small = dict(session.fills(8, 60))
    assert all(sum(b - a for a, b in resident) <= 60 for resident in small.values())


def row(arm: str, whole: bool, conversation: int) -> dict[str, Any]:
    return {
        "split": "tuning", "share": 4, "arm": arm, "conversation": str(conversation),
        "question": 1, "words": 2, "present": 2 if whole else 1, "whole": whole,
        "runs": 5, "copied": 4 if whole else 3,
    }  # fmt: skip


@pytest.mark.parametrize("is_worse", [False, True])
def test_less_than_without_the_ranking_misses_the_bars(is_worse: bool) -> None:
    rows = [row("default", not is_worse, i) for i in range(9)]
    rows += [row("no recall", True, i) for i in range(9)]
    report = coding.report(argparse.Namespace(), rows)
    assert bool(report.missed) is is_worse
    assert any("runs" in one for one in report.missed) is is_worse
    (cell,) = (one for one in report.summary["cells"] if one["arm"] == "no recall")
    assert (cell["words"], cell["whole"], cell["runs"], cell["turns"]) == (100.0, 100.0, 80.0, 9)


def test_a_turn_without_rare_words_counts_for_runs_alone() -> None:
    without = row("default", True, 1) | {"words": 0, "present": 0, "copied": 1}
    report = coding.report(argparse.Namespace(), [row("default", False, 0), without])
    (cell,) = report.summary["cells"]
    assert (cell["turns"], cell["n_words"], cell["words"], cell["whole"]) == (1, 2, 50.0, 0.0)
    assert (cell["n_runs"], cell["runs"]) == (10, 40.0)


def test_the_sessions_are_of_two_splits_and_end_with_an_answer() -> None:
    found = coding.sessions()
    assert {one["split"] for one in found} == {"tuning", "reporting"}
    for one in found:
        assert one["messages"][-1]["role"] == "assistant"
        named = {call["id"] for m in one["messages"] for call in m.get("tool_calls", ())}
        results = {m["tool_call_id"] for m in one["messages"] if m["role"] == "tool"}
        assert results <= named
