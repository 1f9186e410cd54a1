"""Learning the weights of signs."""

from __future__ import annotations

import numpy as np

from recipes.instructions.train import Evidence, Text, cross_validated, learned


def test_a_sign_that_decides_has_a_weight_and_one_that_says_nothing_has_almost_none() -> None:
    random = np.random.default_rng(5)
    rows = random.integers(0, 2, (400, 3)).astype(float)
    rows[:, 2] = 1.0
    weights = learned(rows, rows[:, 0])
    assert weights[0] > 5 and abs(weights[1]) < 0.5 and weights[2] < -2


def test_a_text_is_recognized_by_what_other_authors_wrote() -> None:
    signs = ("whenever green", "blue")
    examples = [
        Text(f"author {author}", f"{word} {n}", word == signs[0])
        for author in range(3)
        for word in signs
        for n in range(6)
    ]
    odds = cross_validated(examples, Evidence(examples))
    assert all((value > 0) == each.is_standing for value, each in zip(odds, examples, strict=True))
