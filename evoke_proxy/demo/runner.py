"""Runs one session under each of several policies (arms) and checks the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from evoke_proxy.demo.client import ArmRun, Turn, chat, read_turn, resident_now
from evoke_proxy.demo.session import Script, draw

ARMS = ("evoke", "discard", "no_eviction", "truncate")
# Tokens that the KV cache may hold, and the most tokens of an answer.
BUDGET = 512
MAX_TOKENS = 32
# The most sessions to draw until the model itself does not fail one.
MAX_DRAWS = 3

# Starts a server and a proxy for (seed, arm), and yields the port of the proxy. Both are new for
# each arm, so that no arm finds the cache of another.
Start = Callable[[int, str], AbstractContextManager[int]]


class RunObserver:
    """Receives the events of a run; the base class ignores them."""

    def arm_started(self, script: Script, arm: str) -> None:
        """Called before the first turn of an arm."""

    def turn_sent(self, number: int) -> None:
        """Called when turn `number` (from 1) has been sent."""

    def turn_finished(self, turn: Turn) -> None:
        """Called with the accounting of every finished turn."""

    def arm_finished(self, run: ArmRun) -> None:
        """Called after the last turn of an arm."""

    def session_redrawn(self, seed: int, reason: str) -> None:
        """Called when the session of `seed` is dropped, with the reason."""


def request(arm: str, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return the body of one turn; the arm's policy and budget travel with the request."""
    body: dict[str, Any] = {
        "messages": list(messages),
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "evoke_policy": arm,
    }
    return body if arm == "no_eviction" else {**body, "evoke_budget": BUDGET}


def run_arm(script: Script, arm: str, port: int, observer: RunObserver) -> ArmRun:
    """Run the session under one policy; each turn sends the history with the answers received."""
    messages = [{"role": "system", "content": script.system}]
    headers = {"X-Evoke-Session": f"{arm}-{script.seed}"}
    turns: list[Turn] = []
    observer.arm_started(script, arm)
    started = time.perf_counter()
    for number, text in enumerate(script.turns, 1):
        messages.append({"role": "user", "content": text})
        observer.turn_sent(number)
        reply = chat(port, request(arm, messages), headers)
        turns.append(replace(read_turn(number, reply), resident=resident_now(port)))
        messages.append({"role": "assistant", "content": reply.text})
        observer.turn_finished(turns[-1])
    wall = round(time.perf_counter() - started, 3)
    is_recalled = recalled(turns[-1].answer, script.fact.value)
    run = ArmRun(arm, script.fact.value, is_recalled, tuple(turns), wall)
    observer.arm_finished(run)
    return run


def run_session(
    seed: int, arms: Sequence[str], start: Start, observer: RunObserver
) -> tuple[Script, dict[str, ArmRun]]:
    """Run the arms on the session of `seed`, or of the next seed when the model fails it.

    Returns the last session and its arms; some are missing when the model failed MAX_DRAWS times.
    """
    for last in range(seed, seed + MAX_DRAWS):
        script, reason = draw(last), None
        runs: dict[str, ArmRun] = {}
        for arm in arms:
            with start(last, arm) as port:
                runs[arm] = run_arm(script, arm, port, observer)
            reason = model_failure(runs[arm])
            if reason:
                observer.session_redrawn(last, reason)
                break
        if reason is None:
            break
    return script, runs


# For each arm, whether it must recall the fact; the others must not.
MUST_RECALL: Mapping[str, bool] = {
    "evoke": True,
    "discard": False,
    "no_eviction": True,
    "truncate": False,
}
# The least length of a session, as a multiple of the budget.
MIN_BUDGETS = 4


def recalled(answer: str, value: str) -> bool:
    """Return whether the answer ends with exactly the value, a final full stop allowed."""
    text = answer.strip().removesuffix(".")
    if not text.endswith(value):
        return False
    before = text[: -len(value)]
    return not before[-1:].isalnum() and before[-1:] not in {"-", "_"}


def model_failure(run: ArmRun) -> str | None:
    """Return why the model, not the cache, lost the fact; None when it did not."""
    if run.arm == "no_eviction" and not run.recalled:
        return f"with everything in the cache the model answered {run.answer!r}"
    for turn in run.turns[:-1]:
        if run.expected in turn.answer:
            return f"the model repeated the value in turn {turn.number}"
    return None


def failures(runs: Mapping[str, ArmRun], budget: int) -> list[str]:
    """Return each condition that does not hold, as a sentence.

    The demo passed when there is none and every arm was run.
    """
    failed: list[str] = []
    for arm, run in runs.items():
        failed.extend(_recall_failures(run, MUST_RECALL[arm]))
    if "evoke" in runs:
        for turn in runs["evoke"].turns:
            failed.extend(
                f"evoke: turn {turn.number}: {reason}" for reason in _turn_failures(turn, budget)
            )
    logical = logical_tokens(runs)
    if 0 < logical < MIN_BUDGETS * budget:
        failed.append(f"the session has {logical} tokens, less than {MIN_BUDGETS} budgets")
    return failed


def not_run(runs: Mapping[str, ArmRun]) -> list[str]:
    """Return the arms that the demo has and that were not run; without them is no verdict."""
    return [arm for arm in MUST_RECALL if arm not in runs]


def logical_tokens(runs: Mapping[str, ArmRun]) -> int:
    """The length of the last prompt of an arm that sends all messages; 0 without such an arm."""
    lengths = (runs[arm].turns[-1].prompt for arm in ("no_eviction", "evoke") if arm in runs)
    return next(lengths, 0)


def _recall_failures(run: ArmRun, must: bool) -> Iterator[str]:
    last = run.turns[-1].number
    if must and not run.recalled:
        yield f"{run.arm}: turn {last}: answered {run.answer!r}, the value is {run.expected!r}"
    if run.recalled and not must:
        yield f"{run.arm}: turn {last}: recalled {run.expected!r}, although that was evicted"


def _turn_failures(turn: Turn, budget: int) -> Iterator[str]:
    if not turn.from_engine:
        yield "the server sent no token accounting (timings.evoke)"
        return
    if turn.resident_peak > budget:
        yield f"{turn.resident_peak} tokens were in the cache, over the budget of {budget}"
    total = turn.resident_before + turn.recovered + turn.decoded + turn.omitted
    if total != turn.prompt:
        yield (
            f"resident {turn.resident_before} + recovered {turn.recovered} + decoded "
            f"{turn.decoded} + omitted {turn.omitted} = {total}, the prompt has {turn.prompt}"
        )
