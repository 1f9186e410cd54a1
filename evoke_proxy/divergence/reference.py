"""Answers with the whole prompt in the cache, and with a part of its blocks.

All use block calls of llama-server directly, without the proxy. The oracle knows the answer: it
keeps the blocks of the prompt to which the tokens of the answer gave most attention with the full
cache, in the layers that llama-server captures, and evicts all others. Their rows were decoded
with everything before them in the cache, which no policy can have after an eviction. Another choice
is left to chance. Where it is as good as the oracle, the model does not tell blocks apart, and the
comparison says nothing about any choice.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.request.forced_answer import Step, forced_completion, read_steps
from evoke_proxy.demo.client import DemoError
from evoke_proxy.divergence.llama import Port

_BLOCK_TOKENS = 64
_SINK_TOKENS = 16
_LAYERS = 4
# Blocks that are saved have names that begin with this.
_NAME = "divergence"
_CAPTURE: Mapping[str, Any] = {"op": "attn-capture", "mode": "sum", "window": 1}


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of a conversation and the answer that follows it.

    Attributes:
        index: Index of the answer's message.
        messages: The messages before it.
        prompt: Their rendering as tokens, with the beginning of an answer.
        last: Where the newest message begins in it.
        answer: The first tokens of the answer.
    """

    index: int
    messages: Sequence[Mapping[str, Any]]
    prompt: list[int]
    last: int
    answer: list[int]


def question(server: Port, messages: Sequence[Mapping[str, Any]], index: int, n: int) -> Question:
    """Render the messages before an answer and tokenise its first `n` tokens."""
    before = list(messages[:index])
    body = {"dialect": "chat", "body": {"messages": before}}
    rendered = server.call("POST", "/evoke/render", body)
    last = max((span["p0"] for span in rendered["spans"]), default=0)
    said = {"content": str(messages[index]["content"]).strip(), "add_special": False}
    answer = server.call("POST", "/tokenize", said)["tokens"]
    return Question(index, before, list(rendered["tokens"]), last, list(answer[:n]))


class Reference:
    """Measures the reference, the oracle and chance in slot 0 of a patched llama-server."""

    def __init__(self, server: Port, n_top: int) -> None:
        self._server = server
        self._n_top = n_top
        properties = server.call("GET", "/props").get("evoke") or {}
        if not properties.get("features"):
            reason = properties.get("unsupported", "it is not patched")
            raise DemoError(f"llama-server cannot evict with this model: {reason}")
        self.memory = str(properties["memory"])
        layers = properties.get("limits", {}).get("attention", {}).get("layers", [])
        self._layers = list(layers[:: max(1, len(layers) // _LAYERS)][-_LAYERS:])

    def full(self, asked: Question) -> list[Step] | None:
        """Return the steps of the answer with the whole prompt in the cache.

        None when the answer cannot be forced (see `read_steps`).
        """
        # Rows of an earlier answer may have been decoded while others were missing.
        n_tokens = int(self._server.call("GET", "/slots/0/blocks")["n_tokens"])
        n_reused = min(n_tokens, len(asked.prompt) - 1)
        ops: list[Mapping[str, Any]] = [{"op": "reuse", "n_tokens": n_reused}]
        if self._layers:
            ops += [{**_CAPTURE, "layers": []}, {**_CAPTURE, "layers": self._layers}]
        self._server.plan(*ops)
        return self._answered(asked)[0]

    def oracle(self, asked: Question, budget: int) -> list[Step] | None:
        """Return the steps with the blocks that the answer attends to; call it after `full`.

        None when the model's attention cannot be captured, or its memory cannot go back to the
        end of the prompt.
        """
        if not self._layers:
            return None
        ranges = [list(block) for block in _blocks(asked)]
        answer = self._server.call("POST", "/slots/0?action=attention", {"ranges": ranges})
        return self._with_best(asked, budget, answer["mass"])

    def chance(self, asked: Question, budget: int) -> list[Step] | None:
        """Return the steps with blocks chosen by chance; call it after `full`.

        The choice depends only on the length of the prompt, so that a run can be repeated.

        None when the memory of the model cannot go back to the end of the prompt.
        """
        draw = random.Random(len(asked.prompt))
        return self._with_best(
            asked, budget, [draw.random() * (end - start) for start, end in _blocks(asked)]
        )

    def _with_best(
        self, asked: Question, budget: int, masses: Sequence[float]
    ) -> list[Step] | None:
        """Return the steps without the blocks of least mass per token, which are loaded again."""
        n_tokens = len(asked.prompt)
        room = budget - len(asked.answer) - (n_tokens - asked.last) - _SINK_TOKENS
        checkpoints = self._server.call("GET", "/slots/0/blocks").get("held", ())
        away = _without(_evicted(_blocks(asked), masses, room), checkpoints)
        names = [f"{_NAME}/{start}-{end}" for start, end in away]
        ops: list[Mapping[str, Any]] = [
            *({"op": "save", "name": name, "p0": start, "p1": end}
              for name, (start, end) in zip(names, away, strict=True)),
            *({"op": "evict", "p0": start, "p1": end} for start, end in away),
            {"op": "reuse", "n_tokens": n_tokens - 1},
        ]  # fmt: skip
        self._server.plan(*ops)
        steps, omitted = self._answered(asked)
        if names and omitted:
            self._server.plan({"op": "load", "names": names}, {"op": "drop", "names": names})
        return steps if omitted or not away else None

    def _answered(self, asked: Question) -> tuple[list[Step] | None, int]:
        answer = self._server.complete(asked.prompt, forced_completion(asked.answer, self._n_top))
        accounting = answer.get("timings", {}).get("evoke") or {}
        return read_steps(answer, asked.answer), int(accounting.get("omitted", 0))


def _blocks(asked: Question) -> list[tuple[int, int]]:
    """Return blocks of 64 tokens between the sinks and the newest message."""
    return [
        (start, min(start + _BLOCK_TOKENS, asked.last))
        for start in range(_SINK_TOKENS, asked.last, _BLOCK_TOKENS)
    ]


def _without(
    ranges: Sequence[tuple[int, int]], rows: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Return the ranges without rows that a context checkpoint needs, which are never evicted."""
    found = list(ranges)
    for first, last in rows:
        found = [
            part
            for start, end in found
            for part in ((start, min(end, first)), (max(start, last), end))
            if part[0] < part[1]
        ]
    return found


def _evicted(
    blocks: Sequence[tuple[int, int]], masses: Sequence[float], room: int
) -> list[tuple[int, int]]:
    """Return merged ranges of the blocks that do not fit, those with least attention per token."""

    def density(at: int) -> float:
        start, end = blocks[at]
        return masses[at] / (end - start)

    kept = set()
    for at in sorted(range(len(blocks)), key=density, reverse=True):
        start, end = blocks[at]
        if end - start <= room:
            room -= end - start
            kept.add(at)
    ranges: list[tuple[int, int]] = []
    for at, (start, end) in enumerate(blocks):
        if at in kept:
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    return ranges
