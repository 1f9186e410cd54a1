"""Recognising standing instructions, restrictions and requests for advice."""

from __future__ import annotations

import pytest

from evoke_proxy.core.retrieval.instructions import (
    asks_for_advice,
    is_restriction,
    is_standing_instruction,
)


@pytest.mark.parametrize(
    "text",
    [
        "From now on, answer in French.",
        "Please always reply in two sentences.",
        "Never use emojis, please.",
        "One more thing: call me Captain.",
        "You must always cite the paragraph.",
        "I want you to never mention prices.",
        "Whenever you write code, add type hints.",
        "In every reply, begin with a summary.",
        "Answer in German.",
        "Don't use any bullet points.",
    ],
)
def test_a_standing_instruction_is_recognised(text: str) -> None:
    assert is_standing_instruction(text)


@pytest.mark.parametrize(
    "text",
    [
        "I always walk the dog before breakfast.",
        "She never told me about the trip.",
        "My mother used to call me every Sunday.",
        "Every time I visit, they have moved the furniture.",
        "What is the answer in the book?",
        "always " * 400,
    ],
)
def test_a_remark_is_not_an_instruction(text: str) -> None:
    assert not is_standing_instruction(text)


@pytest.mark.parametrize(
    "text",
    ["Our lease forbids dogs.", "I can't swim.", "My visa has expired.", "We only eat fish."],
)
def test_a_short_statement_of_what_is_not_possible_is_a_restriction(text: str) -> None:
    assert is_restriction(text)
    assert not is_restriction(text + " And so on." * 30)


def test_a_plain_statement_is_not_a_restriction() -> None:
    assert not is_restriction("We went to the lake with my sister.")


def test_a_question_with_a_modal_verb_asks_for_advice() -> None:
    assert asks_for_advice("Could I adopt a kitten?")
    assert asks_for_advice("Which cake should we bake?")
    assert not asks_for_advice("Where does my sister live?")
