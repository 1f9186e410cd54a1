"""The facts of the generator for benches and training: near misses."""

from __future__ import annotations

import random

from bench.model import facts


def test_a_near_miss_is_a_fact_of_the_same_kind() -> None:
    rng = random.Random(1)
    for _ in range(500):
        fact = facts.draw(rng)
        near = facts.near_miss(rng, fact)
        assert near.kind == fact.kind
        assert near.type == fact.type if fact.kind != "file" else set(near.parts) & set(fact.parts)
