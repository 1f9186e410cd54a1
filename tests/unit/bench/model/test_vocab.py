"""The lists: questions in other words, and what is held out of the training."""

from __future__ import annotations

import re

from bench.model import vocab
from bench.model.vocab import WORDINGS

_TRAINED = {
    *vocab.NUMBER_ATTRIBUTES,
    *vocab.PAIR_ATTRIBUTES,
    *vocab.CODE_ATTRIBUTES,
    *vocab.PAIR_PARAPHRASES,
    *vocab.NUMBER_PARAPHRASES,
}
_HELD_OUT = (
    *vocab.UNSEEN_PAIRS.values(),
    *vocab.UNSEEN_NUMBERS.values(),
    *vocab.NEW_QUESTIONS.values(),
)
_FUNCTION_WORDS = set(
    "what who whom whose which where when how why is are am was were do does did have has had can "
    "must may should would will my mine me i you your we us our he she it its they them the a an "
    "of to in on at for from with by and or that this be been up out off over under as".split()
)


def _content(question: str) -> frozenset[str]:
    return frozenset(re.findall("[a-z]+", question.lower())) - _FUNCTION_WORDS


def test_every_attribute_of_the_training_has_questions_and_no_other_has() -> None:
    assert WORDINGS.keys() == _TRAINED
    for attribute, questions in WORDINGS.items():
        assert len(questions) >= 3, attribute
        assert len(set(questions)) == len(questions), attribute


def test_a_question_belongs_to_one_attribute() -> None:
    asked = [question for questions in WORDINGS.values() for question in questions]
    trained = [*vocab.PAIR_PARAPHRASES.values(), *vocab.NUMBER_PARAPHRASES.values()]
    assert len({*asked, *trained}) == len(asked) + len(trained)


def test_no_question_is_reserved_or_has_the_content_words_of_one_that_is() -> None:
    held_out = {_content(question): question for question in _HELD_OUT if _content(question)}
    for questions in WORDINGS.values():
        for question in questions:
            assert question not in _HELD_OUT
            content = _content(question)
            assert content not in held_out, (question, held_out.get(content))
            close = [
                held for words, held in held_out.items() if len(words) > 1 and words <= content
            ]
            assert not close, (question, close)


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
