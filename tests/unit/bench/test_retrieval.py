"""The retrieval bench: its questions are of the kinds that it reports."""

from __future__ import annotations

import random

from bench.retrieval import FACTS, find, haystack, mistyped, recall
from evoke_proxy.core.retrieval.bm25 import FUNCTION_WORDS, terms_of


def content(text: str) -> set[str]:
    return set(terms_of(text)) - FUNCTION_WORDS


def test_lexical_questions_share_a_content_word_with_the_fact_and_paraphrases_none() -> None:
    assert len(FACTS) >= 40
    for fact in FACTS:
        assert not content(fact.fact) & content(fact.paraphrase), fact
        assert content(fact.fact) & content(fact.lexical), fact


def test_mistyped_changes_every_longer_content_word() -> None:
    question = "How many litres of oil does the engine need?"
    assert not {"litres", "engine"} & content(mistyped(random.Random(1), question))


def test_bm25_finds_facts_with_common_words_and_not_their_paraphrases() -> None:
    lines = recall(find(haystack(1, 256), None))
    share = {(line["kind"], line["arm"]): line["@8"] for line in lines}
    assert share["lexical", "bm25"] > 0.95 and share["numbers", "bm25"] > 0.95
    assert share["paraphrase", "bm25"] < 0.2
    assert share["typos", "+ngrams"] > share["typos", "bm25"] + 0.2
    assert share["inflected", "+ngrams"] > share["inflected", "bm25"] + 0.2
    assert ("lexical", "dense") not in share


def test_a_seed_gives_the_same_haystack() -> None:
    assert haystack(3, 256).questions == haystack(3, 256).questions
