"""Evidence in real conversations is found as often as recorded, and the bench counts correctly."""

from __future__ import annotations

import pytest

from bench import evidence
from bench.evidence import Conversation, Question


def test_the_default_finds_as_much_evidence_as_recorded() -> None:
    """A guard, not a bar: what is recorded is what the code did, and is recorded again when it
    gets better (`python -m bench.evidence --out bench/results/evidence.json`)."""
    with evidence.world(context=16384) as world:
        rows = evidence.quick(world)
    assert all(row["whole"] for row in rows if row["arm"] == "none")
    assert evidence.worse_than_recorded(rows) == []


def test_every_question_of_the_data_has_evidence_in_its_conversation() -> None:
    talks = evidence.conversations()
    assert sum(len(talk.questions) for talk in talks) > 200
    for talk in talks:
        for question in talk.questions:
            assert question.evidence and question.text
            assert all(0 <= index < len(talk.texts) for index in question.evidence)
    assert (evidence.DATA / "LICENSE").read_text("utf-8").count("Apache License") > 1


def test_rows_of_a_span_are_counted_over_ranges_with_holes() -> None:
    resident = [(0, 10), (20, 30), (40, 50)]
    assert evidence.share_resident((0, 10), resident) == 1.0
    assert evidence.share_resident((5, 25), resident) == 0.5
    assert evidence.share_resident((30, 40), resident) == 0.0
    assert evidence.found([1.0, 0.5]) == {"whole": False, "half": True}
    assert evidence.found([1.0, 0.4]) == {"whole": False, "half": False}


def test_a_fill_takes_whole_messages_while_they_fit() -> None:
    sizes = {0: 50, 1: 60, 2: 30, 3: 20}
    assert evidence.fill([1, 0, 2, 3], sizes, 100) == {1, 2}
    assert evidence.fill([0, 1, 2, 3], sizes, 100) == {0, 2, 3}
    assert evidence.fill([1], sizes, 10) == set()


def test_bm25_ranks_rare_words_first_and_the_newest_of_equals() -> None:
    texts = ["the red fox", "the geranium hides the key", "the red fox", "a dog"]
    assert evidence.bm25(texts, "Where is the geranium?")[0] == 1
    assert evidence.bm25(texts, "a red fox")[:2] == [2, 0]
    assert evidence.bm25(texts, "nothing of it") == [3, 2, 1, 0]


def test_a_paired_difference_is_that_of_the_same_questions() -> None:
    def row(talk: str, question: str, arm: str, whole: bool) -> dict[str, object]:
        return {"conversation": talk, "question": question, "arm": arm, "whole": whole}

    rows = [
        *(row("a", str(n), "default", n < 3) for n in range(4)),
        *(row("a", str(n), "bm25", n < 1) for n in range(4)),
        *(row("b", str(n), "default", True) for n in range(4)),
        *(row("b", str(n), "bm25", n < 2) for n in range(4)),
    ]
    assert evidence.paired_difference(rows, "default", "bm25") == pytest.approx(
        {"points": 50.0, "low": 50.0, "high": 50.0}
    )


def test_a_question_is_sent_behind_the_turns_before_it() -> None:
    question = Question("q", "And now?", (0,), (("user", "Hi"), ("agent", "Hello")))
    talk = Conversation("t", ("One.", "Two."), (question,))
    sent = [*talk.messages, *question.messages]
    assert [m["role"] for m in sent] == ["user", "assistant"] * 3 + ["user"]
    assert sent[2]["content"] == "Two." and sent[-1]["content"] == "And now?"
