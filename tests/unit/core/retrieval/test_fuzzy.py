"""Terms of similar spelling: which ones are found, in which order, and how similar they are."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.retrieval import fuzzy
from evoke_proxy.core.retrieval.fuzzy import FuzzyTerms, comparable, is_misspelt


def fuzzy_terms(*terms: str) -> FuzzyTerms:
    index = FuzzyTerms()
    for term in terms:
        index.add(term)
    return index


def dice(a: str, b: str) -> float:
    """Dice's coefficient of the bigrams of two words with marked ends."""
    first, second = ({f"^{w}$"[i : i + 2] for i in range(len(w) + 1)} for w in (a, b))
    return 2 * len(first & second) / (len(first) + len(second))


def test_a_typing_error_is_similar_by_the_coefficient_of_dice() -> None:
    (similar,) = fuzzy_terms("recieve", "believe", "machine").similar(["receive"])
    assert similar[0] == ("recieve", pytest.approx(dice("receive", "recieve")))
    assert all(0.5 <= similarity <= 1 for _, similarity in similar)
    assert "machine" not in dict(similar)


def test_a_term_that_contains_another_has_at_least_a_fixed_similarity() -> None:
    (similar,) = fuzzy_terms("requesttimeout", "port").similar(["timeout"])
    assert similar == [("requesttimeout", 0.7)]
    (ports,) = fuzzy_terms("port").similar(["ports"])
    assert ports == [("port", pytest.approx(max(0.7, dice("port", "ports"))))]


def test_codes_with_digits_are_similar_only_by_containment() -> None:
    index = fuzzy_terms("ab12345", "ab12346", "code12345x")
    assert index.similar(["ab12347"]) == [[]]
    assert index.similar(["code12345"]) == [[("code12345x", 0.7)]]


def test_a_term_is_not_similar_to_itself() -> None:
    assert fuzzy_terms("timeout").similar(["timeout"]) == [[]]


@pytest.mark.parametrize("term", ["abc", "a" * 41, "12345", "src/config.py", "two words", ""])
def test_short_long_and_numeric_terms_are_neither_added_nor_searched(term: str) -> None:
    assert not comparable(term)
    assert fuzzy_terms(term, "configuration").similar([term, "abcd"]) == [[], []]
    assert comparable("abcd") and comparable("a" * 40) and comparable("12345x")


def test_the_results_are_in_the_order_of_the_queries() -> None:
    index = fuzzy_terms("timeouts", "certificate")
    found = index.similar(["certificates", "x", "timeout"])
    assert [[term for term, _ in similar] for similar in found] == [
        ["certificate"],
        [],
        ["timeouts"],
    ]


def test_without_terms_nothing_is_similar() -> None:
    assert FuzzyTerms().similar(["timeout"]) == [[]]
    assert fuzzy_terms("timeout").similar([]) == []


def test_of_many_similar_terms_the_ten_most_similar_are_compared() -> None:
    words = [f"interaction{a}{b}" for a in "abcde" for b in "fghij"]
    (similar,) = fuzzy_terms(*words).similar(["interaction"])
    assert len(similar) == 10
    assert similar == sorted(similar, key=lambda pair: (-pair[1], pair[0]))


@given(
    st.lists(st.text("abcdn1", min_size=4, max_size=9), unique=True, max_size=30),
    st.lists(st.text("abcdn1", max_size=9), max_size=5),
)
def test_every_result_is_an_added_term_with_its_similarity(
    terms: list[str], queries: list[str]
) -> None:
    found = fuzzy_terms(*terms).similar(queries)
    assert len(found) == len(queries)
    for query, similar in zip(queries, found, strict=True):
        assert similar == sorted(similar, key=lambda pair: (-pair[1], pair[0]))
        for term, similarity in similar:
            assert term in terms and term != query
            expected = dice(query, term) if (query + term).isalpha() else 0.0
            if query in term or term in query:
                expected = max(0.7, expected)
            assert similarity == pytest.approx(expected) and similarity >= 0.5


@pytest.mark.parametrize(
    "term", ["projct", "projcet", "prrojet", "pproject", "proiect", "projectt", "projec"]
)
def test_one_typing_error_makes_a_term_of_another(term: str) -> None:
    assert is_misspelt(term, "project") == (term != "prrojet")


def test_other_words_and_codes_are_no_typing_errors() -> None:
    assert not is_misspelt("project", "project")
    assert not is_misspelt("roject", "project")  # the first letter is right
    assert not is_misspelt("part", "port")
    assert not is_misspelt("code12345", "code12346")
    assert not is_misspelt("marta", "martian")


@given(st.text("abc", min_size=5, max_size=8), st.text("abc", min_size=5, max_size=8))
def test_a_typing_error_is_one_edit(term: str, other: str) -> None:
    def edits(word: str) -> set[str]:
        cuts = [(word[:i], word[i:]) for i in range(len(word) + 1)]
        added = {a + c + b for a, b in cuts for c in "abc"}
        left_out = {a + b[1:] for a, b in cuts if b}
        replaced = {a + c + b[1:] for a, b in cuts if b for c in "abc"}
        exchanged = {a + b[1] + b[0] + b[2:] for a, b in cuts if len(b) > 1}
        return added | left_out | replaced | exchanged

    is_one = other in edits(term) and term != other and term[0] == other[0]
    assert is_misspelt(term, other) == is_one


@given(st.lists(st.text("abcdefgh", min_size=4, max_size=9), unique=True, max_size=40))
def test_terms_divided_early_are_found_like_those_divided_by_a_search(terms: list[str]) -> None:
    early, late = FuzzyTerms(), FuzzyTerms()
    for term in terms:
        early.add(term)
        early.settle()
        late.add(term)
    assert early.similar(terms) == late.similar(terms)
    assert late.similar(["ab"]) == [[]]


def test_many_terms_do_not_wait_for_a_search() -> None:
    index = fuzzy_terms(*(f"term{n}word" for n in range(1000)))
    assert len(index._waiting) < 256


def alike_words(n: int) -> list[str]:
    """Different words of 7 of the same 5 letters: most trigrams are in 4 % of them."""
    rng = random.Random(1)
    words = dict.fromkeys("".join(rng.choices("aeinr", k=7)) for _ in range(2 * n))
    return list(words)[:n]


def test_a_search_counts_a_limited_number_of_trigrams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of few letters have most trigrams in common: counting all of them takes a second."""
    words, counted = alike_words(12_256), list[int]()
    index = fuzzy_terms(*words[:12_000])
    count = FuzzyTerms._shared_trigrams

    def counting(
        self: FuzzyTerms, trigrams: Sequence[Sequence[str]], sizes: Sequence[int]
    ) -> object:
        pairs = count(self, trigrams, sizes)
        counted.append(int(pairs.shared.sum()))
        return pairs

    monkeypatch.setattr(FuzzyTerms, "_shared_trigrams", counting)
    tracemalloc.start()
    try:
        found = index.similar(words[12_000:])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == 256 and any(found)
    assert sum(counted) <= 16 * 12_000 and max(counted) <= 1 << 17
    assert peak < 24 << 20


def test_the_rarest_trigrams_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*(f"common{a}{b}" for a in "abcde" for b in "fghij"), "zygote"]
    for name in ("_LEAST_COUNTED", "_MOST_COUNTED"):
        monkeypatch.setattr(fuzzy, name, 30)
    common, rare = fuzzy_terms(*words).similar(["commonly", "zygotes"])
    assert rare == [("zygote", pytest.approx(0.8))] and common == []


def test_terms_that_are_ranked_in_several_passes_have_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = alike_words(1_100)
    together = fuzzy_terms(*words[:1000]).similar(words[1000:])
    monkeypatch.setattr(fuzzy, "_SORTED_AT_ONCE", 500)
    assert fuzzy_terms(*words[:1000]).similar(words[1000:]) == together
    assert any(together)


def test_a_term_is_looked_up_once_until_others_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    index, looked_up = fuzzy_terms("recieve", "believe"), list[str]()
    candidates = FuzzyTerms._candidates

    def counting(self: FuzzyTerms, queries: Sequence[str]) -> list[list[str]]:
        looked_up.extend(queries)
        return candidates(self, queries)

    monkeypatch.setattr(FuzzyTerms, "_candidates", counting)
    first = index.similar(["receive", "receive", "believed"])
    assert index.similar(["believed", "receive"]) == first[:0:-1] and first[0] == first[1]
    assert looked_up == ["receive", "believed"]
    index.add("receives")
    assert index.similar(["receive"])[0][0][0] == "receives" and len(looked_up) == 3
    assert len(index._found) == 1
    monkeypatch.setattr(fuzzy, "_MAX_FOUND", 2)
    index.similar(["certificate", "believed", "relieve", "achieve"])
    assert len(index._found) <= 2
