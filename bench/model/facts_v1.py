"""Facts in the wording of the first generation: the kinds the model recalls most reliably."""

from __future__ import annotations

import random

from bench.model import text, vocab
from bench.model.facts import Fact, event, file_name, setting

KINDS = "my my for for for poss poss poss file env tool event".split()


def draw(rng: random.Random, kind: str | None = None) -> Fact:
    """Return a fact in the first version's wording and values."""
    kind = kind or rng.choice(KINDS)
    if kind in ("my", "poss"):
        return _attribute(rng, kind)
    if kind == "for":
        attribute = rng.choice(vocab.PLACE_ATTRIBUTES)
        value = text.number(rng) if rng.random() < 0.65 else text.code_word(rng)
        key = f"{attribute} for the {text.place(rng)} {text.building(rng)}"
        return _the(kind, key, value, [f"What's the {key}?", f"Tell me the {key}."])
    if kind == "tool":
        field = rng.choice(vocab.RECORD_FIELDS)
        record = f"{rng.choice(vocab.RECORDS)} {text.number(rng, rng.choice((2, 3, 4)))}"
        value = text.number(rng) if rng.random() < 0.7 else text.code_word(rng)
        key = f"{field} of {record}"
        return _the(kind, key, value, [f"What was the {key}?"])
    if kind == "event":
        key = f"{rng.choice(vocab.EVENTS)} with {text.name(rng)}"
        short = rng.random() < 0.6
        value = text.number(rng, rng.choice((2, 3))) if short else text.code_word(rng)
        return event(key, value)
    return _setting(rng, kind)


def _attribute(rng: random.Random, kind: str) -> Fact:
    owner = text.name(rng) if kind == "poss" else ""
    if rng.random() < 0.5:
        attribute, value = rng.choice(vocab.NUMBER_ATTRIBUTES), text.number(rng)
    else:
        attribute, value = rng.choice(vocab.WORD_ATTRIBUTES), text.code_word(rng)
    key = f"{owner}'s {attribute}" if owner else f"my {attribute}"
    told, said = (key, key) if owner else (f"My {attribute}", f"Your {attribute}")
    questions = [f"What is {key}?", f"What's {key}?", f"Tell me {key}."]
    return Fact(kind, key, f"{told} is {value}.", questions, f"{said} is {value}.", value)


def _the(kind: str, key: str, value: str, more: list[str]) -> Fact:
    told = f"The {key} is {value}."
    return Fact(kind, key, told, [f"What is the {key}?", *more], told, value)


def _setting(rng: random.Random, kind: str) -> Fact:
    plain = rng.random() < 0.8
    value = text.number(rng) if plain else text.code_word(rng).replace(" ", "_")
    if kind == "file":
        key = rng.choice(vocab.ENV_KEYS)
        return setting(kind, (key, file_name(rng)), f"= {value}", value)
    # An environment key always has a prefix, a file's key never: no question is ambiguous.
    return setting(
        kind, (rng.choice(vocab.ENV_PREFIXES), rng.choice(vocab.ENV_KEYS)), f"= {value}", value
    )
