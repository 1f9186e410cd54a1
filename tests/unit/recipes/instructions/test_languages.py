"""Learning the weights of signs of instructions in other languages than English."""

from __future__ import annotations

import numpy as np

from evoke_proxy.core.retrieval.languages import LANGUAGES
from recipes.instructions.languages import CODES, Evidence, Text, margins_of, module, texts


def test_each_language_has_texts_of_both_kinds_to_learn_from_and_held_out() -> None:
    found = [*texts()]
    assert CODES.keys() == {language.name for language in LANGUAGES}
    for name in CODES:
        for standing, fewest in ((True, 30), (False, 55)):
            mine = [t for t in found if t.language.name == name and t.is_standing == standing]
            n_held = sum(each.fold < 0 for each in mine)
            assert n_held >= fewest and sum(each.is_own for each in mine) >= 5 * n_held


def test_the_margin_of_a_language_is_exceeded_by_the_share_of_its_other_texts() -> None:
    examples = [Text(language, str(i), False, i % 5) for language in LANGUAGES for i in range(100)]
    points = np.array([float(each.text) for each in examples])
    margins = margins_of(examples, points, 0.1)
    assert all(89 <= margin <= 90 for margin in margins.values())


def test_a_module_has_the_weights_of_signs_and_words_that_are_not_small() -> None:
    examples = [
        Text(language, "immer nie toujours siempre sempre altijd 永远", True, 0)
        for language in LANGUAGES
        for _ in range(3)
    ]
    names = Evidence(examples).names
    weights = np.zeros(len(names) + 1)
    weights[names.index("=always")], weights[names.index("German:immer")] = 1.5, -0.5
    weights[-1] = -2.0
    made: dict[str, object] = {}
    exec(module(names, weights, {name: 1.0 for name in CODES}), made)
    assert made["BIASES"] == dict.fromkeys(CODES, -300)
    assert made["SIGNS"] == {"=always": 150}
    assert made["WORDS"] == {name: {"immer": -50} if name == "German" else {} for name in CODES}
