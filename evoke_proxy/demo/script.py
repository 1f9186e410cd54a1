"""What the user says in the demo: one planted fact, unrelated turns, one question.

Everything follows from the seed. The wording is that of the bundled model's training data, and the
kinds of facts are those it recalls reliably (bench/results/ceiling.json has the measured ceiling).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from evoke_proxy.demo import words

SYSTEM = "You are a small assistant. Be brief."
PARAGRAPHS = 13
SMALL_TALK = 3
SENTENCES = 15  # a paragraph of about 160 tokens


@dataclass(frozen=True, slots=True)
class Fact:
    """A planted fact: how it is told, how it is asked for, and the value nobody can guess."""

    statement: str
    question: str
    value: str


@dataclass(frozen=True, slots=True)
class Script:
    """One session: `turns` are the user messages, the first plants the fact, the last asks."""

    seed: int
    system: str
    fact: Fact
    turns: tuple[str, ...]


def draw(seed: int) -> Script:
    """Return the session of a seed. The value occurs in the first turn and nowhere else."""
    rng = random.Random(f"evoke-demo-{seed}")
    fact = draw_fact(rng)
    fillers = [paragraph(rng, SENTENCES) for _ in range(PARAGRAPHS)]
    for question in rng.sample(words.SMALL_TALK, SMALL_TALK):
        fillers.insert(rng.randrange(1, len(fillers) + 1), question)
    turns = (fact.statement, *fillers, fact.question)
    assert sum(turn.count(fact.value) for turn in turns) == 1
    return Script(seed, SYSTEM, fact, turns)


def draw_fact(rng: random.Random) -> Fact:
    """Return a fact about the user with a fresh value.

    The model was trained on no other owners of such attributes (models/MODEL_CARD.md).
    """
    if rng.random() < 0.6:
        attribute, value = rng.choice(words.NUMBER_ATTRIBUTES), number(rng)
    else:
        attribute, value = rng.choice(words.WORD_ATTRIBUTES), word_pair(rng)
    return Fact(f"My {attribute} is {value}.", f"What is my {attribute}?", value)


def number(rng: random.Random) -> str:
    """Return five digits: one in 90,000."""
    return str(rng.randrange(10_000, 100_000))


def word_pair(rng: random.Random) -> str:
    """Return a colour and an animal: one in 400."""
    return f"{rng.choice(words.COLORS)} {rng.choice(words.ANIMALS)}"


def paragraph(rng: random.Random, sentences: int) -> str:
    """Return that many unrelated sentences of the model's little world."""
    return " ".join(sentence(rng) for _ in range(sentences))


def sentence(rng: random.Random) -> str:
    """Return one sentence without names' facts, numbers or anything else that could be asked."""
    verb, place = rng.choice(words.VERBS), f"{rng.choice(words.PREPOSITIONS)} {thing(rng)}"
    shape = rng.random()
    if shape < 0.5:
        return f"The {thing(rng)} {verb} the {thing(rng)} {place}."
    if shape < 0.75:
        return f"{rng.choice(words.ADVERBS)} the {thing(rng)} {verb} a {thing(rng)}."
    if shape < 0.9:
        return f"{rng.choice(words.NAMES)} {verb} the {thing(rng)} {place}."
    first, second = rng.sample(words.ADJECTIVES, 2)
    noun, other = rng.choice(words.NOUNS), rng.choice(words.NOUNS)
    return f"It is {first} and {second}, so the {noun} {verb} the {other}."


def thing(rng: random.Random) -> str:
    """Return a noun, with an adjective more often than not."""
    adjective = f"{rng.choice(words.ADJECTIVES)} " if rng.random() < 0.6 else ""
    return adjective + rng.choice(words.NOUNS)
