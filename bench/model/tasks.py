"""Held-out sessions to measure the model's recall, one kind of difficulty each.

A session is a chat that states all its facts, and the questions to ask after it. The module needs
only the standard library, so that benches can build their own sessions from the same parts.

* needle: one fact at a random depth of long messages
* facts5, facts12, facts20: 5, 12 or 20 facts of all kinds, stated and asked in shuffled orders
* codes: five facts whose values have 16 characters
* updates: five facts, three of them changed later; four are asked
* files: two files with the same settings
* rereads: as files, but one file is read a second time with some settings changed
* paraphrase: five facts; no question shares a content word with its statement
* unknown: five facts, and three questions for similar facts that were never stated
* rereads-apart: two files of one line, one of them read twice more with another number; both are
  asked. They share no part of a file name, no setting and no first digit, and no number repeats a
  digit
* unknown-said: as unknown, with facts about the user only and none from files"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bench.model import facts, text, vocab
from bench.model.facts import Fact

Message = dict[str, str]
Exchange = list[Message]
_MESSAGE_TOKENS = 5
_TOKEN = re.compile(r"\d|[^\W\d]+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Probe:
    """A question; `value` is None where the answer must be that it was never stated."""

    fact: Fact
    question: str
    answer: str
    value: str | None


@dataclass(frozen=True, slots=True)
class Session:
    """The messages up to the last answer before the probes; the probes are in asking order."""

    task: str
    messages: Exchange
    probes: Sequence[Probe]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Exchanges in order, the probes, and the keys that no other part may use."""

    exchanges: Sequence[Exchange]
    probes: Sequence[Probe]
    about: frozenset[str]


def exchange(*said: str) -> Exchange:
    """Return messages of these texts, the user and the assistant in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(said)]


def statement_exchange(*stated: Fact) -> Exchange:
    """Return the user's statement of facts and the assistant's answer."""
    return exchange(" ".join(fact.statement for fact in stated), vocab.FACT_REPLY)


def reading(path: str, lines: Sequence[Fact], repeated: bool = False) -> Exchange:
    """Return how a file is read: the request, the tool's message and the assistant's answer."""
    request = f"Read {path} again." if repeated else f"Read {path}."
    content = {"role": "tool", "content": "\n".join(fact.statement for fact in lines)}
    first, last = exchange(request, vocab.FILE_REPLY)
    return [first, content, last]


def probe_of(fact: Fact, paraphrased: bool = False) -> Probe:
    """Return the probe for a stated fact, in other words than the statement where it has any."""
    question = fact.paraphrase if paraphrased and fact.paraphrase else fact.question
    return Probe(fact, question, fact.answer, fact.value)


def unknown_probe(fact: Fact) -> Probe:
    """Return the probe for a fact that was never stated."""
    return Probe(fact, fact.question, fact.unknown_answer, None)


def estimated_tokens(messages: Exchange) -> int:
    """Return about how many tokens the messages have (within a tenth)."""
    return sum(_MESSAGE_TOKENS + len(_TOKEN.findall(message["content"])) for message in messages)


def session(rng: random.Random, task: str, tokens: int, times: int = 1) -> Session:
    """Return a session of a task, about that many tokens long without the probes.

    With `times` it has the facts and questions of that many sessions, all about different things.
    """
    if task == "needle":
        return _needle(rng, tokens)
    plan = _together(rng, task, times) if times > 1 else _PLANS[task](rng)
    room = tokens - sum(estimated_tokens(part) for part in plan.exchanges)
    fillers: list[Exchange] = []
    while room > 0:
        sentences = min(15, room // 13)
        fillers.append(exchange(*text.filler(rng, sentences if rng.random() < 0.8 else 0)))
        room -= estimated_tokens(fillers[-1])
    # Statements keep their order, because a change must follow what it changes.
    positions = sorted(rng.sample(range(len(fillers) + len(plan.exchanges)), len(plan.exchanges)))
    for place, part in zip(positions, plan.exchanges, strict=True):
        fillers.insert(place, part)
    return Session(task, with_system(rng, fillers), plan.probes)


def sessions(seed: int, task: str, tokens: int, count: int, times: int = 1) -> list[Session]:
    """Return that many sessions; each depends on nothing but the arguments."""
    return [
        session(random.Random(f"{seed}-{task}-{tokens}-{index}"), task, tokens, times)
        for index in range(count)
    ]


def draw_facts(
    rng: random.Random, count: int, kinds: Sequence[str] = facts.KINDS, type_: str | None = None
) -> list[Fact]:
    """Return facts of different keys."""
    chosen: dict[str, Fact] = {}
    while len(chosen) < count:
        fact = facts.draw(rng, rng.choice(kinds), type_)
        chosen.setdefault(fact.key, fact)
    return list(chosen.values())


def with_system(rng: random.Random, parts: Sequence[Exchange]) -> Exchange:
    """Return the messages of these parts behind one of the system prompts."""
    system = {"role": "system", "content": rng.choice(vocab.SYSTEM_PROMPTS)}
    return [system, *(message for part in parts for message in part)]


def _needle(rng: random.Random, tokens: int) -> Session:
    fact = facts.draw(rng, rng.choice(("my", "my", "para")))
    sentences = max(2, tokens // 12)
    depth, parts = rng.randrange(sentences), []
    for start in range(0, sentences, 40):
        said = [text.sentence(rng) for _ in range(min(40, sentences - start))]
        if start <= depth < start + 40:
            said.insert(min(depth - start, len(said)), fact.statement)
        parts.append(exchange(" ".join(said), vocab.CHAT_REPLY))
    return Session("needle", with_system(rng, parts), [probe_of(fact)])


def _together(rng: random.Random, task: str, times: int) -> _Plan:
    """Return several plans as one: interleaved, each in its own order."""
    plans: list[_Plan] = []
    about: frozenset[str] = frozenset()
    while len(plans) < times:
        plan = _PLANS[task](rng)
        if not plan.about & about:
            plans.append(plan)
            about |= plan.about
    order = [which for which, plan in enumerate(plans) for _ in plan.exchanges]
    rng.shuffle(order)
    left = [iter(plan.exchanges) for plan in plans]
    probes = [probe for plan in plans for probe in plan.probes]
    return _Plan([next(left[which]) for which in order], rng.sample(probes, len(probes)), about)


def _about(chosen: Iterable[Fact]) -> frozenset[str]:
    """Return the keys of facts, and the files they are in."""
    return frozenset(
        name for fact in chosen for name in (fact.key, *fact.parts[: fact.kind == "file"])
    )


def _exchange_of(fact: Fact) -> Exchange:
    return reading(fact.parts[0], [fact]) if fact.kind == "file" else statement_exchange(fact)


def _facts(count: int, type_: str | None = None) -> Callable[[random.Random], _Plan]:
    def plan(rng: random.Random) -> _Plan:
        chosen = draw_facts(rng, count, type_=type_)
        probes = [probe_of(fact) for fact in rng.sample(chosen, count)]
        return _Plan([_exchange_of(fact) for fact in chosen], probes, _about(chosen))

    return plan


def _updates(rng: random.Random) -> _Plan:
    chosen = draw_facts(rng, 5, ("my", "my", "para"))
    new = [facts.update(rng, fact) for fact in rng.sample(chosen, 3)]
    changed = {fact.key for fact in new}
    asked = [*new, next(fact for fact in chosen if fact.key not in changed)]
    rng.shuffle(asked)
    exchanges = [statement_exchange(fact) for fact in [*chosen, *new]]
    return _Plan(exchanges, [probe_of(fact) for fact in asked], _about(chosen))


def _two_files(rng: random.Random) -> Mapping[str, list[Fact]]:
    paths: dict[str, None] = {}
    while len(paths) < 2:
        paths[facts.file_name(rng)] = None
    names = rng.sample(vocab.SETTINGS, 3)
    return {path: [facts.setting(rng, path, name) for name in names] for path in paths}


def _files(rng: random.Random) -> _Plan:
    files = _two_files(rng)
    lines = [line for path in files for line in files[path]]
    exchanges = [reading(path, lines) for path, lines in files.items()]
    return _Plan(exchanges, [probe_of(line) for line in rng.sample(lines, 4)], _about(lines))


def _rereads(rng: random.Random) -> _Plan:
    files = _two_files(rng)
    exchanges = [reading(path, lines) for path, lines in files.items()]
    path = rng.choice(list(files))
    changed = rng.sample(files[path], rng.choice((1, 2)))
    files[path][:] = [facts.update(rng, f) if f in changed else f for f in files[path]]
    exchanges.append(reading(path, files[path], repeated=True))
    lines = [line for path in files for line in files[path]]
    return _Plan(exchanges, [probe_of(line) for line in rng.sample(lines, 4)], _about(lines))


def _distinct_rereads(rng: random.Random) -> _Plan:
    while True:
        names = rng.sample(_NUMBERS, 2)
        lines = [facts.setting(rng, facts.file_name(rng), name) for name in names]
        old = rng.choice(lines)
        new = facts.update(rng, old)
        values = [line.value for line in (*lines, new)]
        parts = [part for line in lines for part in (*line.parts[0].split("."), line.parts[1])]
        parts += [value[0] for value in values]
        each = (parts, *values)
        if all(len(set(one)) == len(one) for one in each):
            break
    exchanges = [reading(line.parts[0], [line]) for line in lines]
    exchanges += [reading(new.parts[0], [new], repeated=True)] * 2
    asked = rng.sample([new if line is old else line for line in lines], 2)
    return _Plan(exchanges, [probe_of(line) for line in asked], frozenset(parts) | _about(lines))


def _paraphrase(rng: random.Random) -> _Plan:
    chosen = draw_facts(rng, 5, ("para",))
    probes = [probe_of(fact, paraphrased=True) for fact in rng.sample(chosen, 5)]
    return _Plan([statement_exchange(fact) for fact in chosen], probes, _about(chosen))


def _unknown(rng: random.Random, kinds: Sequence[str] = facts.KINDS) -> _Plan:
    chosen = draw_facts(rng, 5, kinds)
    keys = {fact.key for fact in chosen}
    probes: list[Probe] = []
    while len(probes) < 3:
        other = facts.near_miss(rng, rng.choice(chosen))
        if other.key not in keys:
            keys.add(other.key)
            probes.append(unknown_probe(other))
    about = _about([*chosen, *(probe.fact for probe in probes)])
    return _Plan([_exchange_of(fact) for fact in chosen], probes, about)


_NUMBERS = [name for name in vocab.SETTINGS if name not in vocab.CODE_SETTINGS]
_PLANS: Mapping[str, Callable[[random.Random], _Plan]] = {
    "facts5": _facts(5),
    "facts12": _facts(12),
    "facts20": _facts(20),
    "codes": _facts(5, "code"),
    "updates": _updates,
    "files": _files,
    "rereads": _rereads,
    "paraphrase": _paraphrase,
    "unknown": _unknown,
    "rereads-apart": _distinct_rereads,
    "unknown-said": partial(_unknown, kinds=("my", "para")),
}
TASKS = ("needle", *_PLANS)
