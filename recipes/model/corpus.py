"""Generates training chats: facts are stated, read from files, changed and asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.model import facts, text, vocab
from bench.model.facts import Fact
from recipes.model.chat import SYSTEM_W, USER_W, Builder, Chat, Encoder

QUESTION_TOKENS, THOUGHT_TOKENS = 44, 36
FACT_TOKENS = 26  # told in a message of its own, with the answer to it
_MAX_STATED = 40  # of about 65 facts that are not settings of files
UNKNOWN_SHARE = 0.2
MODES = {"dense": 5, "many": 5, "needle": 2, "sparse": 2}


def chat(rng: random.Random, length: int, encode: Encoder, thinking: float = 0.0) -> Chat:
    """Return one chat of at most `length` tokens; a share `thinking` of the answers has a thought.

    A share UNKNOWN_SHARE of the questions is answered by "I don't know.".
    """
    writer = Writer(rng, Builder(encode), length, thinking)
    if rng.random() < 0.6:
        writer.builder.add("system", rng.choice(vocab.SYSTEM_PROMPTS), SYSTEM_W)
    getattr(writer, rng.choices(list(MODES), list(MODES.values()))[0])()
    return writer.builder.finish(length)


@dataclass(slots=True)
class Writer:
    """Writes one chat of a mode: `dense`, `many`, `needle` or `sparse`."""

    rng: random.Random
    builder: Builder
    length: int
    thinking: float
    asked: set[str] = field(default_factory=set)

    @property
    def _room(self) -> int:
        reserved = QUESTION_TOKENS + (THOUGHT_TOKENS if self.thinking else 0)
        return self.length - len(self.builder.ids) - reserved

    def dense(self) -> None:
        """Facts and questions in turns, an update or an unrelated exchange now and then."""
        rng, updates = self.rng, self.rng.choice((0.1, 0.3, 0.5))
        while self._room > 0:
            left = len(self.builder.facts) - len(self.asked)
            if self._room < 120 and self.builder.facts or (left and rng.random() < 0.6):
                self._ask()
            elif self.builder.facts and rng.random() < updates:
                self._update()
            elif self.builder.facts and rng.random() < (0.15 if self.length < 1500 else 0.5):
                self.builder.fill(rng)
            else:
                self._tell(rng.choice((1, 1, 2, 3)))

    def many(self) -> None:
        """Up to 40 facts first, some of them updated, unrelated turns between; then questions."""
        rng = self.rng
        total = max(2, min(self.length // 55, rng.choice((5, 8, 12, 20, 30, 40))))
        reserve = min(total, 12) * 34
        updates, fills = rng.choice((0, 0.2, 0.4)), rng.choice((0, 0.2, 0.5, 0.8))
        while len(self.builder.facts) < total and self._room > reserve + 100:
            self._tell(min(total - len(self.builder.facts), rng.choice((1, 1, 2, 3))))
            left = self._room - reserve - FACT_TOKENS * (total - len(self.builder.facts))
            if rng.random() < updates and left > 100:
                self._update()
            if rng.random() < fills and left > 250:
                self.builder.fill(rng, rng.choice((0, 0, 8)))
        if rng.random() < 0.5:
            while self._room > reserve + 250:
                self.builder.fill(rng, rng.choice((0, 15)))
        self._ask_until_full()

    def sparse(self) -> None:
        """A long unrelated chat with a fact, a question or an update now and then."""
        rng = self.rng
        self._tell(1)
        while self._room > 400:
            shape = rng.random()
            if shape < 0.2:
                self._tell(rng.choice((1, 1, 2)))
            elif shape < 0.3:
                self._ask()
            elif shape < 0.36:
                self._update()
            else:
                self.builder.fill(rng, rng.choice((0, 8, 15)))
        self._ask_until_full()

    def needle(self) -> None:
        """Up to three facts inside long messages."""
        rng = self.rng
        for _ in range(rng.choice((1, 1, 2, 3))):
            if self._room < 150:
                break
            room = max(1, (self._room - 120) // 12)  # sentences
            before = rng.randrange(min(room, 30) + 1)
            after = rng.randrange(min(room - before, 30) + 1)
            fact = self._new(kinds=("my", "my", "para"))
            self.builder.tell(
                [fact],
                before=text.paragraph(rng, before) + " " * bool(before),
                after=" " * bool(after) + text.paragraph(rng, after),
            )
            self.builder.acknowledge(vocab.CHAT_REPLY)
        while self._room > 400 and rng.random() < 0.9:
            self.builder.fill(rng, rng.choice((8, 15)))
        self._ask_until_full()

    def _ask_until_full(self) -> None:
        """Ask for every fact, then tell and ask for more."""
        while self._room > 0:
            new = self._room > 150 and len(self.asked) >= len(self.builder.facts)
            if new and self.rng.random() < 0.6:
                self._tell(self.rng.choice((1, 2, 3)))
            else:
                self._ask()

    def _ask(self) -> None:
        rng, stated = self.rng, list(self.builder.facts.values())
        if rng.random() < UNKNOWN_SHARE or not stated:
            near = rng.choice(stated) if stated and rng.random() < 0.6 else None
            fact = self._new(near)
        else:
            fresh = [fact for fact in stated if fact.key not in self.asked]
            fact = rng.choice(fresh if fresh and rng.random() < 0.9 else stated)
            self.asked.add(fact.key)
        question = fact.question
        if fact.paraphrase and rng.random() < 0.75:
            question = fact.paraphrase
        # Without thoughts nothing is drawn, and a seed gives the chats of the bundled model.
        self.builder.ask(fact, question, self.thinking > 0 and rng.random() < self.thinking)

    def _new(self, near: Fact | None = None, kinds: Sequence[str] = facts.KINDS) -> Fact:
        """Return a fact that was not stated yet, a near miss of another where one is given."""
        for _ in range(20):
            if near is not None:
                fact = facts.near_miss(self.rng, near)
            else:
                kind = None if kinds is facts.KINDS else self.rng.choice(kinds)
                fact = facts.draw(self.rng, kind)
            if fact.key not in self.builder.facts:
                return fact
        return self._new(None, ("file",))  # of files there are always new ones

    def _tell(self, count: int) -> None:
        """Tell new facts in one message, or a file or two of them."""
        rng, stated = self.rng, [f for f in self.builder.facts.values() if f.kind != "file"]
        if rng.random() < 0.35 or len(stated) > _MAX_STATED:
            return self._read(rng.choice((1, 2, 2)), max(1, min(count, self._room // 90)))
        chosen: dict[str, Fact] = {}
        for _ in range(count):
            near = rng.choice(stated) if stated and rng.random() < 0.3 else None
            fact = self._new(near, ("my", "my", "para"))
            chosen[fact.key] = fact
        before = rng.choice(vocab.STATEMENT_PREFIXES)
        self.builder.tell(list(chosen.values()), before=before)
        return self.builder.acknowledge()

    def _read(self, files: int, settings: int) -> None:
        """Read files that have the same settings."""
        rng, names = self.rng, self.rng.sample(vocab.SETTINGS, settings)
        for path in {facts.file_name(rng): None for _ in range(files)}:
            lines = [facts.setting(rng, path, name) for name in names]
            rng.shuffle(lines)
            fresh = [line for line in lines if line.key not in self.builder.facts]
            if fresh:
                self._show(path, fresh)

    def _show(self, path: str, lines: Sequence[Fact], suffix: str = "") -> None:
        self.builder.add("user", f"Read {path}{suffix}.", USER_W)
        self.builder.tell(lines, "tool", separator="\n")
        self.builder.acknowledge(vocab.FILE_REPLY)

    def _update(self) -> None:
        """Change a fact that was stated; a setting is changed by reading its file again."""
        rng = self.rng
        every = list(self.builder.facts.values())
        once = [fact for fact in every if not fact.updated]
        if not once and rng.random() < 0.9:  # a second change of one fact is rare
            return self._tell(1)
        old = rng.choice(once if once and rng.random() < 0.97 else every)
        self.asked.discard(old.key)
        if old.kind != "file":
            self.builder.tell([facts.update(rng, old)])
            return self.builder.acknowledge()
        same = [f for f in every if f.kind == "file" and f.parts[0] == old.parts[0]][:6]
        lines = [self._reread(fact, fact is old) for fact in same]
        return self._show(old.parts[0], lines, " again")

    def _reread(self, fact: Fact, changed: bool) -> Fact:
        if changed or (not fact.updated and self.rng.random() < 0.3):
            self.asked.discard(fact.key)
            return facts.update(self.rng, fact)
        return replace(fact)
