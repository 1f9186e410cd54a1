"""Draws the demo's session from a seed: one planted fact, unrelated turns, one question.

The bundled model is small and was trained on synthetic text (models/MODEL_CARD.md). It answers
other words and sentence patterns with nonsense. The vocabulary here is therefore a part of its
training data, without anything that looks like a second fact (numbers, rooms, file keys). The kinds
of facts are those that it recalls reliably (bench/results/ceiling.json).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NAMES = tuple(
    "Priya Omar Lena Marco Ingrid Tomas Yuki Nadia Felix Amara Boris Carla Dmitri Elena Greta Hugo "
    "Irene Jonas Kira Liam Mina Noah Olga Pablo Rosa Sven Tara Vera Walter Alice Bob Carol Dave "
    "Erin Frank Grace Heidi Ivan Judy Karl Laura Mike Nina Oscar Peter Ruth Tina Victor Wendy "
    "Anna Ben Chloe".split()
)
COLORS = tuple(
    "blue red green amber violet silver golden black white orange pink gray teal crimson ivory "
    "indigo scarlet olive bronze coral".split()
)
ANIMALS = tuple(
    "falcon otter tiger raven badger lynx heron wolf panda gecko bison cobra dolphin eagle ferret "
    "hippo iguana jaguar koala lemur".split()
)
ADJECTIVES = tuple(
    "old small large quiet bright heavy simple modern ancient narrow wide gentle rapid common rare "
    "distant local warm cold deep empty broken useful famous strange careful slow busy wooden "
    "metal clean dark fresh early late".split()
)
NOUNS = tuple(
    "river mountain machine garden letter engine window teacher forest market bridge village "
    "painting computer storm ship story bird street lamp farmer road castle clock table doctor "
    "field train island library worker song valley report system city child house tree stone "
    "coffee bread book plan signal cable tool wheel harbor festival lesson planet ocean desert "
    "battery".split()
)
VERBS = tuple(
    "follows watches repairs carries finds builds crosses describes supports moves covers opens "
    "shapes reaches protects changes measures joins paints studies needs helps visits cleans "
    "records explains".split()
)
ADVERBS = tuple(
    "Slowly Quickly Often Rarely Usually Carefully Sometimes Always Quietly Today".split()
)
PREPOSITIONS = (
    "near the",
    "under the",
    "behind the",
    "across the",
    "inside the",
    "beyond the",
    "along the",
    "around the",
)
NUMBER_ATTRIBUTES = (
    "favorite number",
    "lucky number",
    "badge number",
    "employee number",
    "seat number",
    "jersey number",
    "order number",
    "ticket number",
    "account number",
    "ID number",
    "phone extension",
)
WORD_ATTRIBUTES = (
    "password",
    "nickname",
    "code name",
    "username",
    "team name",
    "secret word",
    "project name",
    "call sign",
)
SMALL_TALK = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What color is the sky?",
    "Is water wet?",
    "Name a fruit.",
    "Name a planet.",
    "What do bees make?",
    "Good morning.",
    "Which animal barks?",
    "What is ice made of?",
    "What is the largest ocean?",
    "Is the sun a star?",
    "Which month comes after May?",
)


SYSTEM = "You are a small assistant. Be brief."
PARAGRAPHS = 13
SMALL_TALK_TURNS = 3
SENTENCES = 15  # a paragraph of about 160 tokens


@dataclass(frozen=True, slots=True)
class Fact:
    """A planted fact.

    Attributes:
        statement: The sentence that states it.
        question: The question for it.
        value: The random answer.
    """

    statement: str
    question: str
    value: str


@dataclass(frozen=True, slots=True)
class Script:
    """One session.

    Attributes:
        seed: The seed it was drawn from.
        system: The system prompt.
        fact: The planted fact.
        turns: The user messages: the first states the fact, the last asks for it.
    """

    seed: int
    system: str
    fact: Fact
    turns: tuple[str, ...]


def draw(seed: int) -> Script:
    """Return the session of a seed. The value occurs in the first turn and nowhere else."""
    rng = random.Random(f"evoke-demo-{seed}")
    fact = draw_fact(rng)
    fillers = [paragraph(rng, SENTENCES) for _ in range(PARAGRAPHS)]
    for question in rng.sample(SMALL_TALK, SMALL_TALK_TURNS):
        fillers.insert(rng.randrange(1, len(fillers) + 1), question)
    turns = (fact.statement, *fillers, fact.question)
    assert sum(turn.count(fact.value) for turn in turns) == 1
    return Script(seed, SYSTEM, fact, turns)


def draw_fact(rng: random.Random) -> Fact:
    """Return a fact about the user with a fresh value.

    The model was trained on no other owners of such attributes (models/MODEL_CARD.md).
    """
    if rng.random() < 0.6:
        attribute, value = rng.choice(NUMBER_ATTRIBUTES), number(rng)
    else:
        attribute, value = rng.choice(WORD_ATTRIBUTES), word_pair(rng)
    return Fact(f"My {attribute} is {value}.", f"What is my {attribute}?", value)


def number(rng: random.Random) -> str:
    """Return a random number of five digits, one of 90,000."""
    return str(rng.randrange(10_000, 100_000))


def word_pair(rng: random.Random) -> str:
    """Return a random colour and animal, one of 400 pairs."""
    return f"{rng.choice(COLORS)} {rng.choice(ANIMALS)}"


def paragraph(rng: random.Random, sentences: int) -> str:
    """Return unrelated sentences from the model's vocabulary."""
    return " ".join(sentence(rng) for _ in range(sentences))


def sentence(rng: random.Random) -> str:
    """Return one sentence that contains no fact and no number."""
    verb, place = rng.choice(VERBS), f"{rng.choice(PREPOSITIONS)} {thing(rng)}"
    shape = rng.random()
    if shape < 0.5:
        return f"The {thing(rng)} {verb} the {thing(rng)} {place}."
    if shape < 0.75:
        return f"{rng.choice(ADVERBS)} the {thing(rng)} {verb} a {thing(rng)}."
    if shape < 0.9:
        return f"{rng.choice(NAMES)} {verb} the {thing(rng)} {place}."
    first, second = rng.sample(ADJECTIVES, 2)
    noun, other = rng.choice(NOUNS), rng.choice(NOUNS)
    return f"It is {first} and {second}, so the {noun} {verb} the {other}."


def thing(rng: random.Random) -> str:
    """Return a noun, with an adjective more often than not."""
    adjective = f"{rng.choice(ADJECTIVES)} " if rng.random() < 0.6 else ""
    return adjective + rng.choice(NOUNS)
