"""Random values, sentences and small talk; every function draws from the given generator."""

from __future__ import annotations

import random

from bench.model import vocab

# The tokenizer spells every one of these as one token, also behind a space; digits as well.
LETTERS = "ABCDEFGHJKLMNPQRTUVWYZ"
CODE_PAIRS = 8


def number(rng: random.Random) -> str:
    """Return a number of 4 to 6 digits, mostly 5."""
    digits = rng.choice((4, 5, 5, 5, 6))
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def pair(rng: random.Random) -> str:
    """Return a colour and an animal: one in 400."""
    return f"{rng.choice(vocab.COLORS)} {rng.choice(vocab.ANIMALS)}"


def code(rng: random.Random) -> str:
    """Return 16 characters, letters and digits in turns, no letter twice: 62 bits."""
    letters = rng.sample(LETTERS, CODE_PAIRS)
    return "".join(f"{letter}{rng.randrange(10)}" for letter in letters)


def value(rng: random.Random, type_: str) -> str:
    """Return a fresh value of a type: number, pair or code."""
    return {"number": number, "pair": pair, "code": code}[type_](rng)


def thing(rng: random.Random) -> str:
    """Return a noun, with an adjective more often than not."""
    adjective = f"{rng.choice(vocab.ADJECTIVES)} " if rng.random() < 0.6 else ""
    return adjective + rng.choice(vocab.NOUNS)


def sentence(rng: random.Random) -> str:
    """Return one unrelated sentence; one in 16 has a number in it."""
    verb, place = rng.choice(vocab.VERBS), f"{rng.choice(vocab.PREPOSITIONS)} {thing(rng)}"
    shape = rng.random()
    if shape < 0.45:
        return f"The {thing(rng)} {verb} the {thing(rng)} {place}."
    if shape < 0.7:
        return f"{rng.choice(vocab.ADVERBS).capitalize()} the {thing(rng)} {verb} a {thing(rng)}."
    if shape < 0.84:
        return f"{rng.choice(vocab.NAMES)} {verb} the {thing(rng)} {place}."
    if shape < 0.9:
        return f"There are {rng.randrange(2, 2000)} {rng.choice(vocab.NOUNS)}s {place}."
    first, second = rng.sample(vocab.ADJECTIVES, 2)
    noun, other = rng.choice(vocab.NOUNS), rng.choice(vocab.NOUNS)
    return f"It is {first} and {second}, so the {noun} {verb} the {other}."


def paragraph(rng: random.Random, sentences: int) -> str:
    """Return that many unrelated sentences."""
    return " ".join(sentence(rng) for _ in range(sentences))


def filler(rng: random.Random, sentences: int = 0) -> tuple[str, str]:
    """Return an unrelated exchange of the user and the assistant.

    With `sentences` it is a paragraph of that many, else small talk, a request or a few sentences.
    """
    shape = rng.random()
    if sentences:
        return paragraph(rng, sentences), vocab.CHAT_REPLY
    if shape < 0.3:
        return rng.choice(vocab.SMALL_TALK)
    if shape < 0.45:
        return f"Tell me about the {rng.choice(vocab.NOUNS)}.", paragraph(rng, rng.choice((1, 2)))
    return paragraph(rng, rng.choice((2, 3, 5, 8))), vocab.CHAT_REPLY
