"""The lists: what is held out of the training."""

from __future__ import annotations

from bench.model import vocab

_TRAINED = {
    *vocab.NUMBER_ATTRIBUTES,
    *vocab.PAIR_ATTRIBUTES,
    *vocab.CODE_ATTRIBUTES,
    *vocab.PAIR_PARAPHRASES,
    *vocab.NUMBER_PARAPHRASES,
}


def test_no_unseen_attribute_or_question_is_in_the_training() -> None:
    attributes = {**vocab.UNSEEN_PAIRS, **vocab.UNSEEN_NUMBERS}
    questions = {*attributes.values(), *vocab.NEW_QUESTIONS.values()}
    assert len(attributes) >= 30 and len(vocab.NEW_QUESTIONS) >= 30
    assert not attributes.keys() & _TRAINED
    trained = {*vocab.PAIR_PARAPHRASES.values(), *vocab.NUMBER_PARAPHRASES.values()}
    assert not questions & trained
    assert not questions & {question for question, _ in vocab.SMALL_TALK}
    assert vocab.NEW_QUESTIONS.keys() <= _TRAINED
    assert len(questions) == len(attributes) + len(vocab.NEW_QUESTIONS)


def test_no_question_contains_a_word_of_its_attribute() -> None:
    for attribute, question in {
        **vocab.UNSEEN_PAIRS,
        **vocab.UNSEEN_NUMBERS,
        **vocab.NEW_QUESTIONS,
    }.items():
        words = set(question.lower().rstrip("?").split())
        assert not words & set(attribute.split()) - {"of"}, attribute
