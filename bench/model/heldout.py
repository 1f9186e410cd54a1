"""Held-out chats with their probes: first-generation wording (`*_v1`) and second generation.

A first-generation chat ends in ONE question at a chosen distance from its fact; a
second-generation chat fills a chosen length and ends in up to three questions.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.model import facts_v1, text, vocab
from bench.model.chat import Builder, Encoder, Question
from bench.model.corpus import put
from bench.model.facts import Fact, draw, file_name, near_miss, update
from bench.model.rows import encoder

SCENARIOS_V1 = ("single", "multi5", "needle", "tool", "unknown")
SCENARIOS = ("single", "multi5", "multi12", "multi20", "tool", "twofile", "update", "unknown")
ALL = [f"{name}_v1" for name in SCENARIOS_V1] + list(SCENARIOS)
_PLANTED = {"single": 1, "multi12": 12, "multi20": 20, "twofile": 4, "update": 4}  # else 5
_SPEAKING = ("my", "for", "poss", "event")
_CODING = ("file", "env", "tool")
_MIXED = ("my", "for", "for", "poss", "poss", "event", "file", "env", "tool")
_EXAMPLES = """examples:
  python -m bench.model.heldout out/model/heldout.json
  python -m bench.model.heldout out/model/demo.json --scenarios single_v1,needle_v1 --chats 40
"""


def case_v1(rng: random.Random, distance: int, encode: Encoder, scenario: str) -> dict[str, Any]:
    """Return a chat in v1 wording; `distance` is in tokens from the fact to the first answer."""
    builder = Builder(encode, first_generation=True)
    if rng.random() < 0.5:
        builder.add("system", rng.choice(vocab.SYSTEM_PROMPTS), 0)
    kinds = _CODING if scenario == "tool" else _SPEAKING
    facts = _draw_v1(rng, 1 if scenario in ("single", "needle") else 5, kinds)
    goal = distance - 22
    if scenario == "needle":
        _needle(rng, builder, facts[0], distance, goal)
    else:
        _plant_v1(rng, builder, facts, scenario)
        _fill_v1(rng, builder, facts[0], distance, goal)
    target, known = rng.choice(facts), scenario != "unknown"
    keys = {fact.key for fact in facts}
    while not known and target.key in keys:
        near = target.kind if rng.random() < 0.6 else rng.choice(kinds)
        other = facts_v1.draw(rng, near)
        if other.key not in keys:
            target = other
    builder.ask(rng, target, known)
    return _case(builder, f"{scenario}_v1", distance, facts)


def _draw_v1(rng: random.Random, count: int, kinds: Sequence[str]) -> list[Fact]:
    alike = rng.choice(kinds) if rng.random() < 0.5 else None
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        fact = facts_v1.draw(rng, alike or rng.choice(kinds))
        facts.setdefault(fact.key, fact)
    return list(facts.values())


def _needle(rng: random.Random, builder: Builder, fact: Fact, distance: int, goal: int) -> None:
    before = rng.randrange(0, 3) if distance < 512 else rng.randrange(0, 12)
    said = " ".join(text.sentence(rng) for _ in range(before))
    said += " " if said else ""
    statement = fact.statement(rng)
    span = (len(said), len(said) + len(statement))
    said += statement
    while True:
        longer = said + " " + text.sentence(rng)
        if len(builder.encode(longer[span[0] :]).ids) > goal - 8:
            break
        said = longer
    builder.add("user", said, 0, [(fact, span)])
    builder.add("assistant", rng.choice(("I have read it.", "OK.", "Got it.")), 0)


def _plant_v1(rng: random.Random, builder: Builder, facts: list[Fact], scenario: str) -> None:
    if scenario == "tool":
        builder.add("user", "Show me the values.", 0)
        builder.plant(rng, facts, "tool", acknowledge=False, separator="\n")
        builder.add("assistant", "Done.", 0)
    elif len(facts) == 1:
        builder.plant(rng, facts)
    else:
        done = 0
        while done < len(facts):
            count = rng.choice((1, 1, 2, 5))
            builder.plant(rng, facts[done : done + count])
            done += count


def _fill_v1(rng: random.Random, builder: Builder, first: Fact, distance: int, goal: int) -> None:
    scale = 1 if distance < 1500 else 2

    def reached() -> int:
        return len(builder.ids) - (first.span[0] if first.span else 0)

    while reached() < goal - 40:
        tokens, messages = len(builder.ids), len(builder.messages)
        builder.fill(rng, scale if reached() < goal - 250 else 0.3)
        if reached() > goal:
            del builder.ids[tokens:], builder.weights[tokens:], builder.messages[messages:]
            if rng.random() < 0.15:
                break


def case(rng: random.Random, length: int, encode: Encoder, scenario: str) -> dict[str, Any]:
    """Return a second-generation chat of about `length` tokens with its probes at the end."""
    builder = Builder(encode)
    if rng.random() < 0.5:
        builder.add("system", rng.choice(vocab.SYSTEM_PROMPTS), 0)
    facts = _draw(rng, scenario)
    groups, new = _groups(rng, facts, scenario)
    _spread(rng, builder, groups, length, len(facts), scenario)
    probes = 1 if scenario == "single" else 3
    if scenario == "unknown":
        _ask_unknown(rng, builder, facts, probes)
    else:
        for fact in _asked(rng, builder, new, probes):
            builder.ask(rng, fact)
    return _case(builder, scenario, length, list(builder.facts.values()))


def _draw(rng: random.Random, scenario: str) -> list[Fact]:
    if scenario == "twofile":
        while True:
            paths = list({file_name(rng) for _ in range(2)})
            keys = rng.sample(vocab.ENV_KEYS, 2)
            if len(paths) == 2:
                return [draw(rng, "file", (key, path)) for path in paths for key in keys]
    many = scenario in ("multi12", "multi20")
    kinds = _CODING if scenario == "tool" else _MIXED if many else _SPEAKING
    facts: dict[str, Fact] = {}
    while len(facts) < _PLANTED.get(scenario, 5):
        fact = draw(rng, rng.choice(kinds))
        facts.setdefault(fact.key, fact)
    return list(facts.values())


def _groups(
    rng: random.Random, facts: list[Fact], scenario: str
) -> tuple[list[list[Fact]], list[Fact]]:
    """Return the facts as they are told together, and those that are told anew later."""
    groups, new = [[fact] for fact in facts], []
    if scenario == "update":
        new = [update(rng, fact) for fact in rng.sample(facts, 2)]
        rng.shuffle(groups)
        groups += [[fact] for fact in new]
    elif scenario == "twofile":
        groups = [facts[:2], facts[2:]] if rng.random() < 0.5 else [facts]
    elif scenario == "tool":
        groups = [facts]
    else:
        rng.shuffle(groups)
    return groups, new


def _spread(
    rng: random.Random,
    builder: Builder,
    groups: list[list[Fact]],
    length: int,
    facts: int,
    scenario: str,
) -> None:
    total, planted = length - 60, 0
    places = sorted(rng.random() * 0.85 * max(1, total - 24 * facts) for _ in groups)
    places[0] = 0
    for place, group in zip(places, groups, strict=True):
        while len(builder.ids) - planted < place - 40:
            builder.fill(rng, 0.5)
        before = len(builder.ids)
        if scenario in ("tool", "twofile"):
            _plant_v1(rng, builder, group, "tool")
        else:
            put(rng, builder, group)
        planted += len(builder.ids) - before
    while len(builder.ids) < total - 40:
        builder.fill(rng, 0.5 if total - len(builder.ids) < 300 else 1)


def _ask_unknown(rng: random.Random, builder: Builder, facts: list[Fact], count: int) -> None:
    probes: list[Fact] = []
    while len(probes) < count:
        fact = rng.choice(facts)
        other = near_miss(rng, fact) if rng.random() < 0.5 else draw(rng, fact.kind)
        if not builder.used(other.key) and other.key not in {p.key for p in probes}:
            probes.append(other)
    for probe in probes:
        builder.ask(rng, probe, known=False)


def _asked(rng: random.Random, builder: Builder, new: list[Fact], count: int) -> list[Fact]:
    every = list(builder.facts.values())
    probes = rng.sample(every, min(count, len(every)))
    if new:
        updated = [builder.facts[fact.key] for fact in new]
        probes = updated + [fact for fact in every if fact not in updated][:1]
        rng.shuffle(probes)
    return probes


def _case(builder: Builder, scenario: str, length: int, facts: list[Fact]) -> dict[str, Any]:
    return {
        "scenario": scenario,
        "length": length,
        "ids": builder.ids,
        "messages": builder.messages,
        "facts": [{"told": fact.told, "span": fact.span} for fact in facts],
        "probes": [_probe(question) for question in builder.questions],
    }


def _probe(question: Question) -> dict[str, Any]:
    return {
        "known": question.known,
        "text": question.text,
        "value": question.value,
        "answer": question.answer,
        "value_span": question.value_span,
        "fact": question.fact,
        "message": question.message,
    }


def build(
    seed: int, lengths: Sequence[int], chats: int, encode: Encoder, scenarios: Sequence[str] = ALL
) -> list[dict[str, Any]]:
    """Return that many chats for every length and scenario."""
    rng, cases = random.Random(seed), []
    for length in lengths:
        for scenario in scenarios:
            make, name = (case_v1, scenario[:-3]) if scenario.endswith("_v1") else (case, scenario)
            cases += [make(rng, length, encode, name) for _ in range(chats)]
    return cases


def main() -> None:
    """Write one held-out set as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.model.heldout",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=90210)
    parser.add_argument("--lengths", default="256,1024,3500", help="tokens (256,1024,3500)")
    parser.add_argument("--chats", type=int, default=20, help="chats a cell (20)")
    parser.add_argument("--scenarios", default=",".join(ALL), help="of " + ",".join(ALL))
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    cases = build(args.seed, lengths, args.chats, encoder()[1], args.scenarios.split(","))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(cases))
    print(args.out, len(cases), "chats")


if __name__ == "__main__":
    main()
