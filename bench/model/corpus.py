"""Chats of the second generation, the corpus of the bundled model.

Beyond the first: many facts, near misses, the same key in several files, updates, paraphrases.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.model import text, vocab
from bench.model.chat import ACK_W, SYSTEM_W, USER_W, Builder, Chat, Encoder
from bench.model.corpus_v1 import MEMORY, needles
from bench.model.facts import SAME_KEY, Fact, draw, file_name, near_miss, update

QUESTION_TOKENS = 42
MODES = ("dense", "drill", "multi", "needle", "sparse")


def chat(
    rng: random.Random, length: int, encode: Encoder, mode: str | None = None, unknown: float = 0.25
) -> Chat:
    """Return one chat of at most `length` tokens; `unknown` steers the share of "I don't know."."""
    builder = Builder(encode)
    mode = mode or rng.choices(MODES, (5, 3, 4, 1, 1))[0]
    _begin(rng, builder)
    unknown *= rng.choice((0.4, 1, 1.6))
    writer = _Writer(rng, builder, length, unknown)
    if mode in ("dense", "drill"):
        writer.dense(drill=mode == "drill")
    else:
        getattr(writer, mode)()
    return builder.finish(length, mode)


def _begin(rng: random.Random, builder: Builder) -> None:
    shape = rng.random()
    if shape < 0.45:
        builder.add("system", rng.choice(vocab.SYSTEM_PROMPTS), SYSTEM_W)
    elif shape < 0.53:
        drawn = [new_fact(rng, builder) for _ in range(2)]
        facts = {fact.key: fact for fact in drawn if fact.kind not in ("file", "env")}
        if facts:
            intro = rng.choice(vocab.SYSTEM_PROMPTS) + "\n" + rng.choice(MEMORY)
            builder.plant(rng, list(facts.values()), "system", (intro, ""), False, "\n")


def new_fact(rng: random.Random, builder: Builder, near: Fact | None = None) -> Fact:
    """Return a fact whose key is free, often a near miss of `near` when given."""
    for _ in range(50):
        if near is None:
            fact = draw(rng)
        else:
            fact = near_miss(rng, near) if rng.random() < 0.6 else draw(rng, near.kind)
        if not builder.used(fact.key):
            return fact
    while True:
        fact = draw(rng)
        if not builder.used(fact.key):
            return fact


def files_group(rng: random.Random, builder: Builder, count: int) -> list[Fact]:
    """Return settings of two or three files that share their keys."""
    paths = [file_name(rng) for _ in range(rng.choice((2, 2, 2, 3)))]
    keys = rng.sample(vocab.ENV_KEYS, rng.choice((1, 1, 2, 3)))
    pairs = [(key, path) for key in keys for path in paths]
    rng.shuffle(pairs)
    facts: dict[str, Fact] = {}
    for pair in pairs[: max(2, count)]:
        fact = draw(rng, "file", pair)
        fact.tag = SAME_KEY
        if not builder.used(fact.key):
            facts[fact.key] = fact
    return list(facts.values())


def pick(rng: random.Random, builder: Builder, count: int, group: float = 0.35) -> list[Fact]:
    """Return facts to plant together; with the chance `group` they are alike."""
    if rng.random() < group and count > 1:
        return _pick_alike(rng, builder, count)
    facts: list[Fact] = []
    while len(facts) < count:
        near: Fact | None = None
        if builder.facts and rng.random() < 0.2:
            near = rng.choice(list(builder.facts.values()))
        elif facts and rng.random() < 0.4:
            near = facts[0]
        fact = new_fact(rng, builder, near)
        if fact.key not in {other.key for other in facts}:
            facts.append(fact)
    return facts


def _pick_alike(rng: random.Random, builder: Builder, count: int) -> list[Fact]:
    base = new_fact(rng, builder)
    if base.kind == "file":
        group = files_group(rng, builder, count)
        if group:
            return group
    facts = {base.key: base}
    for _ in range(30):
        if len(facts) >= count:
            break
        fact = near_miss(rng, rng.choice(list(facts.values())))
        if not builder.used(fact.key):
            facts[fact.key] = fact
    chosen = list(facts.values())
    rng.shuffle(chosen)
    return chosen


def put(rng: random.Random, builder: Builder, facts: Sequence[Fact]) -> None:
    """Plant the facts in one of several shapes."""
    shape = rng.random()
    code = [fact for fact in facts if fact.kind in ("file", "env")]
    records = [fact for fact in facts if fact.kind == "tool"]
    rest = [fact for fact in facts if fact.kind not in ("file", "env", "tool")]
    if code:
        whole = rng.random() < 0.7 or len(code) < 2
        half = len(code) // 2
        for part in [code] if whole else [code[:half], code[half:]]:
            _put_code(rng, builder, part)
    if records:
        asked = ("Look it up.", "Check the record.", "Run the query.", "Show me the values.")
        builder.add("user", rng.choice(asked), USER_W)
        separator = rng.choice(("\n", " "))
        builder.plant(rng, records, "tool", acknowledge=False, separator=separator)
        builder.add("assistant", rng.choice(("Done.", "I found the record.")), ACK_W)
    if rest:
        _put_rest(rng, builder, rest, shape)


def _put_code(rng: random.Random, builder: Builder, facts: Sequence[Fact]) -> None:
    if rng.random() < 0.5:
        intro = rng.choice(("Here is the file:\n", "Contents:\n", "grep output:\n"))
        builder.plant(rng, facts, wrap=(intro, ""), separator="\n")
        return
    asked = ("Read the settings.", "Open the file.", "Show me the values.", "Show me the config.")
    builder.add("user", rng.choice(asked), USER_W)
    builder.plant(rng, facts, "tool", acknowledge=False, separator="\n")
    builder.add("assistant", rng.choice(("Done.", "I have read it.")), ACK_W)


def _put_rest(rng: random.Random, builder: Builder, facts: Sequence[Fact], shape: float) -> None:
    if shape < 0.1:
        role = rng.choice(("system", "user"))
        builder.plant(rng, facts, role, ("Recovered context:\n", ""), False, "\n")
    elif shape < 0.22:
        before = text.paragraph(rng, rng.choice((1, 2))) + " "
        builder.plant(rng, facts, wrap=(before, " " + text.paragraph(rng, 1)))
    else:
        builder.plant(rng, facts, separator=rng.choice((" ", "\n", " ")))


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
        if not left and every and rng.random() < 0.8:
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

    def _update(self) -> None:
        old = self.rng.choice(list(self.builder.facts.values()))
        new = update(self.rng, old)
        self.asked.discard(old.key)
        put(self.rng, self.builder, [new])

    def _plant(self, count: int, group: float = 0.35) -> None:
        put(self.rng, self.builder, pick(self.rng, self.builder, count, group))

    def dense(self, drill: bool) -> None:
        """Facts and questions in turns; a drill plants groups of facts that are alike."""
        share = self.rng.uniform(0.45, 0.7)
        updates = self.rng.choice((0, 0.15, 0.35, 0.55))
        while self._size < self.length - QUESTION_TOKENS:
            shape, left = self.rng.random(), len(self.builder.facts) - len(self.asked)
            if left == 0 or shape > share:
                self._dense_plant(shape, updates, drill)
            else:
                self._ask()

    def _dense_plant(self, shape: float, updates: float, drill: bool) -> None:
        rng, builder, length = self.rng, self.builder, self.length
        if self._size > length - 60 - QUESTION_TOKENS:
            return self._ask()
        if shape > 0.9 and builder.facts and self._size < length - 200:
            return builder.fill(rng)
        if builder.facts and rng.random() < updates:
            return self._update()
        count = rng.choice((2, 3, 4)) if drill else rng.choice((1, 1, 2, 3))
        if self._size + 45 * count + 30 + QUESTION_TOKENS > length:
            count = 1
        if self._size + 75 + QUESTION_TOKENS > length:
            return self._ask()
        if not (drill and count > 1 and rng.random() < 0.7):
            return self._plant(count, 1.0 if drill else 0.35)
        group = files_group(rng, builder, count)
        return put(rng, builder, group) if group else None

    def multi(self) -> None:
        """Up to 30 facts first, some updated, then the questions."""
        rng, builder, length = self.rng, self.builder, self.length
        most = rng.choice((5, 5, 8, 8, 12, 12, 20, 20, 30))
        total = max(2, min(int(length / 48), most))
        reserve, planted = min(total, 10) * 34 + 30, 0
        updates, fillers = rng.choice((0, 0.2, 0.4)), rng.choice((0.2, 0.5, 0.8))
        while planted < total and self._size < length - reserve - 40:
            count = min(total - planted, rng.choice((1, 1, 2, 3, 5)))
            if self._size + 26 * count > length - reserve:
                count = 1
            self._plant(count)
            planted += count
            if rng.random() < updates and self._size < length - reserve - 60:
                self._update()
            room = length - reserve - 26 * (total - planted) - 120
            if rng.random() < fillers and self._size < room:
                builder.fill(rng, rng.choice((1, 1, 2)))
        if rng.random() < 0.6:
            while self._size < length - reserve - 260:
                builder.fill(rng, rng.choice((1, 1, 3)))
        self._ask_until_full()

    def sparse(self) -> None:
        """A long unrelated chat with a fact, a question or an update now and then."""
        rng, builder = self.rng, self.builder
        if self.length < 300:
            self._plant(1)
        else:
            while self._size < self.length - 260 - QUESTION_TOKENS:
                if rng.random() < 0.2 or not builder.facts:
                    self._plant(1)
                elif rng.random() < 0.12:
                    self._ask()
                elif rng.random() < 0.1:
                    self._update()
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
