"""Random values, sentences and unrelated turns. Every function draws from the generator it gets."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.model import vocab

UPPER, LOWER, DIGITS = "ABCDEFGHJKLMNPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz", "0123456789"


def pseudo_word(rng: random.Random) -> str:
    """Return a pronounceable word that exists in no list, one or two syllables."""
    word = rng.choice(vocab.ONSETS) + rng.choice(vocab.VOWELS)
    if rng.random() < 0.5:
        word += rng.choice(vocab.ONSETS) + rng.choice(vocab.VOWELS)
    return word + rng.choice(vocab.CODAS)


def number(rng: random.Random, digits: int | None = None) -> str:
    """Return a number of that many digits (2 to 6, mostly 4, when not given)."""
    digits = digits or rng.choice((2, 3, 4, 4, 4, 4, 5, 6))
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def code_word(rng: random.Random) -> str:
    """Return a value of letters: `blue-17`, `blue falcon`, a pseudo-word or `K381`."""
    shape = rng.random()
    if shape < 0.45:
        return rng.choice(vocab.COLORS) + "-" + number(rng, 2)
    if shape < 0.8:
        return rng.choice(vocab.COLORS) + " " + rng.choice(vocab.ANIMALS)
    if shape < 0.92:
        return pseudo_word(rng)
    return rng.choice("ABCDEFGHKLMNPRSTVXZ") + number(rng, rng.choice((2, 3)))


def alphanumeric(rng: random.Random) -> str:
    """Return 6 to 16 characters that mix letters and digits in one of five styles."""
    size, shape = rng.choice((6, 6, 6, 6, 7, 8, 8, 8, 10, 12, 16)), rng.random()
    if shape < 0.3:
        text = _letters(rng, UPPER + DIGITS * 2, size)
    elif shape < 0.55:
        text = _letters(rng, "abcdef" + DIGITS if shape < 0.45 else LOWER + DIGITS * 2, size)
    elif shape < 0.75:
        groups = 2 if size < 10 else 3
        return "-".join(_letters(rng, UPPER + DIGITS, 4) for _ in range(groups))
    elif shape < 0.9:
        prefix = rng.choice((2, 3))
        return _letters(rng, UPPER, prefix) + _letters(rng, DIGITS, size - prefix)
    else:
        text = _letters(rng, UPPER + LOWER + DIGITS * 3, size)
    return rng.choice(UPPER) + text[1:] if text.isdigit() else text


def _letters(rng: random.Random, alphabet: str, size: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(size))


def date(rng: random.Random) -> str:
    """Return a date in one of four spellings."""
    shape = rng.random()
    day, month, year = rng.randrange(1, 29), rng.randrange(12), rng.randrange(2018, 2035)
    name = vocab.MONTHS[month]
    if shape < 0.4:
        return f"{year}-{month + 1:02d}-{day:02d}"
    if shape < 0.65:
        return f"{day} {name}"
    return f"{name} {day}" if shape < 0.8 else f"{day} {name} {year}"


def two_words(rng: random.Random) -> str:
    """Return two words, with a space or a hyphen."""
    shape = rng.random()
    if shape < 0.3:
        return rng.choice(vocab.ADJECTIVES) + " " + rng.choice(vocab.NOUNS)
    if shape < 0.5:
        return rng.choice(vocab.NOUNS) + "-" + rng.choice(vocab.NOUNS)
    if shape < 0.75:
        return rng.choice(vocab.COLORS) + rng.choice((" ", "-")) + rng.choice(vocab.ANIMALS)
    if shape < 0.9:
        return rng.choice(vocab.COLORS) + " " + rng.choice(vocab.NOUNS)
    return rng.choice(vocab.ADJECTIVES) + "-" + rng.choice(vocab.ANIMALS)


def long_number(rng: random.Random) -> str:
    """Return a number, in 15 % of the draws one of 7 to 10 digits."""
    return number(rng) if rng.random() < 0.85 else number(rng, rng.choice((7, 8, 9, 10)))


def value(rng: random.Random, kind: str) -> str:
    """Return a value of a kind (num, word, code, date), in 15 % of the draws of another one."""
    if rng.random() < 0.15:
        kind = rng.choice(("num", "word", "code", "date"))
    if kind == "num":
        return long_number(rng)
    if kind == "code":
        return alphanumeric(rng)
    if kind == "date":
        return date(rng)
    return code_word(rng) if rng.random() < 0.55 else two_words(rng)


def name(rng: random.Random) -> str:
    """Return a first name, a pseudo-word in a quarter of the draws."""
    return rng.choice(vocab.NAMES) if rng.random() < 0.75 else pseudo_word(rng).capitalize()


def place(rng: random.Random) -> str:
    """Return a city, a pseudo-word in a quarter of the draws."""
    return rng.choice(vocab.PLACES) if rng.random() < 0.75 else pseudo_word(rng).capitalize()


def building(rng: random.Random) -> str:
    """Return a place in a city, now and then a pseudo-word."""
    return rng.choice(vocab.THINGS) if rng.random() < 0.85 else pseudo_word(rng)


def noun_phrase(rng: random.Random) -> str:
    """Return a noun, more often than not with an adjective."""
    adjective = rng.choice(vocab.ADJECTIVES) + " " if rng.random() < 0.6 else ""
    return adjective + (rng.choice(vocab.NOUNS) if rng.random() < 0.95 else pseudo_word(rng))


def sentence(rng: random.Random) -> str:
    """Return one unrelated sentence."""
    shape, pick, noun = rng.random(), rng.choice, noun_phrase
    if shape < 0.4:
        start = f"The {noun(rng)} {pick(vocab.VERBS)} the {noun(rng)}"
        return f"{start} {pick(vocab.PREPOSITIONS)} {noun(rng)}."
    if shape < 0.6:
        start = f"{pick(vocab.ADVERBS).capitalize()} the {noun(rng)}"
        return f"{start} {pick(vocab.VERBS)} a {noun(rng)}."
    if shape < 0.72:
        start = f"{name(rng)} {pick(vocab.VERBS)} the {noun(rng)}"
        return f"{start} {pick(vocab.PREPOSITIONS)} {noun(rng)}."
    if shape < 0.82:
        start = f"In {place(rng)}, a {noun(rng)} {pick(vocab.VERBS)}"
        return f"{start} {number(rng)} {pick(vocab.NOUNS)}s."
    if shape < 0.9:
        start = f"There are {number(rng, pick((1, 2, 3)))} {pick(vocab.ADJECTIVES)}"
        return f"{start} {pick(vocab.NOUNS)}s {pick(vocab.PREPOSITIONS)} {noun(rng)}."
    start = f"It is {pick(vocab.ADJECTIVES)} and {pick(vocab.ADJECTIVES)}"
    return f"{start}, so the {pick(vocab.NOUNS)} {pick(vocab.VERBS)} the {pick(vocab.NOUNS)}."


def paragraph(rng: random.Random, sentences: int) -> str:
    """Return that many unrelated sentences."""
    return " ".join(sentence(rng) for _ in range(sentences))


def filler(rng: random.Random, scale: float = 1.0) -> Sequence[str]:
    """Return an unrelated exchange: what the user says and what the assistant answers."""
    shape, size = rng.random(), max(1, int(rng.choice((1, 2, 3, 4)) * scale))
    if shape < 0.3:
        return rng.choice(vocab.SMALL_TALK)
    if shape < 0.5:
        topic = noun_phrase(rng)
        start = f"The {topic} {rng.choice(vocab.VERBS)} the {noun_phrase(rng)}. "
        return f"Tell me about the {topic}.", start + paragraph(rng, size)
    if shape < 0.65:
        answers = ("That is interesting.", "I see.", "Thank you for telling me.", "All right.")
        return paragraph(rng, size + 1), rng.choice(answers)
    if shape < 0.78:
        topic, count = rng.choice(vocab.NOUNS), rng.choice((2, 3, 4))
        lines = (f"{i + 1}. {noun_phrase(rng)}" for i in range(count))
        return f"List {count} words about the {topic}.", "\n".join(lines)
    if shape < 0.9:
        return _function(rng)
    return (
        f"What does the {rng.choice(vocab.NOUNS)} do?",
        f"It {rng.choice(vocab.VERBS)} the {noun_phrase(rng)}.",
    )


def _function(rng: random.Random) -> Sequence[str]:
    title, argument = pseudo_word(rng), rng.choice(vocab.NOUNS)
    body = f"    {rng.choice(vocab.NOUNS)} = {argument} + {number(rng, 2)}\n"
    code = f"def {title}({argument}):\n{body}    return {rng.choice(vocab.NOUNS)}"
    return f"Write a function named {title}.", code
