"""Measures every arm on the answers of a log, and summarises how far it is from the full cache."""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoke_proxy.core.policy.registry import further_policies
from evoke_proxy.core.request.forced_answer import Step, forced_chat, kl_divergence, read_steps
from evoke_proxy.demo.processes import free_port, proxy_command, serving
from evoke_proxy.divergence.conversations import Conversation
from evoke_proxy.divergence.llama import Port
from evoke_proxy.divergence.reference import Question, Reference, question

# Arms of the proxy: the fields of a request that differ from the defaults.
PROXY_ARMS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "discard": {"evoke_recovery": "discard"},
    "truncate": {"evoke_policy": "truncate"},
}
CHANCE, ORACLE = "random", "oracle"
# Arms that are measured without the proxy, beside the reference.
_DIRECT_ARMS: Mapping[str, Callable[[Reference, Question, int], list[Step] | None]] = {
    CHANCE: Reference.chance,
    ORACLE: Reference.oracle,
}
ARMS = (*PROXY_ARMS, *_DIRECT_ARMS)
_LEAST_BUDGET = 256
_DRAWS, _FEWEST = 2000, 3
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        arms: Names of arms, see `arm_names`.
        budget: Tokens of the budget; None for a share of each conversation.
        share: The budget is this part of the longest prompt of a conversation, 1/share.
        answers: How many answers of each conversation are measured, the last ones.
        tokens: How many tokens of each answer are measured.
        n_top: How many tokens of each distribution llama-server lists.
    """

    arms: Sequence[str] = ARMS
    budget: int | None = None
    share: int = 8
    answers: int = 8
    tokens: int = 48
    n_top: int = 128


@dataclass(frozen=True, slots=True)
class Measured:
    """The reference of one answer.

    Attributes:
        conversation: Name of the conversation.
        budget: Budget of its turns, tokens.
        asked: The prompt and the answer.
        steps: The distributions with the whole prompt in the cache.
    """

    conversation: str
    budget: int
    asked: Question
    steps: Sequence[Step]


def arm_names() -> tuple[str, ...]:
    """Return `ARMS`, and the policies of the modules in EVOKE_POLICY_MODULES as further arms."""
    return (*ARMS, *(name for name in further_policies() if name not in ARMS))


def measure(
    llama: Port, talks: Sequence[Conversation], options: Options, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return one row for each answer and arm; those that need no proxy are measured first."""
    reference = Reference(llama, options.n_top)
    rows: list[dict[str, Any]] = []
    found: dict[str, list[Measured]] = {}
    for talk in talks:
        found[talk.name] = []
        for one, direct in _reference(llama, reference, talk, options):
            found[talk.name].append(one)
            rows += [_row(one, arm, steps, {}) for arm, steps in direct.items()]
        say(f"{talk.name}: {len(found[talk.name])} answers with the full cache")
    for arm in (name for name in options.arms if name not in _DIRECT_ARMS):
        with _proxy(llama, options.n_top) as proxy:
            for talk in talks:
                rows += _through(proxy, talk, found[talk.name], arm, options)
        say(f"{arm}: measured")
    return rows


def _reference(
    llama: Port, reference: Reference, talk: Conversation, options: Options
) -> Iterator[tuple[Measured, Mapping[str, Sequence[Step]]]]:
    """Yield the reference of each answer, and the steps of the arms that need no proxy."""
    chosen = talk.answers()[-options.answers :]
    asked = [question(llama, talk.messages, index, options.tokens) for index in chosen]
    budget = options.budget or max(_LEAST_BUDGET, len(asked[-1].prompt) // options.share)
    for each in asked:
        if len(each.prompt) <= budget or not each.answer:
            continue  # nothing has to leave the cache
        steps = reference.full(each)
        if steps is None:
            continue
        # The oracle reads the attention of the answer above, so it comes first.
        direct = {
            arm: _DIRECT_ARMS[arm](reference, each, budget)
            for arm in (ORACLE, CHANCE)
            if arm in options.arms
        }
        found = {arm: steps for arm, steps in direct.items() if steps is not None}
        yield Measured(talk.name, budget, each, steps), found


@contextmanager
def _proxy(llama: Port, n_top: int) -> Iterator[Port]:
    """Run the proxy with its defaults in front of llama-server."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "evoke.yaml"
        limits = {"n_probs": max(n_top, 1), "body_bytes": 1 << 28}
        config.write_text(json.dumps({"limits": limits}), encoding="utf-8")
        command = [*proxy_command(port, llama.number), "--config", str(config)]
        with serving(command, port, Path(folder) / "proxy.log"):
            yield Port(port)


def _through(
    proxy: Port, talk: Conversation, found: Sequence[Measured], arm: str, options: Options
) -> Iterator[dict[str, Any]]:
    """Send every turn of a conversation through the proxy; yield a row for each measured one."""
    if not found:
        return
    measured = {one.asked.index: one for one in found}
    fields = {"evoke_budget": found[0].budget, **PROXY_ARMS.get(arm, {"evoke_policy": arm})}
    # A tenant of its own takes no copies over from another arm.
    headers = {
        "X-Evoke-Session": f"{arm}-{talk.name}".replace(" ", "-"),
        "Authorization": f"Bearer {arm}",
    }
    for index in talk.answers():
        if index > max(measured):
            return
        one = measured.get(index)
        body: dict[str, Any] = {"messages": list(talk.messages[:index]), "temperature": 0, **fields}
        body |= {"max_tokens": 1} if one is None else forced_chat(one.asked.answer, options.n_top)
        answer = proxy.call("POST", "/v1/chat/completions", body, headers)
        if one is None:
            continue
        steps = read_steps(answer, one.asked.answer)
        accounting = answer.get("timings", {}).get("evoke") or {}
        if steps is not None:
            yield _row(one, arm, steps, accounting)


def _row(one: Measured, arm: str, steps: Sequence[Step], accounting: Row) -> dict[str, Any]:
    pairs = list(zip(one.steps, steps, strict=True))
    return {
        "conversation": one.conversation,
        "answer": one.asked.index,
        "arm": arm,
        "prompt": len(one.asked.prompt),
        "budget": one.budget,
        "omitted": accounting.get("omitted"),
        "recovered": accounting.get("recovered"),
        "tokens": len(pairs),
        "kl": [round(kl_divergence(ours, theirs), 6) for ours, theirs in pairs],
        "top1": [ours.best == theirs.best for ours, theirs in pairs],
        "logprob": round(sum(step.logprob for step in steps), 4),
        "logprob_full": round(sum(step.logprob for step in one.steps), 4),
    }


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one line for each arm, over the answers that every arm has.

    `low` and `high` bound the share of equal first choices with 95 % confidence. The bootstrap
    draws whole conversations, with fewer than 3 of them whole answers.
    """
    arms = [arm for arm in arm_names() if any(row["arm"] == arm for row in rows)]
    keys = [
        {(row["conversation"], row["answer"]) for row in rows if row["arm"] == arm} for arm in arms
    ]
    common = set.intersection(*keys) if keys else set()
    found = []
    for arm in arms:
        mine = [r for r in rows if r["arm"] == arm and (r["conversation"], r["answer"]) in common]
        if not mine:
            continue
        divergences = sorted(value for row in mine for value in row["kl"])
        agreed = [value for row in mine for value in row["top1"]]
        change = [(row["logprob"] - row["logprob_full"]) / row["tokens"] for row in mine]
        low, high = _interval(mine)
        found.append(
            {
                "arm": arm,
                "answers": len(mine),
                "tokens": len(agreed),
                "kl_mean": round(statistics.fmean(divergences), 4),
                "kl_p95": round(divergences[math.ceil(0.95 * len(divergences)) - 1], 4),
                "top1_percent": round(100 * statistics.fmean(agreed), 2),
                "low": low,
                "high": high,
                "answers_changed_percent": round(
                    100 * statistics.fmean(not all(row["top1"]) for row in mine), 1
                ),
                "logprob_change": round(statistics.fmean(change), 4),
            }
        )
    return found


def _interval(rows: Sequence[Row]) -> tuple[float, float]:
    """Bounds of the share of equal first choices, percent."""
    groups: dict[Any, list[bool]] = {}
    few = len({row["conversation"] for row in rows}) < _FEWEST
    for row in rows:
        key = (row["conversation"], row["answer"]) if few else row["conversation"]
        groups.setdefault(key, []).extend(row["top1"])
    counts = [(sum(group), len(group)) for group in groups.values()]
    chance, shares = random.Random(1), list[float]()
    for _ in range(_DRAWS):
        drawn = chance.choices(counts, k=len(counts))
        shares.append(100 * sum(n for n, _ in drawn) / sum(n for _, n in drawn))
    shares.sort()
    return round(shares[_DRAWS * 25 // 1000], 2), round(shares[_DRAWS * 975 // 1000], 2)
