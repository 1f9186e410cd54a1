"""Reads the templates of the cases: `tuning.toml`, `tuning_more.toml` and `reporting.toml`.

A file has these tables:

* `replies`: the assistant's answers to what the user tells
* `openings`: how a turn with several questions begins
* `pools`: names by pool. `{city}` in a text stands for a name of the pool `city`; `{city2}` stands
  for another one of the same pool. The pools `number`, `code`, `time`, `amount` and `size` are
  drawn.
* `scene`: `kind`; `say`, the messages that the answer needs, in their order; `old`, messages before
  these that they replace; `other`, similar messages that the answer does not need; `rivals`, how
  many messages like the first of `say`, about others, are added; `passage`, whether the first of
  `say` stands inside a long text; `before`, exchanges directly before the question; `ask`, the
  question
* `pair`: a message and the question about it, for turns with several questions
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SPLITS = ("tuning", "reporting")
# Further templates of a split: for tuning, of some kinds.
TEMPLATES = ("tuning", "tuning_more", "reporting")
# Kinds whose questions are put together from pairs, and how many of them.
QUERIES: Mapping[str, int] = {"multi-query 4": 4, "multi-query 12": 12}
_SLOT = re.compile(r"\{([a-z]+)(\d*)\}")


@dataclass(frozen=True, slots=True)
class Scene:
    """One template of a case; the module's text explains the fields."""

    kind: str
    say: Sequence[str]
    ask: str
    old: Sequence[str] = ()
    other: Sequence[str] = ()
    before: Sequence[Sequence[str]] = ()
    rivals: int = 0
    passage: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """A message and the question about it."""

    say: str
    ask: str


@dataclass(frozen=True, slots=True)
class Templates:
    """All templates of one split.

    Attributes:
        name: One of `TEMPLATES`.
        replies: The assistant's answers to what the user tells.
        openings: How a turn with several questions begins.
        pools: Names by pool.
        scenes: The templates of all kinds except those of `QUERIES`.
        pairs: The templates of the kinds of `QUERIES`.
    """

    name: str
    replies: Sequence[str]
    openings: Sequence[str]
    pools: Mapping[str, Sequence[str]]
    scenes: Sequence[Scene]
    pairs: Sequence[Pair]

    @property
    def split(self) -> str:
        """The split that the templates belong to, one of `SPLITS`."""
        return self.name.partition("_")[0]

    @property
    def kinds(self) -> list[str]:
        """All kinds, in the order of the file; those of `QUERIES` come last."""
        of_scenes = dict.fromkeys(scene.kind for scene in self.scenes)
        return [*of_scenes, *(QUERIES if self.pairs else ())]

    def scenes_of(self, kind: str) -> list[Scene]:
        """Return the scenes of one kind."""
        return [scene for scene in self.scenes if scene.kind == kind]


def read(name: str) -> Templates:
    """Return one of `TEMPLATES`."""
    tables: Mapping[str, Any] = tomllib.loads((HERE / f"{name}.toml").read_text("utf-8"))
    return Templates(
        name=name,
        replies=tables["replies"],
        openings=tables["openings"],
        pools=tables["pools"],
        scenes=[Scene(**each) for each in tables["scene"]],
        pairs=[Pair(**each) for each in tables["pair"]],
    )


@dataclass(slots=True)
class Names:
    """Replaces the slots of texts: the same slot by the same name, another slot by another name.

    Attributes:
        rng: Where names are drawn from.
        pools: Names by pool.
        chosen: The name of each slot so far.
        used: Every name so far, which no other slot gets.
    """

    rng: random.Random
    pools: Mapping[str, Sequence[str]]
    chosen: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def fill(self, text: str) -> str:
        """Return the text with names in place of its slots."""
        return _SLOT.sub(lambda slot: self._name(slot[1], slot[0]), text)

    def renewed(self) -> Names:
        """Return names for another fact: all slots are open, no name is used twice."""
        return Names(self.rng, self.pools, {}, self.used)

    def left(self, pool: str) -> int:
        """Return how many names of a pool are unused; a drawn pool has no end."""
        return sum(name not in self.used for name in self.pools[pool]) if pool in self.pools else 99

    def _name(self, pool: str, slot: str) -> str:
        if slot not in self.chosen:
            name = self._draw(pool)
            self.chosen[slot] = name
            self.used.add(name)
        return self.chosen[slot]

    def _draw(self, pool: str) -> str:
        if pool in self.pools:
            unused = [name for name in self.pools[pool] if name not in self.used]
            return self.rng.choice(unused or list(self.pools[pool]))
        name = drawn(self.rng, pool)
        return name if name not in self.used else self._draw(pool)


def drawn(rng: random.Random, pool: str) -> str:
    """Return a value of one of the pools without a list; KeyError when there is no such pool."""
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    return {
        "number": lambda: str(rng.randrange(1000, 100_000)),
        "code": lambda: "".join(rng.choices(letters, k=2)) + f"-{rng.randrange(1000, 10_000)}",
        "time": lambda: f"{rng.randrange(6, 23)}:{rng.randrange(60):02d}",
        "amount": lambda: str(rng.randrange(11, 990)),
        "size": lambda: str(rng.randrange(10, 100)),
    }[pool]()


def pools_in(text: str) -> list[str]:
    """Return the pools of a text's slots, in their order."""
    return [slot[1] for slot in _SLOT.finditer(text)]
