"""Chats of the first generation: they train the tokenizer and were the first model's corpus."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from bench.model import text, vocab
from bench.model.chat import ACK_W, SYSTEM_W, USER_W, Builder, Chat, Encoder, Span
from bench.model.facts import Fact
from bench.model.facts_v1 import draw

QUESTION_TOKENS = 34  # a question and its answer are at most about this long
MEMORY = ("Known facts:\n", "Memory:\n", "Recovered context:\n")


def chat(
    rng: random.Random, length: int, encode: Encoder, mode: str | None = None, unknown: float = 0.12
) -> Chat:
    """Return one chat of at most `length` tokens; `unknown` is the share of unknown questions."""
    builder = Builder(encode, first_generation=True)
    modes = ("dense", "multi", "needle", "sparse")
    mode = mode or rng.choices(modes, (6, 3, 1, 1))[0]
    begin(rng, builder)
    writer = _Writer(rng, builder, length, unknown)
    getattr(writer, mode)()
    return builder.finish(length, mode)


def begin(rng: random.Random, builder: Builder) -> None:
    """Add the system message: in 45 % of the chats plain, in 10 % with facts, else none."""
    shape = rng.random()
    if shape < 0.45:
        builder.add("system", rng.choice(vocab.SYSTEM_PROMPTS), SYSTEM_W)
    elif shape < 0.55:
        drawn = [new_fact(rng, builder) for _ in range(2)]
        facts = {fact.key: fact for fact in drawn if fact.kind not in ("file", "env")}
        if facts:
            intro = rng.choice(vocab.SYSTEM_PROMPTS) + "\n" + rng.choice(MEMORY)
            builder.plant(rng, list(facts.values()), "system", (intro, ""), False, "\n")


def new_fact(rng: random.Random, builder: Builder, near: Fact | None = None) -> Fact:
    """Return a fact whose key is free, of the kind of `near` when given."""
    for _ in range(50):
        fact = draw(rng, near.kind if near else None)
        if not builder.used(fact.key):
            break
    return fact


def plant_some(rng: random.Random, builder: Builder, count: int) -> None:
    """Plant that many facts in one of several shapes."""
    shape, facts = rng.random(), []
    while len(facts) < count:
        fact = new_fact(rng, builder, facts[0] if facts and rng.random() < 0.5 else None)
        if fact.key not in {other.key for other in facts} and not builder.used(fact.key):
            facts.append(fact)
    code = [fact for fact in facts if fact.kind in ("file", "env")]
    records = [fact for fact in facts if fact.kind == "tool"]
    rest = [fact for fact in facts if fact.kind not in ("file", "env", "tool")]
    if code:
        _plant_code(rng, builder, code)
    if records:
        asked = rng.choice(("Look it up.", "Check the record.", "Run the query."))
        builder.add("user", asked, USER_W)
        separator = rng.choice(("\n", " "))
        builder.plant(rng, records, "tool", acknowledge=False, separator=separator)
        builder.add("assistant", rng.choice(("Done.", "I found the record.")), ACK_W)
    if rest:
        _plant_rest(rng, builder, rest, shape)


def _plant_code(rng: random.Random, builder: Builder, facts: list[Fact]) -> None:
    if rng.random() < 0.5:
        intro = rng.choice(("Here is the file:\n", "Contents:\n", "grep output:\n"))
        builder.plant(rng, facts, wrap=(intro, ""), separator="\n")
        return
    asked = rng.choice(("Read the settings.", "Open the file.", "Show me the values."))
    builder.add("user", asked, USER_W)
    builder.plant(rng, facts, "tool", acknowledge=False, separator="\n")
    builder.add("assistant", rng.choice(("Done.", "I have read it.")), ACK_W)


def _plant_rest(rng: random.Random, builder: Builder, facts: list[Fact], shape: float) -> None:
    if shape < 0.1:
        role = rng.choice(("system", "user"))
        builder.plant(rng, facts, role, ("Recovered context:\n", ""), False, "\n")
    elif shape < 0.25:
        before = text.paragraph(rng, rng.choice((1, 2))) + " "
        builder.plant(rng, facts, wrap=(before, " " + text.paragraph(rng, 1)))
    else:
        builder.plant(rng, facts, separator=rng.choice((" ", "\n", " ")))


def needles(rng: random.Random, builder: Builder, facts: list[Fact], sentences: int) -> None:
    """Add one long message of that many sentences with the facts strewn in."""
    places = sorted(rng.randrange(sentences + 1) for _ in facts)
    said, spans, planted = "", [], 0
    for index in range(sentences + 1):
        while planted < len(facts) and places[planted] == index:
            statement = facts[planted].statement(rng)
            spans.append((facts[planted], (len(said), len(said) + len(statement))))
            said += statement + " "
            planted += 1
        if index < sentences:
            said += text.sentence(rng) + " "
    said = said[:-1] if said.endswith(". ") else said.rstrip()
    builder.add("user", said, USER_W, spans)
    builder.add("assistant", rng.choice(("I have read it.", "OK.", "Got it.")), ACK_W)


@dataclass(slots=True)
class _Writer:
    rng: random.Random
    builder: Builder
    length: int
    unknown: float
    asked: set[str] = field(default_factory=set)

    @property
    def _size(self) -> int:
        return len(self.builder.ids)

    def _ask(self) -> None:
        rng, every = self.rng, list(self.builder.facts.values())
        fresh = rng.random() < 0.9
        left = [fact for fact in every if fact.key not in self.asked] if fresh else every
        if not left and every and rng.random() < 0.75:
            left = every
        if rng.random() < self.unknown or not left:
            near = rng.choice(every) if every and rng.random() < 0.6 else None
            self.builder.ask(rng, new_fact(rng, self.builder, near), known=False)
        else:
            fact = rng.choice(left)
            self.asked.add(fact.key)
            self.builder.ask(rng, fact)

    def _ask_until_full(self) -> None:
        while self._size < self.length - QUESTION_TOKENS:
            self._ask()

    def dense(self) -> None:
        """Facts and questions in turns, hardly anything else."""
        share = self.rng.uniform(0.35, 0.6)
        while self._size < self.length - QUESTION_TOKENS:
            shape, left = self.rng.random(), len(self.builder.facts) - len(self.asked)
            if left == 0 or shape > share:
                self._dense_plant(shape)
            else:
                self._ask()

    def _dense_plant(self, shape: float) -> None:
        if self._size > self.length - 60 - QUESTION_TOKENS:
            return self._ask()
        if shape > 0.9 and self.builder.facts and self._size < self.length - 200:
            return self.builder.fill(self.rng)
        count = self.rng.choice((1, 1, 2, 3))
        if self._size + 45 * count + 30 + QUESTION_TOKENS > self.length:
            count = 1
        if self._size + 75 + QUESTION_TOKENS > self.length:
            return self._ask()
        return plant_some(self.rng, self.builder, count)

    def multi(self) -> None:
        """Many facts first, then the questions."""
        rng, builder, length = self.rng, self.builder, self.length
        most = rng.choice((3, 4, 5, 5, 6, 8, 12, 16, 24, 32))
        total = max(1, min(int(length / 90), most))
        reserve, planted = total * 30 + 60, 0
        while planted < total and self._size < length - reserve - 100:
            count = min(total - planted, rng.choice((1, 1, 2, 3, 5)))
            if self._size + 45 * count > length - reserve:
                break
            plant_some(rng, builder, count)
            planted += count
            if rng.random() < 0.5 and self._size < length - reserve - 250:
                builder.fill(rng)
        if not builder.facts:
            plant_some(rng, builder, 1)
        while self._size < length - reserve - 260:
            builder.fill(rng, rng.choice((1, 1, 3)))
        self._ask_until_full()

    def sparse(self) -> None:
        """A long unrelated chat with a fact now and then."""
        rng, builder = self.rng, self.builder
        if self.length < 300:
            plant_some(rng, builder, 1)
        else:
            while self._size < self.length - 260 - QUESTION_TOKENS:
                if rng.random() < 0.2 or not builder.facts:
                    plant_some(rng, builder, 1)
                elif rng.random() < 0.1:
                    self._ask()
                else:
                    builder.fill(rng, rng.choice((1, 2)))
        self._ask_until_full()

    def needle(self) -> None:
        """One long message with up to three facts in it."""
        rng, builder, facts = self.rng, self.builder, {}
        count = rng.choice((1, 1, 1, 2, 3))
        while len(facts) < count:
            fact = new_fact(rng, builder)
            if fact.kind not in ("file", "env"):
                facts[fact.key] = fact
        sentences = max(2, int((self.length - self._size - 45 * count - 80) / 17))
        needles(rng, builder, list(facts.values()), sentences)
        self._ask_until_full()


class _Characters:
    """An encoding with one "token" a character: the chat as plain text."""

    def __init__(self, said: str) -> None:
        self.ids: list[str] = list(said)
        self.offsets: list[Span] = [(index, index + 1) for index in range(len(said))]


def raw_text(rng: random.Random, characters: int) -> str:
    """Return a chat as text, for training and checking the tokenizer."""
    return "".join(chat(rng, characters, _Characters).ids)
