"""Lists of words by which standing instructions in other languages are recognized."""

from __future__ import annotations

import unicodedata

from evoke_proxy.core.retrieval.instruction_words import INSTRUCTION_WORDS
from evoke_proxy.core.retrieval.languages import LANGUAGES


def test_each_language_has_the_same_kinds_of_words() -> None:
    kinds = {
        name: [part for part in listed.split() if part.endswith(":")]
        for name, listed in INSTRUCTION_WORDS.items()
    }
    assert kinds.keys() == {language.name for language in LANGUAGES}
    assert all(of_one == kinds["German"] for of_one in kinds.values())


def test_words_are_in_lower_case_and_without_accents() -> None:
    for listed in INSTRUCTION_WORDS.values():
        assert listed == unicodedata.normalize("NFD", listed.casefold())
        # Of phrases only pairs are looked up.
        assert all(part.count("_") <= 1 for part in listed.split())
