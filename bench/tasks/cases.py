"""Makes cases: a conversation in which the needed messages are spread, and a turn that asks.

The haystack is the dialogs of MTRAG-UN (`bench/data`), which people led with an assistant about
laws, finance, software and much else. The dialogs of the two splits are disjoint; longer ones go on
with those of the other split. The haystack `statements` is what users of BFCL's memory
conversations tell, sentence by sentence: each is a message like those that are planted.

What is planted comes from the templates: `tuning.toml`, `reporting.toml`, and those of more cases
of a few kinds whose names begin with a split. A file has these tables:

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
* `dialogs`: a haystack in the language of the templates, where that is not English
"""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bench.evidence.conversations import conversations, split_of
from bench.model.tasks import exchange

HERE = Path(__file__).parent
SPLITS = ("tuning", "reporting")
# The templates of a split with all kinds, and further ones of some kinds.
TEMPLATES = tuple(sorted(file.stem for file in HERE.glob("*.toml")))
# Kinds whose questions are put together from pairs, and how many of them.
QUERIES: Mapping[str, int] = {"multi-query 4": 4, "multi-query 12": 12}
_SLOT = re.compile(r"\{([a-z]+)(\d*)\}")
Exchange = Sequence[str]


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
class Templates:
    """All templates of one split."""

    name: str  # one of `TEMPLATES`
    replies: Sequence[str]  # the assistant's answers to what the user tells
    openings: Sequence[str]  # how a turn with several questions begins
    pools: Mapping[str, Sequence[str]]  # names by pool
    scenes: Sequence[Scene]  # the templates of all kinds except those of `QUERIES`
    pairs: Sequence[Mapping[str, str]]  # `say` and `ask` of the kinds of `QUERIES`
    dialogs: Sequence[Sequence[Exchange]] = ()  # a haystack of its own

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


@cache
def read(name: str) -> Templates:
    """Return one of `TEMPLATES`, the same object each time."""
    tables: dict[str, Any] = tomllib.loads((HERE / f"{name}.toml").read_text("utf-8"))
    scenes, pairs = [Scene(**each) for each in tables.pop("scene")], tables.pop("pair")
    return Templates(name, scenes=scenes, pairs=pairs, **tables)


@dataclass(slots=True)
class Names:
    """Replaces the slots of texts: the same slot by the same name, another slot by another name."""

    rng: random.Random  # where names are drawn from
    pools: Mapping[str, Sequence[str]]  # names by pool
    chosen: dict[str, str] = field(default_factory=dict)  # the name of each slot so far
    used: set[str] = field(default_factory=set)  # every name so far, which no other slot gets

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
            self.chosen[slot] = self._draw(pool)
            self.used.add(self.chosen[slot])
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


DIALOGS = Path(__file__).parents[1] / "data/mtrag_dialogs.json"
SYSTEM = "You are a helpful assistant."
# How many characters of the haystack a token has, and how many tokens each message adds.
_CHARACTERS, _FRAME = 4.75, 5
# Where a passage begins: the user quotes it.
_QUOTING = ("I found this text.", "Here is what I read today.", "This was in the newsletter.")
# The kind of standing instructions, which come in this first part of a conversation.
_EARLY, INSTRUCTIONS = 0.2, "standing instructions"
Message = Mapping[str, str]
_Planted = tuple[Exchange, bool]  # what the haystack gets, and whether the answer needs it


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation and a turn that asks about it."""

    id: str  # split, kind, length and number
    kind: str  # what the case tests
    scene: int  # which template of the kind it was made from
    messages: Sequence[Message]  # the conversation before the turn, from the system prompt on
    asked: Sequence[Message]  # the messages of the turn; the last one is the question
    needed: Sequence[int]  # indexes of the messages that the answer needs


@dataclass(frozen=True, slots=True)
class _Plot:
    """What happens in a case: exchanges in their order, those at any place, and the last turn."""

    scene: int
    ordered: Sequence[_Planted]
    anywhere: Sequence[_Planted]
    asked: Sequence[Message]


def cases(
    name: str, kind: str, length: int, numbers: int | range, haystack: str = "dialogs"
) -> list[Case]:
    """Return cases of about `length` tokens; they depend on nothing but the arguments.

    `numbers` are those of the cases, or how many from 0 on; see `TEMPLATES` and `HAYSTACKS`.
    """
    templates, wanted = read(name), range(numbers) if isinstance(numbers, int) else numbers
    return [_case(templates, kind, length, number, haystack) for number in wanted]


def kinds(name: str = SPLITS[0]) -> list[str]:
    """Return every kind of case that one of `TEMPLATES` has."""
    return read(name).kinds


def tokens_of(text: str) -> float:
    """Return about how many tokens a message of this text takes."""
    return len(text) / _CHARACTERS + _FRAME


def _case(templates: Templates, kind: str, length: int, number: int, haystack: str) -> Case:
    name = f"{templates.name} {kind} {length} {number}"
    rng = random.Random(name)
    if kind in QUERIES:
        plot = _queries(rng, templates, QUERIES[kind])
    else:
        scenes = templates.scenes_of(kind)
        plot = _staged(rng, templates, scenes[number % len(scenes)], number % len(scenes))
    planted = list(plot.ordered)
    for each in plot.anywhere:
        planted.insert(rng.randint(0, len(planted)), each)
    taken = sum(tokens_of(text) for said, _ in planted for text in said)
    straw = list(_haystack(HAYSTACKS[haystack](rng, templates), length - taken))
    messages: list[Message] = [{"role": "system", "content": SYSTEM}]
    needed = []
    for said, is_needed in _placed(rng, straw, planted, kind):
        needed += [len(messages)] if is_needed else []
        messages += exchange(*said)
    return Case(name, kind, plot.scene, messages, plot.asked, needed)


def _staged(rng: random.Random, templates: Templates, scene: Scene, at: int) -> _Plot:
    names = Names(rng, templates.pools)
    say, old, other = ([*map(names.fill, texts)] for texts in (scene.say, scene.old, scene.other))
    # Pools of the turn distinguish the rivals, so each rival takes a name of every one.
    turn = [scene.ask, *(text for pair in scene.before for text in pair)]
    keys = {pool for text in turn for pool in pools_in(text) if pool in templates.pools}
    for _ in range(scene.rivals):
        if any(names.left(pool) == 0 for pool in keys):
            break
        other.append(names.renewed().fill(scene.say[0]))
    if scene.passage:
        say[0] = _inside_passage(rng, templates.split, say[0])
    asked = [
        *(m for pair in scene.before for m in exchange(*map(names.fill, pair))),
        *exchange(names.fill(scene.ask)),
    ]

    def planted(texts: Sequence[str], needed: bool) -> list[_Planted]:
        return [((text, rng.choice(templates.replies)), needed) for text in texts]

    return _Plot(at, [*planted(old, False), *planted(say, True)], planted(other, False), asked)


def _queries(rng: random.Random, templates: Templates, count: int) -> _Plot:
    names = Names(rng, templates.pools)
    pairs = rng.sample(list(templates.pairs), len(templates.pairs))
    stated = [
        ((names.renewed().fill(pair["say"]), rng.choice(templates.replies)), at < count)
        for at, pair in enumerate(pairs)
    ]
    asks = [pair["ask"] for pair in pairs[:count]]
    rng.shuffle(asks)
    layout = rng.randrange(3)
    opening = [rng.choice(templates.openings)] if layout < 2 else []
    if layout == 1:
        asks = [f"{at}. {ask}" for at, ask in enumerate(asks, 1)]
    text = ("\n" if layout else " ").join([*opening, *asks])
    return _Plot(layout, [], stated, exchange(text))


def _inside_passage(rng: random.Random, split: str, fact: str) -> str:
    """Return a quoted text of the haystack with the fact between two of its sentences."""
    texts = [text for text in _sentenced(split) if 500 < len(text) < 900]
    sentences = rng.choice(texts).split(". ")
    sentences.insert(rng.randrange(1, len(sentences)), fact.removesuffix("."))
    return f"{rng.choice(_QUOTING)} {'. '.join(sentences)}"


@cache
def _sentenced(split: str) -> list[str]:
    """Answers of the split's dialogs that consist of at least three sentences in one line."""
    answers = (answer for dialog in _dialogs()[split] for _, answer in dialog)
    return [text for text in answers if text.count(". ") >= 3 and "\n" not in text]


@cache
def _dialogs() -> Mapping[str, list[list[Exchange]]]:
    found: Mapping[str, list[list[Exchange]]] = json.loads(DIALOGS.read_text("utf-8"))
    return found


def _dialogs_of(rng: random.Random, templates: Templates) -> Iterator[Exchange]:
    """Yield the templates' dialogs, or those of a split and then of the other, in random order."""
    names = (templates.split, *(other for other in SPLITS if other != templates.split))
    for pile in [templates.dialogs] if templates.dialogs else map(_dialogs().__getitem__, names):
        for dialog in rng.sample(pile, len(pile)):
            yield from dialog


def _statements(rng: random.Random, templates: Templates) -> Iterator[Exchange]:
    """Yield what one user of a split tells, from a random sentence on."""
    users = [each for each in conversations() if each.id.startswith("bfcl")]
    texts = rng.choice([one.texts for one in users if split_of()[one.id] == templates.split])
    said = re.split(r"(?<=[.!?])\s+", "\n".join(texts))
    first = rng.randrange(len(said))
    yield from ((text, rng.choice(templates.replies)) for text in said[first:] + said[:first])


HAYSTACKS = {"dialogs": _dialogs_of, "statements": _statements}


def _haystack(pile: Iterator[Exchange], tokens: float) -> Iterator[Exchange]:
    """Yield exchanges of a pile until they have so many tokens."""
    while tokens > 0 and (said := next(pile, None)) is not None:
        tokens -= sum(tokens_of(text) for text in said)
        yield said


def _placed(
    rng: random.Random, straw: Sequence[Exchange], planted: Sequence[_Planted], kind: str
) -> Iterator[_Planted]:
    """Yield the haystack with the planted exchanges, in their order, at random places of it."""
    positions = sorted(
        rng.randint(0, int(len(straw) * (_EARLY if kind == INSTRUCTIONS and at == 0 else 1)))
        for at in range(len(planted))
    )
    for start, end, each in zip([0, *positions], positions, planted, strict=False):
        yield from ((said, False) for said in straw[start:end])
        yield each
    yield from ((said, False) for said in straw[max(positions, default=0) :])
