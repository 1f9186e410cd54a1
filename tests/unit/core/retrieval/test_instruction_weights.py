"""The weights of the signs of standing instructions are those that their recipe makes."""

from __future__ import annotations

import numpy as np

from evoke_proxy.core.retrieval.instruction_weights import BIAS, WEIGHTS
from evoke_proxy.core.retrieval.instructions import instruction_points
from recipes.instructions.train import MARGIN, Evidence, learned, module, texts


def test_the_weights_of_the_package_are_made_by_the_recipe() -> None:
    examples = texts()
    evidence = Evidence(examples)
    made: dict[str, object] = {}
    # Two steps from the weights of the package are as good as eight from 0.
    start = np.array([*(WEIGHTS.get(sign, 0) for sign in evidence.names), BIAS + 100 * MARGIN])
    found = learned(evidence.rows, evidence.standing, start / 100)
    exec(module(evidence.names, found, MARGIN), made)
    weights = made["WEIGHTS"]
    assert isinstance(weights, dict) and isinstance(made["BIAS"], int)
    # Other processors round differently, and a weight of 4.99 is left out.
    assert abs(made["BIAS"] - BIAS) <= 1
    signs = weights.keys() | WEIGHTS.keys()
    assert all(abs(weights.get(sign, 0) - WEIGHTS.get(sign, 0)) <= 5 for sign in signs)


def test_most_of_the_texts_are_recognized() -> None:
    found = {True: list[bool](), False: list[bool]()}
    for each in texts():
        if each.author.startswith("author"):
            found[each.is_standing].append(instruction_points(each.text) > 0)
    assert np.mean(found[True]) > 0.75 and np.mean(found[False]) < 0.12
