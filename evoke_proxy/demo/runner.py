"""Runs the arms of one session, and draws again when the model itself spoilt a session."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from evoke_proxy.demo.client import chat
from evoke_proxy.demo.judge import recalled, spoilt
from evoke_proxy.demo.records import ArmRun, Turn, read_turn
from evoke_proxy.demo.residency import resident_now
from evoke_proxy.demo.script import Script, draw

ARMS = ("evoke", "discard", "no_eviction", "truncate")
BUDGET = 512
MAX_TOKENS = 32
DRAWS = 3

# Starts a fresh server and proxy for (seed, arm) and gives the proxy's port: no arm can profit
# from what an earlier one left in the cache.
Start = Callable[[int, str], AbstractContextManager[int]]


class Audience:
    """Whoever watches the demo; every method may be left as it is."""

    def begin(self, script: Script, arm: str) -> None:
        """Called before the first turn of an arm."""

    def waiting(self, number: int) -> None:
        """Called when turn `number` (from 1) has been sent."""

    def turn(self, turn: Turn) -> None:
        """Called with the books of every finished turn."""

    def end(self, run: ArmRun) -> None:
        """Called after the last turn of an arm."""

    def redraw(self, seed: int, reason: str) -> None:
        """Called when the session of `seed` is thrown away, with the reason."""


def request(script: Script, arm: str, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return the body of one turn; the arm's policy and budget travel with the request."""
    body: dict[str, Any] = {
        "messages": list(messages),
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "evoke_policy": arm,
    }
    return body if arm == "no_eviction" else {**body, "evoke_budget": BUDGET}


def run_arm(script: Script, arm: str, port: int, audience: Audience) -> ArmRun:
    """Run the session under one policy, resending the whole history with the real answers."""
    messages = [{"role": "system", "content": script.system}]
    headers = {"X-Evoke-Session": f"{arm}-{script.seed}"}
    turns: list[Turn] = []
    audience.begin(script, arm)
    started = time.perf_counter()
    for number, text in enumerate(script.turns, 1):
        messages.append({"role": "user", "content": text})
        audience.waiting(number)
        reply = chat(port, request(script, arm, messages), headers)
        turns.append(replace(read_turn(number, reply), resident=resident_now(port)))
        messages.append({"role": "assistant", "content": reply.text})
        audience.turn(turns[-1])
    wall = round(time.perf_counter() - started, 3)
    right = recalled(turns[-1].answer, script.fact.value)
    run = ArmRun(arm, script.fact.value, right, tuple(turns), wall)
    audience.end(run)
    return run


def run_session(
    seed: int, arms: Sequence[str], start: Start, audience: Audience
) -> tuple[Script, dict[str, ArmRun]]:
    """Run the arms on the session of `seed`, or of the next seeds when the model spoils it.

    Returns the last session drawn and its arms, incomplete when DRAWS sessions were all spoilt.
    """
    for last in range(seed, seed + DRAWS):
        script, reason = draw(last), None
        runs: dict[str, ArmRun] = {}
        for arm in arms:
            with start(last, arm) as port:
                runs[arm] = run_arm(script, arm, port, audience)
            reason = spoilt(runs[arm])
            if reason:
                audience.redraw(last, reason)
                break
        if reason is None:
            break
    return script, runs
