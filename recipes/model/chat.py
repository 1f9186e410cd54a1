"""Builds a chat token by token, with a loss weight for every token and the spans of questions.

Messages are tokenised one by one, which is exact because special tokens separate them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.model import text, vocab
from bench.model.facts import Fact

START, END = "<|im_start|>", "<|im_end|>\n"
HEAD = 3  # tokens of `<|im_start|>role\n`: every role name is one token
# A thought stands between these. The template writes the first, so the model learns what follows.
THINK, THOUGHT_END = "<think>\n", "\n</think>\n\n"

# Loss weights: what the user says teaches little, the answers to questions teach everything.
SYSTEM_W, USER_W, CHATTER_W, ACK_W, ANSWER_W = 0.02, 0.02, 0.06, 0.1, 1.0
FIRST_W = 3.0  # the value's first token decides which fact it is, or that there is none
Span = tuple[int, int]


class Encoding(Protocol):
    """The result of a tokenizer: token ids, and the character range of each."""

    ids: list[Any]
    offsets: list[Span]


Encoder = Callable[[str], Encoding]


@dataclass(frozen=True, slots=True)
class Question:
    """One question: token ranges of the answer, of the value in it and of the fact asked for.

    The answer begins with the thought where there is one; the value is then that of the thought.
    The value's range begins with the space before it. Where the fact was never told `fact` is None
    and the value "something I don't know".
    """

    asked: Fact
    paraphrased: bool
    answer: Span
    value: Span
    fact: Span | None

    @property
    def tags(self) -> Iterable[str]:
        """The running means of a training run that the answer counts in."""
        if self.fact is None:
            return ("unknown",)
        special = "updated" if self.asked.updated else "paraphrase" if self.paraphrased else None
        return (special or self.asked.kind, self.asked.type)


@dataclass(slots=True)
class Chat:
    """A finished chat: ids, one weight per token (as a target) and the questions inside it."""

    ids: list[Any]
    weights: list[float]
    questions: list[Question]


@dataclass(slots=True)
class Builder:
    """Collects the messages of one chat; `facts` and `spans` are the latest ones by key."""

    encode: Encoder
    ids: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)

    def add(
        self, role: str, said: str, weight: float, facts: Iterable[tuple[Fact, Span]] = ()
    ) -> tuple[int, Sequence[Span], int]:
        """Append a message; `facts` come with their character range in it.

        Returns the message's first token, the tokens' character offsets and the header's length.
        """
        encoding = self.encode(f"{START}{role}\n{said}{END}")
        base, header, count = len(self.ids), len(START) + len(role) + 1, len(encoding.ids)
        self.ids += encoding.ids
        inner = [weight] * (count - HEAD - 2)
        # The model learns to end what it says itself; the newline comes from the template.
        ends = max(weight, 0.3) if role == "assistant" else weight
        self.weights += [SYSTEM_W] * HEAD + inner + [ends, SYSTEM_W]
        for fact, (start, end) in facts:
            first, last = _overlapping(encoding.offsets, start + header, end + header)
            self.facts[fact.key], self.spans[fact.key] = fact, (base + first, base + last)
        return base, encoding.offsets, header

    def tell(
        self,
        facts: Sequence[Fact],
        role: str = "user",
        before: str = "",
        after: str = "",
        separator: str = " ",
    ) -> None:
        """Append a message that states these facts one after the other."""
        said, spans = before, []
        for index, fact in enumerate(facts):
            said += separator if index else ""
            spans.append((fact, (len(said), len(said) + len(fact.statement))))
            said += fact.statement
        self.add(role, said + after, USER_W, spans)

    def ask(self, fact: Fact, question: str, thinking: bool = False) -> None:
        """Append a question and its answer; `fact` needs its value only when it was stated.

        With `thinking` a thought precedes the answer: what is asked for, and the answer itself.
        """
        self.add("user", question, USER_W)
        span = self.spans.get(fact.key)
        said = fact.answer if span else fact.unknown_answer
        before = f"{THINK}The user needs {_name(fact)}. " if thinking else ""
        whole = f"{before}{said}{THOUGHT_END}{said}" if thinking else said
        base, offsets, header = self.add("assistant", whole, ANSWER_W)
        first = base + (
            _overlapping(offsets, header + len(THINK), header + len(whole))[0] if thinking else HEAD
        )
        self.weights[base + HEAD : first] = [0.0] * (first - base - HEAD)
        header += len(before)
        space = len(fact.answer.removesuffix(".")) - len(fact.value) - 1
        value = _overlapping(offsets, header + space, header + len(said.removesuffix(".")))
        value = (base + value[0], base + value[1])
        # A number's space is a token, and says already that there is a number.
        for index in range(value[0], value[0] + (2 if span and fact.type == "number" else 1)):
            self.weights[index] = FIRST_W
        answer = (first, len(self.ids) - 1)
        paraphrased = question == fact.paraphrase
        self.questions.append(Question(fact, paraphrased, answer, value, span))

    def fill(self, rng: random.Random, sentences: int = 0) -> None:
        """Append an unrelated exchange."""
        user, assistant = text.filler(rng, sentences)
        self.add("user", user, USER_W)
        self.add("assistant", assistant, CHATTER_W)

    def acknowledge(self, said: str = vocab.FACT_REPLY) -> None:
        """Append the assistant's answer to a message that was no question."""
        self.add("assistant", said, ACK_W)

    def finish(self, length: int) -> Chat:
        """Return the chat cut to `length` tokens; questions beyond the cut are left out."""
        count = min(length, len(self.ids))
        whole = [question for question in self.questions if question.answer[1] < count]
        return Chat(self.ids[:count], self.weights[:count], whole)


def _name(fact: Fact) -> str:
    """Return what a thought calls a fact: the words of the question in those of the statement."""
    return fact.question.removeprefix("What is ").removesuffix("?")


def _overlapping(offsets: Sequence[Span], start: int, end: int) -> Span:
    """Return the range of tokens behind the header that share a character with [start, end)."""
    touched = [
        index
        for index in range(HEAD, len(offsets))
        if offsets[index][1] > start and offsets[index][0] < end
    ]
    return touched[0], touched[-1] + 1
