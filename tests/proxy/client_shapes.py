"""Conversations of clients that do not send a growing list of messages.

The same conversations, in several shapes: `chat` (a growing list of messages, to compare with),
`transcript` (one message with the whole conversation as text), `clock` (the system prompt begins
with the time of the request), `window` (only the latest messages are sent). Every conversation
states facts, goes on about other things, and asks for each fact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evoke_proxy.demo.client import chat, read_turn
from evoke_proxy.demo.runner import recalled
from evoke_proxy.demo.session import SENTENCES, Fact, draw_fact, paragraph

_SYSTEM = "You are a small assistant. Be brief."
_FACTS, _FILLERS, _WINDOW_MESSAGES = 6, 18, 31
_REPLY = "Noted."

Message = Mapping[str, str]
Shape = Callable[[Sequence[Message], int], list[Message]]


def _chat(messages: Sequence[Message], number: int) -> list[Message]:
    return [{"role": "system", "content": _SYSTEM}, *messages]


def _transcript(messages: Sequence[Message], number: int) -> list[Message]:
    text = "\n".join(f"### {message['role']}\n{message['content']}" for message in messages)
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]


def _clock(messages: Sequence[Message], number: int) -> list[Message]:
    time = f"{9 + number // 60:02d}:{number % 60:02d}"
    return [{"role": "system", "content": f"The time is {time}. {_SYSTEM}"}, *messages]


def _window(messages: Sequence[Message], number: int) -> list[Message]:
    return _chat(messages[-_WINDOW_MESSAGES:], number)


SHAPES: Mapping[str, Shape] = {
    "chat": _chat,
    "transcript": _transcript,
    "clock": _clock,
    "window": _window,
}


@dataclass(frozen=True, slots=True)
class Script:
    """What the user says, and the fact that each turn asks for, if any."""

    turns: Sequence[tuple[str, Fact | None]]


def script(seed: int, fillers: int = _FILLERS, facts: int = _FACTS) -> Script:
    """Return the conversation of a seed: statements among other texts, then a question for each.

    With the defaults, the window of the shape `window` has all statements when the last question is
    asked.
    """
    rng = random.Random(f"shapes-{seed}")
    drawn: dict[str, Fact] = {}
    while len(drawn) < facts:
        fact = draw_fact(rng)
        drawn[fact.question] = fact
    said = [paragraph(rng, SENTENCES) for _ in range(fillers)]
    for fact in drawn.values():
        said.insert(rng.randrange(fillers // 2, len(said)), fact.statement)
    asked = rng.sample(list(drawn.values()), facts)
    return Script([*((text, None) for text in said), *((f.question, f) for f in asked)])


def converse(
    port: int, shape: str, script: Script, fields: Mapping[str, Any], name: str = ""
) -> dict[str, int]:
    """Send one conversation in a shape, under a name if it has one; return its counts.

    Answers that no fact is asked for are replaced by a fixed text, so that all arms send the same
    prompts.
    """
    messages: list[Message] = []
    counts = {"asked": 0, "right": 0, "prompt": 0, "decoded": 0, "peak": 0}
    for number, (text, fact) in enumerate(script.turns):
        messages.append({"role": "user", "content": text})
        body = {"messages": SHAPES[shape](messages, number), "temperature": 0, "max_tokens": 16}
        reply = chat(port, {**body, **fields}, {"X-Evoke-Session": name} if name else {})
        turn = read_turn(number, reply)
        counts["prompt"] += turn.prompt
        counts["decoded"] += turn.decoded
        counts["peak"] = max(counts["peak"], turn.resident_peak)
        if fact is not None:
            counts["asked"] += 1
            said = reply.text.partition("\n")[0]
            counts["right"] += recalled(said, fact.value)
        answer = f"{fact.value}." if fact is not None else _REPLY
        messages.append({"role": "assistant", "content": answer})
    return counts
