"""A conversation that returns to an earlier branch, or gets a message beyond its budget, recalls
facts.
"""

from __future__ import annotations

import random

import pytest
from conversation import ChatClient
from harness import RunningProxy

from evoke_proxy.demo.session import SYSTEM, Fact, draw_fact
from evoke_proxy.demo.session import paragraph as demo_paragraph

KINDS = ("decoded", "recovered", "resident_before", "omitted")


def draw(seed: int) -> tuple[list[Fact], random.Random]:
    """Six facts that are asked for in different words each."""
    rng = random.Random(f"branches-{seed}")
    facts: dict[str, Fact] = {}
    while len(facts) < 6:
        fact = draw_fact(rng)
        facts[fact.question] = fact
    return list(facts.values()), rng


def paragraph(rng: random.Random, sentences: int = 15) -> str:
    return demo_paragraph(rng, sentences)


def talk(proxy: RunningProxy, name: str, budget: int) -> ChatClient:
    opened = ChatClient(proxy.port, name, {"evoke_budget": budget})
    opened.messages[0]["content"] = SYSTEM
    return opened


def recalls(talk: ChatClient, fact: Fact, budget: int) -> bool:
    """Whether the answer has the value; the turn holds its budget and its accounting balances."""
    said = talk.say(fact.question)
    assert said.accounting["n_resident_peak"] <= budget
    assert sum(said.accounting[kind] for kind in KINDS) == said.accounting["n_prompt"]
    return fact.value in said.text


@pytest.mark.parametrize(("seed", "budget"), [(0, 512), (1, 400), (2, 768)])
def test_going_back_to_an_earlier_branch_recalls_what_was_said_on_it(
    patched_proxy: RunningProxy, seed: int, budget: int
) -> None:
    facts, rng = draw(seed)
    session = talk(patched_proxy, f"branch {seed}", budget)
    for fact in facts:
        for text in (fact.statement, paragraph(rng), paragraph(rng)):
            session.say(text)
    first_branch = list(session.messages)
    del session.messages[1 + 2 * 8 :]  # eight turns stay: the first three facts
    for _ in range(9):
        session.say(paragraph(rng))
    second_branch = list(session.messages)
    missed = [n for n in range(3) if not recalls(session, facts[n], budget)]
    for asked_first in (1, 4, 0, 5):
        session.messages = list(second_branch)
        session.say("Good morning.")
        session.messages = list(first_branch)
        order = [asked_first, *(n for n in range(6) if n != asked_first)][:3]
        missed += [n for n in order if not recalls(session, facts[n], budget)]
    assert missed == []


@pytest.mark.parametrize(("seed", "budget"), [(3, 512), (4, 400)])
def test_a_question_behind_new_text_longer_than_the_budget_recalls_earlier_facts(
    patched_proxy: RunningProxy, seed: int, budget: int
) -> None:
    facts, rng = draw(seed)
    session = talk(patched_proxy, f"long message {seed}", budget)
    for fact in facts:
        for text in (fact.statement, paragraph(rng), paragraph(rng)):
            session.say(text)
    missed = []
    for fact in facts:
        for _ in range(5):  # about 750 tokens that the server has not seen
            session.messages += [
                {"role": "user", "content": paragraph(rng)},
                {"role": "assistant", "content": "Noted."},
            ]
        if not recalls(session, fact, budget):
            missed.append(fact.question)
    assert missed == []


@pytest.mark.parametrize("seed", [5, 6])
def test_a_message_inserted_in_the_middle_loses_no_fact(
    patched_proxy: RunningProxy, seed: int
) -> None:
    facts, rng = draw(seed)
    session = talk(patched_proxy, f"inserted {seed}", 512)
    for fact in facts:
        for text in (fact.statement, paragraph(rng), paragraph(rng)):
            session.say(text)
    missed = []
    for number, fact in enumerate(facts):
        place = 1 + 2 * (4 + number)
        session.messages[place:place] = [
            {"role": "user", "content": paragraph(rng, 4)},
            {"role": "assistant", "content": "Noted."},
        ]
        if not recalls(session, fact, 512):
            missed.append(fact.question)
    assert missed == []
