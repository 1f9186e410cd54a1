"""Stemming: forms of one word have one stem."""

from __future__ import annotations

import pytest

from evoke_proxy.core.retrieval.stemming import stem


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("research researched researches researching", "research"),
        ("study studies studied", "studi"),
        ("hop hops hopping hopped", "hop"),
        ("caress caresses", "caress"),
        ("adopt adopted adoption adopting", "adopt"),
        ("relate relates relational", "relat"),
        ("motor motoring", "motor"),
        ("adjust adjustment adjustable", "adjust"),
        ("decide decided decision decisions", "decid"),
        ("complain complained complaint complaints", "complain"),
        ("allergy allergies allergic", "allerg"),
        ("biology biological", "biolog"),
    ],
)
def test_forms_of_a_word_share_a_stem(words: str, expected: str) -> None:
    assert {stem(word) for word in words.split()} == {expected}


@pytest.mark.parametrize("word", ["", "is", "a1b2s", "src/configs", "fünfes", "s" * 41, "sky"])
def test_a_short_or_unusual_word_is_its_own_stem(word: str) -> None:
    assert stem(word) == word


@pytest.mark.parametrize(
    "words", ["policy police", "battery batter", "plain complain", "paint pain", "plus plud"]
)
def test_words_that_only_look_alike_have_different_stems(words: str) -> None:
    assert len({stem(word) for word in words.split()}) == 2
