"""Texts that are written from a few senses."""

from __future__ import annotations

import re

import pytest

from recipes.word_vectors import texts
from recipes.word_vectors.senses import Sense
from recipes.word_vectors.texts import FACTS, QUESTIONS, STATEMENTS, Writer

SENSES = (
    Sense("noun", ("baby", "infant"), "a very young child", ("the baby began to cry", "the baby")),
    Sense("noun", ("box", "case"), "a container", ("a wooden box", "a box is heavy")),
    Sense("noun", ("Lisbon",), "a city", ()),
    Sense("verb", ("paint",), "apply paint to", ("Paint the fence!", "Does she paint all day?")),
    Sense("adj", ("wet",), "covered with water", ("a wet cloth", "the floor is wet")),
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


def test_paragraphs_are_no_longer_than_a_passage(writer: Writer) -> None:
    for _ in range(200):
        statement, *_, first, second = writer.fact()
        assert max(len(first), len(second)) <= max(texts._PARAGRAPH + 6, len(statement))


def test_a_sense_has_its_word_its_meaning_and_its_examples(writer: Writer) -> None:
    seen = {tuple(writer.sense()) for _ in range(60)}
    assert (
        "What is Lisbon?", "Lisbon: a city", "a city",
        "Lisbon: a city. paint: apply paint to. Paint the fence!. Does she paint all day?",
    ) in seen  # fmt: skip
    assert len(seen) == len(SENSES) - 1


def test_no_group_has_a_text_twice(writer: Writer) -> None:
    for _ in range(100):
        for group in (writer.fact(), writer.sense()):
            assert len(group) == len(set(group))


def test_phrases_fit_into_a_sentence(writer: Writer) -> None:
    """A thing ends with a noun, what is done has no mark at the end, a sentence has one."""
    assert writer._things == ["the baby", "a wooden box", "a wet cloth"]
    assert writer._acts == ["paint the fence"]
    assert writer._sentences == ["Does she paint all day?"]


def test_a_vowel_has_its_article() -> None:
    assert texts._sentence("is it a {noun}?", {"noun": "oven"}) == "Is it an oven?"
    assert texts._sentence("a {noun}, a box", {"noun": "ark"}) == "An ark, a box"


def test_words_by_themselves_are_of_a_share_of_the_senses(writer: Writer) -> None:
    everything = sorted(text for (text,) in writer.plain(1))
    assert everything == sorted(
        text for s in SENSES for text in (f"{s.words[0]}: {s.definition}", *s.examples)
    )
    assert (
        len(
            {text for (text,) in writer.plain(0.4)}
            & {f"{s.words[0]}: {s.definition}" for s in SENSES}
        )
        == 2
    )


def test_the_same_seed_writes_the_same() -> None:
    first, second = Writer(SENSES, 5), Writer(SENSES, 5)
    assert [first.fact() for _ in range(20)] == [second.fact() for _ in range(20)]


@pytest.mark.parametrize(
    ("word", "plural"),
    [
        ("baby", "babies"),
        ("box", "boxes"),
        ("boy", "boys"),
        ("cat", "cats"),
        ("series", "series"),
        ("glass", "glasses"),
        ("child", "children"),
        ("alderman", "aldermen"),
    ],
)
def test_plurals(word: str, plural: str) -> None:
    assert texts._plural(word) == plural
