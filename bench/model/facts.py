"""Facts: how each kind is stated, asked for and answered; near misses, updates and abstention.

There are few kinds with fixed wording, so that a small model can be nearly perfect on them:

* `my`: My badge number is 48213. / What is my badge number? / Your badge number is 48213.
* `para`: My residence is amber falcon. / Where do I live? / Your residence is amber falcon.
* `file`: config.env: PORT = 48213 / What is PORT in config.env? / config.env: PORT = 48213

An answer names the key before the value, also when the value was never stated: "Your badge number
is something I don't know." So the model searches for the fact before it must decide."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.model import text, vocab

KINDS = ("my", "para", "file")
TYPES = ("number", "pair", "code")
UNKNOWN_VALUE = f"something {vocab.UNKNOWN}"
_SHARES = (0.5, 0.22, 0.28)
_STANDARD: Mapping[str, Sequence[str]] = {
    "number": vocab.NUMBER_ATTRIBUTES,
    "pair": vocab.PAIR_ATTRIBUTES,
    "code": vocab.CODE_ATTRIBUTES,
}
_PARAPHRASES: Mapping[str, Mapping[str, str]] = {
    "number": vocab.NUMBER_PARAPHRASES,
    "pair": vocab.PAIR_PARAPHRASES,
    "code": {},
}
Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact. `parts` name it: an attribute, or a file and a setting."""

    kind: str
    parts: Parts
    type: str
    value: str
    updated: bool = False

    @property
    def key(self) -> str:
        """The subject of the fact; facts with one key are the same fact at different times."""
        if self.kind == "file":
            return f"{self.parts[0]}: {self.parts[1]}"
        return f"my {self.parts[0]}"

    @property
    def statement(self) -> str:
        """The sentence or the line that states the fact."""
        key, verb = self._subject("My"), " now" if self.updated else ""
        if self.kind == "file":
            return f"{key} is now {self.value}" if self.updated else f"{key} = {self.value}"
        return f"{key} is{verb} {self.value}."

    @property
    def question(self) -> str:
        """The question in the words of the statement."""
        if self.kind == "file":
            return f"What is {self.parts[1]} in {self.parts[0]}?"
        return f"What is {self.key}?"

    @property
    def paraphrase(self) -> str | None:
        """A question that shares no content word with the fact, for facts that have one."""
        return _PARAPHRASES[self.type].get(self.parts[0]) if self.kind == "para" else None

    @property
    def answer(self) -> str:
        """The expected answer; it ends with the value, or with the value and a full stop."""
        if self.kind == "file":
            return f"{self.key} = {self.value}"
        return f"{self._subject('Your')} is {self.value}."

    @property
    def unknown_answer(self) -> str:
        """The expected answer when the fact was never stated."""
        verb = "=" if self.kind == "file" else "is"
        return f"{self._subject('Your')} {verb} {UNKNOWN_VALUE}"

    def _subject(self, owner: str) -> str:
        return self.key if self.kind == "file" else f"{owner} {self.parts[0]}"


def draw(rng: random.Random, kind: str | None = None, type_: str | None = None) -> Fact:
    """Return a fact with a fresh value, of a kind and a value type where given.

    There are no paraphrases of codes: for them `para` gives a fact of kind `my`.
    """
    kind = kind or rng.choices(KINDS, _SHARES)[0]
    if kind == "file":
        return setting(rng, file_name(rng), _setting_name(rng, type_))
    if kind == "para" and type_ != "code":
        chosen = type_ or rng.choice(("number", "pair", "pair"))
        return _fresh(rng, kind, (rng.choice(list(_PARAPHRASES[chosen])),), chosen)
    chosen = type_ or rng.choices(TYPES, (0.4, 0.35, 0.25))[0]
    return _fresh(rng, "my", (rng.choice(_STANDARD[chosen]),), chosen)


def setting(rng: random.Random, path: str, name: str) -> Fact:
    """Return a line of a file with a fresh value."""
    type_ = "code" if name in vocab.CODE_SETTINGS else "number"
    return _fresh(rng, "file", (path, name), type_)


def file_name(rng: random.Random) -> str:
    """Return the name of a file."""
    return rng.choice(vocab.FILE_STEMS) + rng.choice(vocab.FILE_SUFFIXES)


def near_miss(rng: random.Random, fact: Fact) -> Fact:
    """Return a fact of the same frame: another attribute, another file or another setting."""
    if fact.kind != "file":
        return draw(rng, fact.kind, fact.type)
    if rng.random() < 0.5:
        return setting(rng, file_name(rng), fact.parts[1])
    return setting(rng, fact.parts[0], rng.choice(vocab.SETTINGS))


def update(rng: random.Random, fact: Fact) -> Fact:
    """Return the same fact with another value, stated as a change ("is now")."""
    new = _fresh(rng, fact.kind, fact.parts, fact.type)
    return replace(new, updated=True) if new.value != fact.value else update(rng, fact)


def abstains(answer: str) -> bool:
    """Return whether the answer says that the fact was never stated."""
    return answer.strip().endswith(vocab.UNKNOWN)


def _setting_name(rng: random.Random, type_: str | None) -> str:
    if type_ == "code":
        return rng.choice(vocab.CODE_SETTINGS)
    if type_ is None:
        return rng.choice(vocab.SETTINGS)
    return rng.choice([name for name in vocab.SETTINGS if name not in vocab.CODE_SETTINGS])


def _fresh(rng: random.Random, kind: str, parts: Parts, type_: str) -> Fact:
    return Fact(kind, parts, type_, text.value(rng, type_))
