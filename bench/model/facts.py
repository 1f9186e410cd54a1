"""Facts: how each kind is told, asked for and answered; near misses and updates of a fact.

This is the second generation: more value kinds, paraphrases and statement variants than the first
(facts_v1), whose wording the model still knows best.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.model import text, vocab

PLAIN, NEAR_MISS, UPDATED, SAME_KEY = range(4)
Span = tuple[int, int]
Parts = tuple[str, ...]
Draw = Callable[[random.Random], str]

KINDS = "my my for for for poss poss poss file file env tool tool event".split()
_ASKED_LIKE = ("What", "Tell", "Which", "Where")
_VALUE_KIND = {
    **dict.fromkeys(vocab.NUMBER_ATTRIBUTES, "num"),
    **dict.fromkeys(vocab.WORD_ATTRIBUTES, "word"),
    **dict.fromkeys(vocab.CODE_ATTRIBUTES, "code"),
    **dict.fromkeys(vocab.DATE_ATTRIBUTES, "date"),
}


@dataclass(slots=True)
class Fact:
    """One fact. `span` is where it stands in the chat (token range), None until it is planted."""

    kind: str
    key: str
    told: str
    questions: Sequence[str]
    answer: str
    value: str
    paraphrases: Sequence[str] = ()
    parts: Parts = ()
    subject: str = ""
    tag: int = PLAIN
    span: Span | None = None

    def statement(self, rng: random.Random) -> str:
        """Return how the fact is told: files and records as they are, the rest with a prefix."""
        if self.kind in ("file", "env", "tool"):
            return self.told
        prefix = rng.choice(vocab.STATEMENT_PREFIXES)
        return prefix + continued(self.told, prefix)

    def question(self, rng: random.Random) -> str:
        """Return how the fact is asked for; a first-generation fact knows no paraphrases."""
        if not self.paraphrases:
            return rng.choice(vocab.QUESTION_PREFIXES) + rng.choice(self.questions)
        chosen = rng.choice(self.questions if rng.random() < 0.6 else self.paraphrases)
        prefix = rng.choice(vocab.QUESTION_PREFIXES) if chosen.startswith(_ASKED_LIKE) else ""
        return prefix + chosen


def lowered(sentence: str) -> str:
    """Return the sentence with a small first letter if it begins with My or The."""
    begins = sentence.split(" ")[0] in ("My", "The")
    return sentence[0].lower() + sentence[1:] if begins else sentence


def continued(sentence: str, prefix: str) -> str:
    """Return the sentence as it stands after that prefix."""
    return lowered(sentence) if prefix.endswith(("that ", ", ")) else sentence


def event(key: str, value: str) -> Fact:
    """Return an appointment told, asked for and answered with its room."""
    told = f"The {key} is in room {value}."
    questions = [f"Which room is the {key} in?", f"Where is the {key}?"]
    return Fact("event", key, told, questions, told, value)


def setting(kind: str, parts: Parts, assigned: str, value: str) -> Fact:
    """Return a line of a file or an environment; `assigned` is `= value` or `=value`."""
    gap = " " if assigned.startswith("= ") else ""
    if kind == "env":
        key = "_".join(parts)
        questions = [f"What is the value of {key}?", f"What is {key} set to?"]
    else:
        name, path = parts
        key = f"{path}: {name}"
        questions = [f"What is {name} in {path}?", f"What value does {name} have in {path}?"]
    return Fact(kind, key, f"{key}{gap}{assigned}", questions, f"{key} = {value}", value)


def file_name(rng: random.Random) -> str:
    """Return a file name, its stem a pseudo-word in a fifth of the draws."""
    stem = rng.choice(vocab.FILE_STEMS) if rng.random() < 0.8 else text.pseudo_word(rng)
    return stem + rng.choice(vocab.FILE_SUFFIXES)


def _attribute(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.34:
        return rng.choice(vocab.NUMBER_ATTRIBUTES)
    if shape < 0.64:
        return rng.choice(vocab.WORD_ATTRIBUTES)
    if shape < 0.80:
        return rng.choice(vocab.CODE_ATTRIBUTES)
    return rng.choice(vocab.DATE_ATTRIBUTES) if shape < 0.90 else _free_attribute(rng)


def _free_attribute(rng: random.Random) -> str:
    noun = rng.choice(vocab.NOUNS) if rng.random() < 0.7 else text.pseudo_word(rng)
    return noun + " " + rng.choice(vocab.FREE_NOUNS)


def _place_attribute(rng: random.Random) -> str:
    usual = rng.random() < 0.85
    return rng.choice(vocab.PLACE_ATTRIBUTES) if usual else _free_attribute(rng)


def _from(words: Sequence[str]) -> Draw:
    return lambda rng: rng.choice(words)


# What a fact of each kind is made of; a near miss differs in exactly one part.
PARTS: Mapping[str, Sequence[Draw]] = {
    "my": [_attribute],
    "poss": [text.name, _attribute],
    "for": [_place_attribute, text.place, text.building],
    "tool": [
        _from(vocab.RECORD_FIELDS),
        _from(vocab.RECORDS),
        lambda rng: text.number(rng, rng.choice((2, 3, 4))),
    ],
    "event": [_from(vocab.EVENTS), text.name],
    "file": [_from(vocab.ENV_KEYS), file_name],
    "env": [_from(vocab.ENV_PREFIXES), _from(vocab.ENV_KEYS)],
}


def draw(rng: random.Random, kind: str | None = None, parts: Parts | None = None) -> Fact:
    """Return a fact of the second generation, of that kind and with those parts when given."""
    kind = kind or rng.choice(KINDS)
    parts = parts or tuple(part(rng) for part in PARTS[kind])
    if kind == "event":
        fact = _draw_event(rng, parts)
    elif kind in ("file", "env"):
        fact = _draw_setting(rng, kind, parts)
    else:
        fact = _draw_attribute(rng, kind, parts)
    fact.parts = parts
    return fact


def _draw_attribute(rng: random.Random, kind: str, parts: Parts) -> Fact:
    subject, said, asked, key, attribute = _named(kind, parts)
    usual = _VALUE_KIND.get(attribute) or ("num" if rng.random() < 0.65 else "word")
    value, shape = text.value(rng, usual), rng.random()
    if shape < 0.82:
        told = f"{subject} is {value}."
    else:
        told = f"{subject}: {value}." if shape < 0.92 else f"{subject} was set to {value}."
    if kind == "tool":
        questions = [f"What is {asked}?", f"What was {asked}?"]
    else:
        questions = [f"What is {asked}?", f"What's {asked}?", f"Tell me {asked}."]
    paraphrases = [
        f"Can you tell me {asked}?",
        f"Do you know {asked}?",
        f"Please give me {asked}.",
        f"I forgot {asked}. What is it?",
        f"Please repeat {asked}.",
        f"I need {asked}.",
        f"Could you remind me of {asked}?",
    ]
    if kind == "my":
        paraphrases += [f"Which {attribute} did I tell you?", f"What did I say {asked} is?"]
    answer = f"{said} is {value}."
    return Fact(kind, key, told, questions, answer, value, paraphrases, subject=subject)


def _named(kind: str, parts: Parts) -> tuple[str, str, str, str, str]:
    """Return subject, subject of the answer, object of a question, key and attribute."""
    if kind == "my":
        (attribute,) = parts
        key = f"my {attribute}"
        return f"My {attribute}", f"Your {attribute}", key, key, attribute
    if kind == "poss":
        key = f"{parts[0]}'s {parts[1]}"
        return key, key, key, key, parts[1]
    if kind == "for":
        key = f"{parts[0]} for the {parts[1]} {parts[2]}"
    else:
        key = f"{parts[0]} of {parts[1]} {parts[2]}"
    return f"The {key}", f"The {key}", f"the {key}", key, parts[0]


def _draw_event(rng: random.Random, parts: Parts) -> Fact:
    key = f"{parts[0]} with {parts[1]}"
    if rng.random() < 0.5:
        value = text.number(rng, rng.choice((2, 3)))
    else:
        value = text.value(rng, "code" if rng.random() < 0.4 else "word")
    fact = event(key, value)
    fact.subject = f"The {key}"
    fact.paraphrases = [
        f"In which room is the {key}?",
        f"What room is the {key} in?",
        f"Where will the {key} be?",
        f"Can you tell me the room of the {key}?",
    ]
    return fact


def _draw_setting(rng: random.Random, kind: str, parts: Parts) -> Fact:
    if rng.random() < 0.65:
        value = text.long_number(rng)
    elif rng.random() < 0.5:
        value = text.alphanumeric(rng)
    else:
        words = text.code_word(rng) if rng.random() < 0.6 else text.two_words(rng)
        value = words.replace(" ", "_")
    fact = setting(kind, parts, f"= {value}" if rng.random() < 0.8 else f"={value}", value)
    fact.subject = fact.key
    fact.paraphrases = _setting_paraphrases(kind, parts, fact.key)
    return fact


def _setting_paraphrases(kind: str, parts: Parts, key: str) -> list[str]:
    if kind == "env":
        return [
            f"What is {key}?",
            f"Which value does {key} have?",
            f"Tell me the value of {key}.",
            f"What's {key}?",
        ]
    name, path = parts
    return [
        f"In {path}, what is {name}?",
        f"What is the value of {name} in {path}?",
        f"Which value is set for {name} in {path}?",
        f"Tell me {name} in {path}.",
        f"What does {path} set {name} to?",
    ]


def near_miss(rng: random.Random, fact: Fact) -> Fact:
    """Return a fact in the same frame with exactly one part drawn again."""
    parts = list(fact.parts)
    index = rng.randrange(len(parts))
    if fact.kind in ("poss", "file") and rng.random() < 0.4:
        index = {"poss": 0, "file": 1}[fact.kind]
    parts[index] = PARTS[fact.kind][index](rng)
    other = draw(rng, fact.kind, tuple(parts))
    other.tag = NEAR_MISS
    return other


def update(rng: random.Random, fact: Fact) -> Fact:
    """Return the same fact with a new value, told as a change."""
    new = draw(rng, fact.kind, fact.parts)
    new.tag, value, subject = UPDATED, new.value, fact.subject
    if fact.kind in ("file", "env"):
        new.told = rng.choice(("Changed: ", "Update: ", "New value: ", "")) + new.told
    elif fact.kind == "event":
        new.told = rng.choice(
            (
                f"{subject} is now in room {value}.",
                f"{subject} has moved to room {value}.",
                f"Update: {lowered(subject)} is in room {value}.",
            )
        )
    else:
        new.told = rng.choice(
            (
                f"{subject} is now {value}.",
                f"{subject} is now {value}.",
                f"{subject} has changed to {value}.",
                f"Update: {lowered(subject)} is {value}.",
                f"Correction: {lowered(subject)} is {value}.",
            )
        )
    return new
