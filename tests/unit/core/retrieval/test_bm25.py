"""BM25 over the blocks of a session: terms, phrases, and the evidence of an inverted index."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.retrieval.bm25 import (
    FUNCTION_STEMS,
    InvertedIndex,
    function_stems,
    phrase_text,
    phrase_weights,
    query_phrases,
    sum_evidence,
    terms_of,
)
from evoke_proxy.core.retrieval.stemming import stem


def index_of(*texts: str) -> InvertedIndex:
    """An index in which all documents are active."""
    index = InvertedIndex()
    for text in texts:
        index.add(Counter(terms_of(text)))
    index.set_active(np.arange(len(texts)))
    return index


def bm25(term: str, texts: list[str]) -> list[float]:
    """The score of a term in each text, by the formula of Robertson and Zaragoza (2009)."""
    documents = [terms_of(text) for text in texts]
    mean = max(sum(map(len, documents)) / len(documents), 1.0)
    frequency = sum(term in words for words in documents)
    weight = math.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))
    scores = []
    for words in documents:
        count, norm = words.count(term), 1.2 * (1 - 0.75 + 0.75 * len(words) / mean)
        scores.append(weight * count * 2.2 / (count + norm) if count else 0.0)
    return scores


def test_the_terms_of_an_identifier_are_the_whole_and_its_parts() -> None:
    assert terms_of("Set API_PORT=8080 in src/config.py!") == [
        "set", "api_port", "api", "port", "8080", "in", "src/config.py", "src", "config", "py",
    ]  # fmt: skip


def test_names_in_camel_case_have_their_parts_as_terms() -> None:
    assert terms_of("maxRetryCount") == ["maxretrycount", "max", "retry", "count"]
    assert terms_of("HTTPServer") == ["httpserver", "http", "server"]
    assert terms_of("HTTP Server") == ["http", "server"]


def test_text_without_spaces_is_cut_into_pairs() -> None:
    assert terms_of("東京都")[-2:] == ["東京", "京都"]


@given(st.text(max_size=60))
def test_terms_are_in_lower_case_and_never_empty(text: str) -> None:
    assert all(term and term == term.lower() for term in terms_of(text) if text.isascii())


def test_function_words_that_are_nouns_or_verbs_keep_their_meaning() -> None:
    assert function_stems("Where is the bridge?") == FUNCTION_STEMS
    assert function_stems("When does the show begin?") == FUNCTION_STEMS - {stem("show")}
    assert function_stems("What did Ann give Bob?") == FUNCTION_STEMS - {stem("give")}
    assert function_stems("Please give me the code") == FUNCTION_STEMS


def test_phrases_are_the_pairs_with_an_informative_word() -> None:
    phrases = query_phrases("Is it in my Street or my street?", {"street"})
    assert phrases == (" my street", " street or")
    assert phrase_text("In  MY\nStreet") == " in my street"
    assert all(phrase in phrase_text("my street or ours") for phrase in phrases)


def test_documents_with_fewer_phrases_get_a_smaller_factor() -> None:
    assert phrase_weights(np.array([0.0, 1.0, 2.0])) == pytest.approx([0.65, 0.825, 1.0])
    assert phrase_weights(np.zeros(3)) == pytest.approx([1, 1, 1])
    assert len(phrase_weights(np.zeros(0))) == 0


TEXTS = ["the oslo vault", "the market is open and the river is wide", "oslo oslo market"]


@given(st.lists(st.lists(st.sampled_from(["oslo", "vault", "river"]), min_size=1), min_size=1))
def test_scores_are_those_of_the_formula(words: list[list[str]]) -> None:
    texts = [" ".join(one) for one in words]
    for term in ("oslo", "vault", "absent"):
        evidence = index_of(*texts).exact_evidence(term)
        scores = np.zeros(len(texts))
        scores[evidence.documents] = evidence.scores
        assert scores == pytest.approx(bm25(term, texts))


def test_function_words_have_a_tenth_of_the_weight() -> None:
    evidence = index_of(*TEXTS).exact_evidence("the")
    assert evidence.documents.tolist() == [0, 1]
    assert evidence.weight == pytest.approx(0.1 * math.log(1 + 1.5 / 2.5))


def test_statistics_and_results_are_those_of_the_active_documents() -> None:
    index = index_of(*TEXTS)
    index.set_active(np.array([1, 2]))
    alone = index_of(*TEXTS[1:]).exact_evidence("oslo")
    evidence = index.exact_evidence("oslo")
    assert evidence.documents.tolist() == [2]
    assert (evidence.weight, *evidence.scores) == pytest.approx((alone.weight, *alone.scores))
    numbers, documents, counts = index.stem_counts([stem("market"), stem("oslo"), "absent"])
    assert list(zip(numbers, documents, counts, strict=True)) == [(0, 1, 1), (0, 2, 1), (1, 2, 2)]
    number = index.stem_number(stem("oslo"))
    assert number is not None
    assert [list(one) for one in index.documents_with(number)] == [[2]]
    index.set_active(np.arange(3))
    assert [list(one) for one in index.documents_with(number)] == [[0, 2]]


def test_a_word_is_rare_until_more_than_three_later_documents_have_a_form_of_it() -> None:
    index = index_of("port key", "ports of", "the port other", "port port")
    index.set_active(np.arange(4))
    kept = index.n_rare
    assert kept.tolist() == [2, 1, 2, 1]
    index.add(Counter(terms_of("17 ported")))
    index.set_active(np.arange(5))
    assert index.n_rare.tolist() == [1, 1, 2, 1, 2]
    assert kept.tolist() == [2, 1, 2, 1], "a value that was returned does not change"
    index.set_active(np.array([0, 2, 3, 4]))
    for _ in range(2):
        index.n_rare[:] = 9
        assert index.n_rare[[0, 2, 3, 4]].tolist() == [2, 2, 1, 2]
    assert InvertedIndex().n_rare.tolist() == []


@given(
    st.lists(st.lists(st.sampled_from("port ports key 17 the reader read".split()), max_size=6)),
    st.data(),
)
def test_rare_words_are_those_of_the_active_documents(
    texts: list[list[str]], data: st.DataObject
) -> None:
    index = index_of(*map(" ".join, texts))
    active = [i for i in range(len(texts)) if data.draw(st.booleans())]
    index.set_active(np.array(active, np.int64))
    alone = index_of(*(" ".join(texts[i]) for i in active))
    assert index.n_rare[active].tolist() == alone.n_rare.tolist()


def test_stems_without_a_document_have_no_number_and_function_words_are_no_content() -> None:
    index = index_of(*TEXTS)
    assert index.stem_number(stem("vaults")) is not None and index.stem_number("absent") is None
    assert index.stem_numbers([stem("oslo"), "absent"]) == {index.stem_number("oslo"), None}
    content = {index.stem_number(stem(word)) for word in ("oslo", "vault")}
    assert set(index.content_stems(0)) == content and len(index.content_stems(0)) == 2


def test_a_document_with_a_similar_term_gets_less_than_one_with_the_term() -> None:
    texts = ["the certificate expires", "the certificates expire", *["some river"] * 40]
    index = index_of(*texts)
    exact = {"certificate": index.exact_evidence("certificate"), "the": index.exact_evidence("the")}
    expanded = index.fuzzy_evidence(exact)
    assert expanded["the"] is exact["the"], "function words are not expanded"
    evidence = expanded["certificate"]
    assert evidence.documents.tolist() == [0, 1]
    assert evidence.match_strength[0] == 1 > evidence.match_strength[1] > 0
    assert evidence.scores[0] > evidence.scores[1] > 0


def test_a_frequent_term_is_not_expanded() -> None:
    texts = ["certificate"] * 20 + ["certificates"] + ["river"] * 20
    index = index_of(*texts)
    exact = {"certificate": index.exact_evidence("certificate")}
    assert index.fuzzy_evidence(exact)["certificate"] is exact["certificate"]


def test_informative_terms_exclude_function_words_and_what_most_documents_contain() -> None:
    index = index_of(*[f"river number{i}" for i in range(64)], "oslo")
    assert index.informative_terms("where is the oslo river oslo") == ["oslo"]
    assert index.informative_terms("the river") == ["river"]
    assert index.informative_terms("where is it") == ["where", "is", "it"]
    assert index_of("river").informative_terms("the river") == ["river"]


def test_the_sum_of_evidence_has_the_covered_share_of_the_weight() -> None:
    index = index_of(*TEXTS)
    found = [index.exact_evidence("oslo"), index.exact_evidence("vault")]
    scores, coverage = sum_evidence(found, 3)
    assert scores == pytest.approx(np.add(bm25("oslo", TEXTS), bm25("vault", TEXTS)))
    oslo = found[0].weight / (found[0].weight + found[1].weight)
    assert coverage == pytest.approx([1, 0, oslo])
    nothing, uncovered = sum_evidence([], 3)
    assert not nothing.any() and not uncovered.any()
