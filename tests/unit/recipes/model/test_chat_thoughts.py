"""Training chats whose answers begin with a thought."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.model.facts import Fact
from recipes.model.chat import ANSWER_W, FIRST_W, THINK, Builder
from recipes.model.corpus import chat
from recipes.model.rows import encoder

LOCKER = Fact("my", ("locker",), "pair", "blue jaguar")
ANSWER = "Your locker is blue jaguar."
THOUGHT = f"The user needs my locker. {ANSWER}\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return encoder()[0]


def asked(tokenizer: Any, thinking: bool, told: bool = True) -> Builder:
    builder = Builder(tokenizer.encode)
    if told:
        builder.tell([LOCKER])
        builder.acknowledge()
    builder.ask(LOCKER, LOCKER.question, thinking)
    return builder


def said(tokenizer: Any, builder: Builder, start: int, end: int) -> str:
    return str(tokenizer.decode(builder.ids[start:end], skip_special_tokens=False))


def test_a_thought_looks_the_fact_up_before_the_answer(tokenizer: Any) -> None:
    builder = asked(tokenizer, thinking=True)
    (question,) = builder.questions
    begin, end = question.answer
    assert said(tokenizer, builder, begin, end) == f"{THOUGHT}{ANSWER}<|im_end|>"
    assert said(tokenizer, builder, 0, begin).endswith(f"<|im_start|>assistant\n{THINK}")
    assert said(tokenizer, builder, *question.value) == " blue jaguar"
    assert question.value[1] < begin + len(tokenizer.encode(THOUGHT).ids)
    assert builder.weights[question.value[0]] == FIRST_W


def test_what_the_template_writes_of_a_thought_is_not_learnt(tokenizer: Any) -> None:
    builder = asked(tokenizer, thinking=True)
    begin, end = builder.questions[0].answer
    opening = len(tokenizer.encode(THINK).ids)
    assert builder.weights[begin - opening : begin] == [0.0] * opening
    assert min(builder.weights[begin : end - 1]) == ANSWER_W


def test_a_thought_about_what_was_never_told_says_so(tokenizer: Any) -> None:
    (question,) = (builder := asked(tokenizer, thinking=True, told=False)).questions
    assert said(tokenizer, builder, *question.value).startswith(" something I don't know")
    assert said(tokenizer, builder, *question.answer).count("don't know") == 2


def test_without_thoughts_an_answer_is_the_answer_alone(tokenizer: Any) -> None:
    builder = asked(tokenizer, thinking=False)
    (question,) = builder.questions
    assert said(tokenizer, builder, *question.answer) == f"{ANSWER}<|im_end|>"


def test_about_the_wanted_share_of_the_answers_has_thoughts(tokenizer: Any) -> None:
    for share in (0.0, 0.5, 1.0):
        thoughts = answers = 0
        for seed in range(12):
            made = chat(random.Random(seed), 1024, tokenizer.encode, share)
            text = tokenizer.decode(made.ids, skip_special_tokens=False)
            thoughts += text.count("</think>")
            answers += len(made.questions)
        assert abs(thoughts / answers - share) < 0.15, (share, thoughts, answers)
