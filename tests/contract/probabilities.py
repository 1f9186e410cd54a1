"""All log probabilities of an answer."""

from __future__ import annotations

from llama import Llama

STEPS = 26
VOCABULARY = 2048


def logprobs(server: Llama, prompt: list[int], slot: int) -> list[object]:
    """All log probabilities of each greedy step."""
    answer = server.complete(prompt, slot, n_predict=STEPS, n_probs=VOCABULARY)
    steps = answer["completion_probabilities"]
    assert len(steps) == STEPS
    assert all(len(step["top_logprobs"]) == VOCABULARY for step in steps)
    return [[(p["id"], p["logprob"]) for p in step["top_logprobs"]] for step in steps]
