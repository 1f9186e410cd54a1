"""Texts that are written from a few senses."""

from __future__ import annotations

import re

import pytest

from recipes.word_vectors import texts
from recipes.word_vectors.senses import Sense
from recipes.word_vectors.texts import FACTS, QUESTIONS, STATEMENTS, Writer

SENSES = (
    Sense("noun", ("baby", "infant"), "a very young child", ("the baby began to cry",)),
    Sense("noun", ("box",), "a container", ("a wooden box",)),
    Sense("noun", ("Lisbon",), "a city", ()),
    Sense("verb", ("paint",), "apply paint to", ("paint the fence", "She paints all day long")),
    Sense("adj", ("wet",), "covered with water", ("a wet cloth",)),
)


@pytest.fixture
def writer() -> Writer:
    return Writer(SENSES, seed=3)


def test_a_fact_stands_in_its_paragraphs_and_has_questions(writer: Writer) -> None:
    for _ in range(200):
        statement, *questions, first, second = writer.fact()
        assert statement in first and statement in second
        assert questions and all(text[0].isupper() for text in questions)


def test_no_braces_are_left_and_the_files_know_no_other_names(writer: Writer) -> None:
    for text in (*FACTS, *STATEMENTS, *QUESTIONS):
        for name in re.findall(r"\{(\w*)\}", text):
            assert name in writer._values(), text
    made = [text for _ in range(300) for text in writer.fact() + writer.statements()]
    assert not [text for text in made if "{" in text or "}" in text]


def test_paragraphs_are_as_long_as_a_passage(writer: Writer) -> None:
    for _ in range(200):
        statement, *_, first, second = writer.fact()
        assert max(len(first), len(second)) <= max(texts._PARAGRAPH + 6, len(statement))


def test_a_sense_has_its_word_its_meaning_and_its_examples(writer: Writer) -> None:
    seen = {tuple(writer.sense()) for _ in range(60)}
    assert (
        "What is infant?", "baby: a very young child", "a very young child",
        "the baby began to cry",
        "baby: a very young child. the baby began to cry",
        "baby: a very young child. box: a container. a wooden box",
    ) in seen  # fmt: skip
    assert len(seen) == len(SENSES) - 1


def test_words_by_themselves_are_all_but_some_nouns(writer: Writer) -> None:
    made = [text for (text,) in writer.plain(nouns=1)]
    assert {"paint: apply paint to", "She paints all day long", "a wet cloth"} <= set(made)
    assert sum(text.split(":")[0] in ("baby", "box", "Lisbon") for text in made) == 1


def test_the_same_seed_writes_the_same() -> None:
    first, second = Writer(SENSES, 5), Writer(SENSES, 5)
    assert [first.fact() for _ in range(20)] == [second.fact() for _ in range(20)]


@pytest.mark.parametrize(
    ("word", "plural"), [("baby", "babies"), ("box", "boxes"), ("boy", "boys"), ("cat", "cats")]
)
def test_plurals(word: str, plural: str) -> None:
    assert texts._plural(word) == plural
