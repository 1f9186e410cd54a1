"""Unseen attributes and questions are not in the training of the bundled model."""

from __future__ import annotations

from bench.model import vocab
from bench.model.tasks import estimated_tokens
from bench.quality.sessions import UNSEEN, scripts
from evoke_proxy.demo.runner import recalled

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


def test_a_session_states_every_fact_once_and_asks_for_it_in_both_wordings() -> None:
    for name in UNSEEN:
        questions = set()
        for script in scripts(3, name, 1500, 7):
            text = " ".join(m["content"] for m in script.messages[: -2 * len(script.probes)])
            assert 0.7 * 1500 < estimated_tokens(script.messages) < 1.6 * 1500
            for probe in script.probes:
                assert text.count(probe.fact.statement) == 1
                assert probe.value is not None and recalled(probe.answer, probe.value)
                questions.add(probe.question)
        assert len(questions) >= 30, name
    own, other = (scripts(3, name, 1500, 7) for name in ("new attribute", "new, reworded"))
    assert own[0].probes[0].question != other[0].probes[0].question
