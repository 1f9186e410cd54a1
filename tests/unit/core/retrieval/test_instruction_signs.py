"""The weights of standing instructions in other languages are those that their recipe makes."""

from __future__ import annotations

from evoke_proxy.core.retrieval.instruction_signs import BIASES, SIGNS, WORDS
from evoke_proxy.core.retrieval.instruction_words import INSTRUCTION_WORDS
from recipes.instructions.languages import Evidence, texts


def test_weights_are_of_the_signs_that_the_recipe_finds() -> None:
    names = set(Evidence([*texts()]).names)
    assert names >= SIGNS.keys()
    assert BIASES.keys() == WORDS.keys() == INSTRUCTION_WORDS.keys()
    for language, words in WORDS.items():
        assert names >= {f"{language}:{word}" for word in words}
    assert len(SIGNS) > 100 and all(len(words) > 100 for words in WORDS.values())
