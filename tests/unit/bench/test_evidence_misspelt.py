"""Typing errors in the questions of `bench.evidence`."""

from __future__ import annotations

from bench.evidence.conversations import misspelt, with_errors
from bench.presence import Asked, Talk
from evoke_proxy.core.retrieval.fuzzy import is_misspelt

QUESTION = "Which manager approved the second invoice?"


def test_an_error_changes_one_word_that_carries_meaning_and_not_its_first_letter() -> None:
    for ending in ("", " Really?", " Please."):
        before, after = (QUESTION + ending).split(), misspelt(QUESTION + ending, 1).split()
        changed = [
            (a.strip("?."), b.strip("?.")) for a, b in zip(before, after, strict=True) if a != b
        ]
        assert all(is_misspelt(b, a) and a != "Which" for a, b in changed)
        assert len(changed) <= 1  # a letter may be replaced by itself


def test_errors_depend_on_the_text_alone() -> None:
    assert misspelt(QUESTION, 2) == misspelt(QUESTION, 2) != QUESTION
    assert misspelt("Who is it?", 2) == "Who is it?"


def test_only_the_question_has_errors() -> None:
    before = {"role": "assistant", "content": QUESTION}
    asked = Asked("q", [before, {"role": "user", "content": QUESTION}], [0])
    talk = with_errors(Talk([before], [asked], [], [0], {}), 2)
    assert talk.messages == [before]
    assert talk.asked[0].turn[0] == before
    assert talk.asked[0].turn[1] == {"role": "user", "content": misspelt(QUESTION, 2)}
