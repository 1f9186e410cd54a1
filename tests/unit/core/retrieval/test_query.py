"""A question, its clauses, and what of the turns before belongs to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.retrieval.query import Query, query_of, split_clauses


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Where do I live and what is PORT in config.env?",
         ["Where do I live?", "what is PORT in config.env?"]),
        ("What are the ports of api, db and cache?",
         ["What are the ports of api?", "What are the ports of db?",
          "What are the ports of cache?"]),
        ("I like salt and pepper.", ["I like salt and pepper."]),
        ("Read config.env. Then run it.", ["Read config.env.", "Then run it."]),
        ("...", []),
    ],
)  # fmt: skip
def test_clauses(text: str, parts: list[str]) -> None:
    assert split_clauses(text) == parts


def test_of_many_sentences_those_that_ask_are_taken() -> None:
    told = " ".join(f"Fact number {i} is told." for i in range(30))
    found = split_clauses(f"What is first? {told}")
    assert len(found) == 16 and found[0] == "What is first?" and "29" in found[-1]


@given(st.text(max_size=9000))
def test_parts_are_few_and_short_for_any_text(text: str) -> None:
    question = Query.of(text)
    assert len(question.clauses) <= 17
    assert all(len(clause) <= 2 * 256 + 2 for clause in question.clauses)


def request(*said: tuple[str, str]) -> Query:
    messages = [{"role": role, "content": text} for role, text in said]
    return query_of(parse_chat("chat", {"messages": messages}))


def test_few_words_lean_on_the_turn_before() -> None:
    first = ("user", "What is the code of the Oslo vault, please?")
    question = request(first, ("assistant", "48213"), ("user", "And Rome?"))
    assert question.text == "And Rome?"
    assert any("Oslo" in clause for clause in question.clauses)
    long = request(first, ("assistant", "48213"), ("user", "What is the code of the Rome vault?"))
    assert not any("Oslo" in clause for clause in long.clauses)


def test_when_only_tools_have_spoken_the_user_is_still_heard() -> None:
    question = request(
        ("user", "Find the Oslo code for me now."), ("assistant", ""), ("tool", "nothing here")
    )
    assert question.clauses[0] == "nothing here" and "Oslo" in question.clauses[-1]


def test_a_topic_needs_every_part() -> None:
    east = np.array([1.0, 0.0], np.float32)
    question = Query("a. b.", ("a.", "b."))
    assert question.topic is None
    assert question.embedded([east, None]).topic is None
    assert question.embedded([east, east]).topic == pytest.approx(east)
