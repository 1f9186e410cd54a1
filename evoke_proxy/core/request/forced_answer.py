"""Makes llama-server generate given tokens, and reads the probabilities that the model gave them.

A grammar allows exactly the given tokens, one after the other. The probabilities that llama-server
reports are those of the model before the grammar applies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What a model of any vocabulary leaves for one token that it does not list.
_LEAST_PROBABILITY = 1e-12


@dataclass(frozen=True, slots=True)
class Step:
    """The distribution of one token of an answer.

    Attributes:
        token: The token that was generated.
        logprob: Its log probability.
        top: The log probabilities of the most probable tokens, by token.
    """

    token: int
    logprob: float
    top: Mapping[int, float]

    @property
    def best(self) -> int:
        """The most probable token."""
        return max(self.top, key=lambda token: self.top[token])


def forced_grammar(tokens: Sequence[int]) -> str:
    """Return a grammar that allows these tokens and nothing else."""
    return "root ::= " + " ".join(f"<[{token}]>" for token in tokens)


def forced_chat(tokens: Sequence[int], n_top: int) -> dict[str, Any]:
    """Return the fields of a chat request whose answer is these tokens.

    The reply has the log probabilities of the `n_top` most probable tokens in each step.
    """
    return {
        "grammar": forced_grammar(tokens),
        "max_tokens": len(tokens),
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": n_top,
    }


def forced_completion(tokens: Sequence[int], n_top: int) -> dict[str, Any]:
    """Return the same fields for `/completion`."""
    return {
        "grammar": forced_grammar(tokens),
        "n_predict": len(tokens),
        "temperature": 0,
        "n_probs": n_top,
    }


def read_steps(answer: Mapping[str, Any], tokens: Sequence[int]) -> list[Step] | None:
    """Read the steps of a whole reply to such a request, chat or completion.

    None when the reply does not consist of these tokens: a token that ends inside a character has
    no entry, for example.
    """
    steps = [_step(item) for item in _items(answer)]
    found = [step for step in steps if step is not None]
    return found if [step.token for step in found] == list(tokens) else None


def _items(answer: Mapping[str, Any]) -> Sequence[Any]:
    if "completion_probabilities" in answer:
        items = answer["completion_probabilities"]
    else:
        choices = answer.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        logprobs = first.get("logprobs") if isinstance(first, Mapping) else None
        items = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    return items if isinstance(items, list) else ()


def _step(item: Mapping[str, Any]) -> Step | None:
    try:
        top = {int(each["id"]): float(each["logprob"]) for each in item["top_logprobs"]}
        return Step(int(item["id"]), float(item["logprob"]), top) if top else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def kl_divergence(reference: Step, other: Step) -> float:
    """Return a lower bound of the Kullback-Leibler divergence of two distributions, in nats.

    The tokens that the reference does not list are one class. A token that only the reference
    lists has at most the least probability that the other one lists, so the bound holds; it is
    exact when both list the whole vocabulary (data processing inequality, Cover and Thomas,
    "Elements of Information Theory", 2.8).
    """
    floor = min(other.top.values())
    total, left, other_left = 0.0, 1.0, 1.0
    for token, logprob in reference.top.items():
        probability = math.exp(logprob)
        if probability > 0:
            other_logprob = other.top.get(token, floor)
            total += probability * (logprob - other_logprob)
            left -= probability
            other_left -= math.exp(other_logprob)
    if left > _LEAST_PROBABILITY:
        total += left * math.log(left / max(other_left, _LEAST_PROBABILITY))
    return max(0.0, total)
