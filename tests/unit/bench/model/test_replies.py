"""Forms of answers: those that are held out are not among them."""

from __future__ import annotations

import random

from bench.model import replies
from bench.model.vocab import UNSEEN_OPENINGS


def test_an_opening_that_is_held_out_is_never_drawn() -> None:
    rng = random.Random(1)
    for _ in range(20_000):
        opening = replies.draw(rng, "my badge number").opening
        for held in UNSEEN_OPENINGS:
            assert not opening.startswith(held), opening
        assert "Let me think about" not in opening and "the value that you ask for" not in opening


def test_the_value_alone_is_always_asked_for() -> None:
    rng = random.Random(2)
    drawn = [replies.draw(rng, "my badge number") for _ in range(2000)]
    assert all(reply.request for reply in drawn if not reply.opening)
    assert any(not reply.opening for reply in drawn)
    assert any(not reply.request for reply in drawn)


def test_thoughts_name_the_key_only_sometimes() -> None:
    rng = random.Random(3)
    drawn = [replies.draw(rng, "my badge number").opening for _ in range(2000)]
    named = [opening for opening in drawn if "badge number" in opening]
    assert 100 < len(named) < 1500
    assert not any("my badge number" in opening for opening in named)
