"""What the retrieval bench asks is what it says it asks."""

from __future__ import annotations

import random

from bench.retrieval import find, haystack, mistyped, recall
from bench.retrieval_texts import FACTS
from evoke_proxy.core.retrieval.bm25 import FUNCTION_WORDS, terms_of


def content(text: str) -> set[str]:
    return set(terms_of(text)) - FUNCTION_WORDS


def test_no_paraphrase_shares_a_content_word_and_every_lexical_question_does() -> None:
    assert len(FACTS) >= 40
    for fact in FACTS:
        assert not content(fact.fact) & content(fact.paraphrase), fact
        assert content(fact.fact) & content(fact.lexical), fact


def test_a_typing_error_changes_every_longer_content_word() -> None:
    said = "How many litres of oil does the engine need?"
    assert not {"litres", "engine"} & content(mistyped(random.Random(1), said))


def test_words_find_what_they_name_and_not_what_is_said_in_others() -> None:
    lines = recall(find(haystack(1, 256), None))
    found = {(line["kind"], line["arm"]): line["@8"] for line in lines}
    assert found["lexical", "bm25"] > 0.95 and found["numbers", "bm25"] > 0.95
    assert found["paraphrase", "bm25"] < 0.2
    assert found["typos", "+ngrams"] > found["typos", "bm25"] + 0.2
    assert found["inflected", "+ngrams"] > found["inflected", "bm25"] + 0.2
    assert ("lexical", "dense") not in found


def test_equal_seeds_make_equal_haystacks() -> None:
    assert haystack(3, 256).questions == haystack(3, 256).questions
