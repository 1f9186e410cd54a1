"""Facts about attributes of an endless space: words of English, made-up words, put together.

So that the model learns to compare a question with what was told instead of a closed list. Told
and asked in many sentence frames; an attribute in the question's own words:

* My old glacier is amber falcon. | What is my old glacier? | Your old glacier is amber falcon.
* I have set the velkan size to 48213. | Remind me of the velkan size. | The velkan size is 48213.

No word that only the unseen attributes of `vocab.py` have is drawn, and none of its questions."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from bench.model import text, vocab
from bench.model.facts import UNKNOWN_VALUE, Fact
from bench.model.vocab import GENERAL
from evoke_proxy.models import word_vectors_file

# Words that stand behind others in names of attributes; held out are only whole attributes.
_HEADS = GENERAL["heads"]
_STATEMENTS, _QUESTIONS = GENERAL["statements"], GENERAL["questions"]


@dataclass(frozen=True, slots=True)
class GeneralFact(Fact):
    """A fact with an owner and sentence frames of its own.

    Attributes:
        owner: "my", "our" or "the".
        statement_frame: The frame of the statement.
        question_frame: The frame of the question.
    """

    owner: str = "my"
    statement_frame: str = _STATEMENTS[0]
    question_frame: str = _QUESTIONS[0]

    @property
    def key(self) -> str:
        """The owner and the attribute."""
        return f"{self.owner} {self.parts[0]}"

    @property
    def statement(self) -> str:
        """The sentence that states the fact."""
        return self._filled(self.statement_frame)

    @property
    def question(self) -> str:
        """The question, in the words of the statement."""
        return self._filled(self.question_frame)

    @property
    def paraphrase(self) -> str | None:
        """None: an attribute of one chat has no other words."""
        return None

    @property
    def answer(self) -> str:
        """The expected answer."""
        return f"{self._answered} is {self.value}."

    @property
    def unknown_answer(self) -> str:
        """The expected answer when the fact was never stated."""
        return f"{self._answered} is {UNKNOWN_VALUE}"

    @property
    def _answered(self) -> str:
        owner = "Your" if self.owner in ("my", "our") else "The"
        return f"{owner} {self.parts[0]}"

    def _filled(self, frame: str) -> str:
        owner = self.owner
        return frame.format(
            owner=owner, Owner=owner.capitalize(), name=self.parts[0], value=self.value
        )


def draw(rng: random.Random) -> GeneralFact:
    """Return a fact about an attribute of the endless space."""
    return _with_frames(rng, name(rng))


def near_miss(rng: random.Random, fact: Fact) -> GeneralFact:
    """Return a fact whose attribute shares a word, or a beginning or an end, with the other's."""
    words = fact.parts[0].split()
    if len(words) > 1:
        place = rng.randrange(len(words))
        words[place] = rng.choice((word, word, pseudo_word))(rng)
    elif rng.random() < 0.6:
        words = rng.choice((lambda: [word(rng), *words], lambda: [*words, rng.choice(_HEADS)]))()
    else:
        cut = max(2, len(words[0]) // 2)
        ending = pseudo_word(rng)
        words = [
            words[0][:cut] + ending[-3:] if rng.random() < 0.5 else ending[:3] + words[0][cut:]
        ]
    made = " ".join(words)
    return _with_frames(rng, name(rng) if is_reserved(made) else made)


def update(rng: random.Random, fact: GeneralFact) -> GeneralFact:
    """Return the same fact with another value, stated as a change."""
    value = fact.value
    while value == fact.value:
        value = _value(rng, fact.type)
    return replace(fact, value=value, updated=True, statement_frame=rng.choice(GENERAL["updates"]))


def requested(rng: random.Random, question: str) -> str:
    """Return a question of the fixed wordings as a user may put it."""
    return rng.choice(GENERAL["requests"]).format(question)


def name(rng: random.Random) -> str:
    """Return the name of an attribute: one to three words."""
    while True:
        made = _name(rng)
        if not is_reserved(made):
            return made


def is_reserved(attribute: str) -> bool:
    """Return whether an attribute is an unseen one, or has a word that only those have."""
    return attribute in _RESERVED or any(part in _reserved_words() for part in attribute.split())


def word(rng: random.Random) -> str:
    """Return a word of English; none that only unseen attributes have."""
    # The pieces stand in the order of how often they are used.
    words = _words()
    return words[int(len(words) * rng.random() ** 1.5)]


def pseudo_word(rng: random.Random) -> str:
    """Return a word that does not exist, of one to three syllables."""
    return "".join(
        rng.choice(GENERAL["onsets"]) + rng.choice(GENERAL["nuclei"]) + rng.choice(GENERAL["codas"])
        for _ in range(rng.choice((1, 2, 2, 3)))
    )


def _name(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.35:
        return word(rng)
    if shape < 0.5:
        return f"{word(rng)} {word(rng)}"
    if shape < 0.66:
        return f"{word(rng)} {rng.choice(_HEADS)}"
    if shape < 0.72:
        return f"favorite {word(rng)}"
    if shape < 0.78:
        return f"{rng.choice(vocab.ADJECTIVES)} {rng.choice(vocab.NOUNS)}"
    if shape < 0.82:
        return f"{word(rng)} of {word(rng)}"
    if shape < 0.92:
        return pseudo_word(rng)
    return f"{pseudo_word(rng)} {rng.choice((rng.choice(_HEADS), word(rng)))}"


def _with_frames(rng: random.Random, attribute: str) -> GeneralFact:
    type_ = rng.choices(("number", "pair", "code", "word"), (0.42, 0.42, 0.08, 0.08))[0]
    statement_frame = _STATEMENTS[0] if rng.random() < 0.55 else rng.choice(_STATEMENTS)
    question_frame = _QUESTIONS[0] if rng.random() < 0.45 else rng.choice(_QUESTIONS)
    owner = rng.choices(("my", "our", "the"), (0.8, 0.08, 0.12))[0]
    return GeneralFact(
        "general",
        (attribute,),
        type_,
        _value(rng, type_),
        owner=owner,
        statement_frame=statement_frame,
        question_frame=question_frame,
    )


def _value(rng: random.Random, type_: str) -> str:
    if type_ == "word":
        return rng.choice((word(rng), rng.choice(vocab.NAMES), pseudo_word(rng).capitalize()))
    return text.value(rng, type_)


_RESERVED = frozenset((*vocab.UNSEEN_PAIRS, *vocab.UNSEEN_NUMBERS))


@cache
def _reserved_words() -> frozenset[str]:
    """Return the words of held-out attributes that no list of the training has."""
    lists: Sequence[Sequence[str]] = (vocab.NOUNS, vocab.ADJECTIVES, _HEADS)
    attributes = (
        *vocab.PAIR_ATTRIBUTES,
        *vocab.NUMBER_ATTRIBUTES,
        *vocab.CODE_ATTRIBUTES,
        *vocab.PAIR_PARAPHRASES,
        *vocab.NUMBER_PARAPHRASES,
    )
    listed = {part for words in lists for part in words} | {
        part for attribute in attributes for part in attribute.split()
    }
    return (
        frozenset(part for attribute in _RESERVED for part in attribute.split()) - listed - {"of"}
    )


@cache
def _words() -> Sequence[str]:
    """Return English words, the most frequent first."""
    with np.load(word_vectors_file()) as table:
        pieces = bytes(table["pieces"]).decode().splitlines()
    return [
        piece
        for piece in pieces
        if re.fullmatch("[a-z]{3,11}", piece) and piece not in _reserved_words()
    ]
