"""The sessions: the messages of every turn, and the questions at the end.

They come from the generator that the bundled model was trained with (bench/model), with seeds that
neither training nor evaluation used. Do not tune anything on the seeds of REPORTING. The tasks of
UNSEEN ask for facts that were stated once: `trained` (questions of the training), `new question`
(trained attributes, new questions), `new attribute` (the question in the words of the statement)
and `new, reworded` (in other words), by the lists of `bench/model`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.model import tasks, text, vocab
from bench.model.facts import Fact, abstains
from bench.model.tasks import Message, Probe, Session, exchange
from evoke_proxy.demo.runner import recalled

TUNING = range(6_000_000, 6_000_100)
# The seeds of protocol.toml. Those of earlier records are used up: 7,000,000 and 8,000,000.
REPORTING = range(8_000_200, 8_000_300)
# Where the facts of a needle session stand, as shares of the session, and how many at each.
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
AT_A_DEPTH = 2
# So far from there at most, so that a fact does not always stand at the same place of its message.
JITTER = 0.02
NEEDLE = "needle"
UNSEEN = ("trained", "new question", "new attribute", "new, reworded")
_UNSEEN_FACTS = 6  # of a session
_TOKENS_A_SENTENCE = 12
_SENTENCES_A_MESSAGE = 15


@dataclass(frozen=True, slots=True)
class Script:
    """One session: all messages, the expected answers to the probes among them.

    A request is made for every assistant message, with all that stands before it; the last of
    them, one for each probe, are the probes'. `depths` are those of the probes' facts in a needle
    session, and empty in others.
    """

    name: str
    task: str
    seed: int
    messages: Sequence[Message]
    probes: Sequence[Probe]
    depths: Sequence[float] = ()

    @property
    def turns(self) -> Sequence[int]:
        """For each request, how many of the messages it carries."""
        return [i for i, item in enumerate(self.messages) if item["role"] == "assistant"]


def scripts(seed: int, task: str, tokens: int, count: int, times: int = 1) -> list[Script]:
    """Return that many sessions of a task; each depends on nothing but the arguments.

    A session is about `tokens` long without its probes. With `times` it has the facts and the
    probes of so many, which costs less than so many sessions.
    """
    if task == NEEDLE:
        return [_needle(seed, tokens, index) for index in range(count)]
    if task in UNSEEN:
        return [_unseen(seed, task, tokens, index) for index in range(count)]
    named = task if times == 1 else f"{task}x{times}"
    return [
        _script(_name(seed, named, tokens, index), seed, session)
        for index, session in enumerate(tasks.sessions(seed, task, tokens, count, times))
    ]


def right(answer: str, probe: Probe) -> bool:
    """Return whether an answer is the expected one."""
    return abstains(answer) if probe.value is None else recalled(answer, probe.value)


def _name(seed: int, task: str, tokens: int, index: int) -> str:
    return f"{task}-{tokens}-{seed}-{index}"


def _script(name: str, seed: int, session: Session, depths: Sequence[float] = ()) -> Script:
    asked = [exchange(probe.question, probe.answer) for probe in session.probes]
    messages = [*session.messages, *(message for part in asked for message in part)]
    return Script(name, session.task, seed, messages, session.probes, depths)


def _needle(seed: int, tokens: int, index: int) -> Script:
    """Facts in the middle of messages of other sentences, AT_A_DEPTH at each depth."""
    name = _name(seed, f"{NEEDLE}x{AT_A_DEPTH}", tokens, index)
    rng = random.Random(name)
    depths = [depth for depth in DEPTHS for _ in range(AT_A_DEPTH)]
    needles = tasks.draw_facts(rng, len(depths), ("my", "my", "para"))
    sentences = [text.sentence(rng) for _ in range(tokens // _TOKENS_A_SENTENCE)]
    positions = sorted(depth + rng.uniform(-JITTER, JITTER) for depth in depths)
    for fact, place in reversed(list(zip(needles, positions, strict=True))):
        sentences.insert(round(place * len(sentences)), fact.statement)
    said = [
        exchange(" ".join(sentences[start : start + _SENTENCES_A_MESSAGE]), vocab.CHAT_REPLY)
        for start in range(0, len(sentences), _SENTENCES_A_MESSAGE)
    ]
    messages = tasks.with_system(rng, said)
    asked = rng.sample(range(len(depths)), len(depths))
    session = Session(NEEDLE, messages, [tasks.probe_of(needles[i]) for i in asked])
    return _script(name, seed, session, [depths[i] for i in asked])


def _unseen(seed: int, task: str, tokens: int, index: int) -> Script:
    """Six facts, each stated once; every question of a task comes once before one comes twice."""
    asked, first = _questions(task), index * _UNSEEN_FACTS
    order = random.Random(f"{seed} {first // len(asked)}").sample(sorted(asked), len(asked))
    chosen = (order * 2)[first % len(asked) :][:_UNSEEN_FACTS]
    name = _name(seed, task, tokens, index)
    rng = random.Random(name)
    facts = [Fact("my", (attribute,), *_drawn(rng, attribute)) for attribute in chosen]
    parts = [tasks.statement_exchange(fact) for fact in facts]
    room = tokens - sum(tasks.estimated_tokens(part) for part in parts)
    while room > 0:
        filler = exchange(*text.filler(rng, min(15, max(1, room // 13))))
        parts.insert(rng.randrange(len(parts) + 1), filler)
        room -= tasks.estimated_tokens(filler)
    probes = [Probe(fact, asked[fact.parts[0]], fact.answer, fact.value) for fact in facts]
    rng.shuffle(probes)
    system = {"role": "system", "content": vocab.SYSTEM_PROMPTS[0]}
    messages = [system, *(message for part in parts for message in part)]
    return _script(name, seed, Session(task, messages, probes))


def _questions(task: str) -> dict[str, str]:
    """Return the questions of a task of UNSEEN by attribute."""
    if task == "new question":
        return dict(vocab.NEW_QUESTIONS)
    reworded = {**vocab.UNSEEN_PAIRS, **vocab.UNSEEN_NUMBERS}
    if task == "new, reworded":
        return reworded
    listed = (*vocab.PAIR_ATTRIBUTES, *vocab.NUMBER_ATTRIBUTES)
    same = {name: f"What is my {name}?" for name in (listed if task == "trained" else reworded)}
    trained = {**vocab.PAIR_PARAPHRASES, **vocab.NUMBER_PARAPHRASES} if task == "trained" else {}
    return {**trained, **same}


def _drawn(rng: random.Random, attribute: str) -> tuple[str, str]:
    """Return the type of an attribute's values, and a value."""
    numbers = (*vocab.NUMBER_ATTRIBUTES, *vocab.NUMBER_PARAPHRASES, *vocab.UNSEEN_NUMBERS)
    listed = "number" if attribute in numbers else "pair"
    type_ = "code" if attribute in vocab.CODE_ATTRIBUTES else listed
    return type_, text.value(rng, type_)
