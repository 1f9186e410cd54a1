"""The grammar of a forced answer, the reading of its distributions, and their divergence."""

from __future__ import annotations

import math

import pytest

from evoke_proxy.core.request.forced_answer import (
    Step,
    forced_chat,
    forced_completion,
    kl_divergence,
    read_steps,
)


def step(*probabilities: float, token: int = 0) -> Step:
    """A step whose token i has the i-th probability."""
    top = {at: math.log(p) for at, p in enumerate(probabilities)}
    return Step(token, top[token], top)


def item(token: int, *probabilities: float) -> dict[str, object]:
    top = [{"id": at, "logprob": math.log(p)} for at, p in enumerate(probabilities)]
    return {"id": token, "logprob": math.log(probabilities[token]), "top_logprobs": top}


def test_the_grammar_has_every_token_in_order() -> None:
    assert forced_completion([7, 1, 7], 5)["grammar"] == "root ::= <[7]> <[1]> <[7]>"
    assert forced_chat([7, 1], 5)["max_tokens"] == 2


def test_steps_are_read_from_completions_and_from_chats() -> None:
    entries = [item(1, 0.75, 0.25), item(0, 0.5, 0.5)]
    completion = {"completion_probabilities": entries}
    chat = {"choices": [{"logprobs": {"content": entries}}]}
    found = read_steps(completion, [1, 0])
    assert found is not None and found == read_steps(chat, [1, 0])
    assert found[0].best == 0 and found[0].logprob == pytest.approx(math.log(0.25))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"logprobs": None}]},
        {"completion_probabilities": [item(1, 0.5, 0.5)]},
        {"completion_probabilities": [item(0, 0.5, 0.5), {"id": 0}]},
    ],
)
def test_a_reply_of_other_tokens_is_not_read(answer: dict[str, object]) -> None:
    assert read_steps(answer, [0, 1]) is None


def test_the_divergence_of_whole_distributions_is_exact() -> None:
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert kl_divergence(step(0.75, 0.25), step(0.5, 0.5)) == pytest.approx(expected)
    assert kl_divergence(step(0.75, 0.25), step(0.75, 0.25)) == 0


def test_with_few_listed_tokens_the_divergence_is_a_lower_bound() -> None:
    ours, theirs = (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4)
    whole = kl_divergence(step(*ours), step(*theirs))
    listed = Step(0, math.log(0.4), {0: math.log(0.4), 1: math.log(0.3)})
    # The other distribution lists its own most probable tokens, 3 and 2.
    other = Step(3, math.log(0.4), {3: math.log(0.4), 2: math.log(0.3)})
    assert 0 < kl_divergence(listed, other) <= whole
