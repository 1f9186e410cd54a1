"""Builds one chat token by token, with a loss weight for every token and the questions' places.

Messages are tokenised one by one; special tokens separate them, so that is exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.model import text, vocab
from bench.model.facts import UPDATED, Fact, Span

START, END = "<|im_start|>", "<|im_end|>\n"
HEAD = 3  # tokens of `<|im_start|>role\n`: every role name is one token

# Loss weights: what the user says teaches little, the answers to questions teach everything.
SYSTEM_W, USER_W, CHATTER_W, ACK_W, ANSWER_W = 0.02, 0.03, 0.06, 0.1, 1.0
FIRST_KNOWN_W, FIRST_UNKNOWN_W = 4.0, 3.0  # the first token decides known or "I don't know."
FIRST_V1_W = 3.0


class Encoding(Protocol):
    """What a tokenizer returns: token ids and the character range of each."""

    ids: list[Any]
    offsets: list[Span]


Encoder = Callable[[str], Encoding]


@dataclass(slots=True)
class Question:
    """One question: token ranges of the answer, of the value in it and of the fact asked for."""

    key: str
    kind: str
    known: bool
    answer: Span
    text: str
    value: str | None
    asked: str
    message: int
    tag: int
    value_span: Span | None = None
    fact: Span | None = None
    distance: int = 0


@dataclass(slots=True)
class Chat:
    """A finished chat: ids, one weight per token (as a target) and the questions inside it."""

    ids: list[Any]
    weights: list[float]
    questions: list[Question]
    mode: str = ""


@dataclass(slots=True)
class Builder:
    """Collects the messages of one chat."""

    encode: Encoder
    first_generation: bool = False
    ids: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)

    def add(
        self, role: str, said: str, weight: float, facts: Iterable[tuple[Fact, Span]] = ()
    ) -> tuple[int, list[Span], int]:
        """Append a message; `facts` come with their character range in it.

        Returns the message's first token, the tokens' character offsets and the header's length.
        """
        encoding = self.encode(f"{START}{role}\n{said}{END}")
        base, header, count = len(self.ids), len(START) + len(role) + 1, len(encoding.ids)
        self.ids += encoding.ids
        self.weights += self._message_weights(role, said, weight, count)
        self.messages.append({"role": role, "content": said})
        for fact, (start, end) in facts:
            first, last = _tokens(encoding.offsets, start + header, end + header)
            fact.span = (base + first, base + last)
            self.facts[fact.key] = fact
        return base, encoding.offsets, header

    def _message_weights(self, role: str, said: str, weight: float, count: int) -> list[float]:
        weights = [weight] * count
        for index in range(min(HEAD, count)):
            weights[index] = SYSTEM_W
        weights[-1] = SYSTEM_W
        if role == "assistant":
            weights[-2] = max(weight, 0.3)
        if weight == ANSWER_W and count > HEAD:
            weights[HEAD] = self._first_weight(said)
        return weights

    def _first_weight(self, said: str) -> float:
        if self.first_generation:
            return FIRST_V1_W
        return FIRST_UNKNOWN_W if said == vocab.UNKNOWN else FIRST_KNOWN_W

    def plant(
        self,
        rng: random.Random,
        facts: Sequence[Fact],
        role: str = "user",
        wrap: tuple[str, str] = ("", ""),
        acknowledge: bool = True,
        separator: str = " ",
    ) -> None:
        """Append a message that tells these facts, and the assistant's acknowledgement."""
        said, spans = wrap[0], []
        for index, fact in enumerate(facts):
            said += separator if index else ""
            statement = fact.statement(rng)
            spans.append((fact, (len(said), len(said) + len(statement))))
            said += statement
        self.add(role, said + wrap[1], USER_W, spans)
        if acknowledge:
            self.add("assistant", rng.choice(vocab.ACKNOWLEDGEMENTS), ACK_W)

    def ask(self, rng: random.Random, fact: Fact, known: bool = True) -> None:
        """Append a question and its answer: the fact's, or "I don't know." when not `known`."""
        asked = fact.question(rng)
        self.add("user", asked, USER_W)
        said = fact.answer if known else vocab.UNKNOWN
        base, offsets, header = self.add("assistant", said, ANSWER_W)
        span, value = (base + HEAD, len(self.ids) - 1), fact.value if known else None
        place, tag = len(self.messages) - 1, fact.tag
        question = Question(fact.key, fact.kind, known, span, said, value, asked, place, tag)
        if known and fact.span:
            start = header + said.rindex(fact.value)
            first, last = _overlapping(offsets, start, start + len(fact.value))
            question.value_span = (base + first, base + last)
            question.fact, question.distance = fact.span, base + HEAD - fact.span[0]
        self.questions.append(question)

    def fill(self, rng: random.Random, scale: float = 1.0) -> None:
        """Append an unrelated exchange."""
        user, assistant = text.filler(rng, scale)
        self.add("user", user, USER_W)
        self.add("assistant", assistant, CHATTER_W)

    def used(self, key: str) -> bool:
        """Return whether a fact of that key was planted or asked for."""
        return key in self.facts or any(question.key == key for question in self.questions)

    def updated(self) -> list[Fact]:
        """Return the facts whose planted value replaced an earlier one."""
        return [fact for fact in self.facts.values() if fact.tag == UPDATED]

    def finish(self, length: int, mode: str) -> Chat:
        """Return the chat cut to `length` tokens; questions beyond the cut are left out."""
        count = min(length, len(self.ids))
        whole = [question for question in self.questions if question.answer[1] < count]
        return Chat(self.ids[:count], self.weights[:count], whole, mode)


def _tokens(offsets: Sequence[Span], start: int, end: int) -> Span:
    """Return the range of tokens from the first that ends after `start` to the last before `end`.

    The end token is the first that begins at or after `end`.
    """
    count = len(offsets)
    first = next(index for index in range(count) if offsets[index][1] > start)
    last = next((index for index in range(first, count) if offsets[index][0] >= end), count)
    return first, last


def _overlapping(offsets: Sequence[Span], start: int, end: int) -> Span:
    """Return the range of tokens behind the header that share a character with [start, end)."""
    touched = [
        index
        for index in range(HEAD, len(offsets))
        if offsets[index][1] > start and offsets[index][0] < end
    ]
    return touched[0], touched[-1] + 1
