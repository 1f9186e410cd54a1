"""Facts about attributes of no list: frames, near misses, changes, and what is held out."""

from __future__ import annotations

import random

from bench.model import general, vocab

_HELD_OUT = {*vocab.UNSEEN_PAIRS, *vocab.UNSEEN_NUMBERS}


def test_a_statement_has_the_key_and_the_value_and_a_question_the_attribute() -> None:
    rng = random.Random(1)
    for _ in range(500):
        fact = general.draw(rng)
        attribute = fact.parts[0].lower()
        assert attribute in fact.statement.lower() and attribute in fact.question.lower()
        assert fact.value in fact.statement
        assert fact.answer.removesuffix(".").endswith(f" {fact.value}")
        assert fact.unknown_answer.startswith(fact.answer.removesuffix(f"{fact.value}."))


def test_attributes_come_from_a_space_that_no_list_could_hold() -> None:
    rng = random.Random(2)
    assert len({general.name(rng) for _ in range(2000)}) > 1900


def test_no_attribute_is_reserved_or_has_a_word_that_only_those_have() -> None:
    rng = random.Random(3)
    for held_out in ("boat", "old boat", "shoe number", "phone number", "year of birth"):
        assert general.is_reserved(held_out), held_out
    assert not general.is_reserved("favorite number") and not general.is_reserved("velkan size")
    for _ in range(5000):
        fact = general.draw(rng)
        near = general.near_miss(rng, fact)
        for attribute in (fact.parts[0], near.parts[0]):
            assert attribute not in _HELD_OUT
            assert not {"boat", "dentist", "shoe", "tax", "pulse"} & set(attribute.split())


def test_a_near_miss_is_another_attribute_that_often_shares_a_word() -> None:
    rng, shared = random.Random(4), 0
    for _ in range(300):
        fact = general.draw(rng)
        near = general.near_miss(rng, fact)
        shared += bool(set(fact.parts[0].split()) & set(near.parts[0].split()))
    assert shared > 150


def test_a_change_keeps_the_key_and_brings_another_value() -> None:
    rng = random.Random(5)
    for _ in range(100):
        fact = general.draw(rng)
        new = general.update(rng, fact)
        assert (new.key, new.type, new.updated) == (fact.key, fact.type, True)
        assert new.value != fact.value and new.value in new.statement


def test_a_question_of_no_form_is_one_of_unseen() -> None:
    held_out = {
        *vocab.UNSEEN_PAIRS.values(),
        *vocab.UNSEEN_NUMBERS.values(),
        *vocab.NEW_QUESTIONS.values(),
    }
    rng = random.Random(6)
    drawn = {general.draw(rng).question for _ in range(5000)}
    assert not drawn & held_out
    assert not {f"What is my {attribute}?" for attribute in _HELD_OUT} & drawn
    assert not _HELD_OUT & {*vocab.PAIR_ATTRIBUTES, *vocab.NUMBER_ATTRIBUTES}
