"""Facts are recalled after a conversation branches, or gets a message longer than its budget."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from conversation import ChatClient
from harness import RunningProxy, llama_server, proxy, server_binary

from evoke_proxy.demo.session import SYSTEM, Fact, draw_fact
from evoke_proxy.demo.session import paragraph as demo_paragraph

KINDS = ("decoded", "recovered", "resident_before", "omitted")


def draw(seed: int) -> tuple[list[Fact], random.Random]:
    """Return six facts with different questions, and the random generator that drew them."""
    rng = random.Random(f"branches-{seed}")
    facts: dict[str, Fact] = {}
    while len(facts) < 6:
        fact = draw_fact(rng)
        facts[fact.question] = fact
    return list(facts.values()), rng


def paragraph(rng: random.Random, sentences: int = 15) -> str:
    return demo_paragraph(rng, sentences)


def start_conversation(proxy: RunningProxy, name: str, budget: int) -> ChatClient:
    client = ChatClient(proxy.port, name, {"evoke_budget": budget})
    client.messages[0]["content"] = SYSTEM
    return client


def recalls(client: ChatClient, fact: Fact, budget: int) -> bool:
    """Ask for a fact; returns whether the answer has its value.

    The turn must stay in its budget, and its token accounting must balance.
    """
    turn = client.say(fact.question)
    assert turn.accounting["n_resident_peak"] <= budget
    assert sum(turn.accounting[kind] for kind in KINDS) == turn.accounting["n_prompt"]
    return fact.value in turn.text


@pytest.mark.parametrize(("seed", "budget"), [(0, 512), (1, 400), (2, 768)])
def test_going_back_to_an_earlier_branch_recalls_its_facts(
    patched_proxy: RunningProxy, seed: int, budget: int
) -> None:
    facts, rng = draw(seed)
    client = start_conversation(patched_proxy, f"branch {seed}", budget)
    for fact in facts:
        for text in (fact.statement, paragraph(rng), paragraph(rng)):
            client.say(text)
    first_branch = list(client.messages)
    del client.messages[1 + 2 * 8 :]  # keep eight turns, with the first three facts
    for _ in range(9):
        client.say(paragraph(rng))
    second_branch = list(client.messages)
    missed = [n for n in range(3) if not recalls(client, facts[n], budget)]
    for asked_first in (1, 4, 0, 5):
        client.messages = list(second_branch)
        client.say("Good morning.")
        client.messages = list(first_branch)
        order = [asked_first, *(n for n in range(6) if n != asked_first)][:3]
        missed += [n for n in order if not recalls(client, facts[n], budget)]
    assert missed == []


@pytest.mark.parametrize(("seed", "budget"), [(3, 512), (4, 400)])
def test_a_question_behind_new_text_longer_than_the_budget_recalls_earlier_facts(
    patched_proxy: RunningProxy, seed: int, budget: int
) -> None:
    facts, rng = draw(seed)
    client = start_conversation(patched_proxy, f"long message {seed}", budget)
    for fact in facts:
        for text in (fact.statement, paragraph(rng), paragraph(rng)):
            client.say(text)
    missed = []
    for fact in facts:
        for _ in range(5):  # about 750 tokens that are new to the server
            client.messages += [
                {"role": "user", "content": paragraph(rng)},
                {"role": "assistant", "content": "Noted."},
            ]
        if not recalls(client, fact, budget):
            missed.append(fact.question)
    assert missed == []


@pytest.mark.parametrize("seed", [5, 6])
def test_a_message_inserted_in_the_middle_loses_no_fact(
    patched_proxy: RunningProxy, seed: int
) -> None:
    facts, rng = draw(seed)
    client = start_conversation(patched_proxy, f"inserted {seed}", 512)
    for fact in facts:
        for text in (fact.statement, paragraph(rng), paragraph(rng)):
            client.say(text)
    missed = []
    for number, fact in enumerate(facts):
        index = 1 + 2 * (4 + number)
        client.messages[index:index] = [
            {"role": "user", "content": paragraph(rng, 4)},
            {"role": "assistant", "content": "Noted."},
        ]
        if not recalls(client, fact, 512):
            missed.append(fact.question)
    assert missed == []


@pytest.fixture
def roomy_proxy() -> Iterator[RunningProxy]:
    """A proxy whose server has host memory for all copies: others may be without a copy."""
    options = ("-np", "1", "-c", "8192", "--evoke-ram", "64")
    with llama_server(server_binary(patched=True), *options) as port, proxy(port) as running:
        yield running


def test_changing_between_branches_decodes_only_new_text(roomy_proxy: RunningProxy) -> None:
    """The rows of a branch come back by copies when the user returns to it, and after an undo."""
    facts, rng = draw(7)
    client = start_conversation(roomy_proxy, "changing", 512)
    for fact in facts:
        for text in (fact.statement, paragraph(rng), paragraph(rng)):
            client.say(text)
    branches = {1: list(client.messages)}
    del client.messages[1 + 2 * 8 :]
    for _ in range(4):
        roomy_proxy.wait_for_background()
        client.say(paragraph(rng))
    branches[2] = list(client.messages)
    for branch in (1, 2, 1, 2):
        roomy_proxy.wait_for_background()
        client.messages = list(branches[branch])
        turn = client.say("Good morning.")
        assert turn.accounting["decoded"] < 100, branch
        assert turn.accounting["marker"] == "ok"
        assert turn.accounting["n_resident_peak"] <= 512
        assert sum(turn.accounting[kind] for kind in KINDS) == turn.accounting["n_prompt"]
    roomy_proxy.wait_for_background()
    del client.messages[-4:]  # the last two turns are undone
    assert client.say("Thanks.").accounting["decoded"] < 100
