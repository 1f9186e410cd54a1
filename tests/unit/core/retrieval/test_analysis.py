"""Analyses of texts that are made before the blocks with these texts exist."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.retrieval import index as index_module
from evoke_proxy.core.retrieval.analysis import PreparedTexts, TextAnalysis, name_stems, names_in
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.retrieval.units import Units

TEXTS = (
    ("Always answer in French.", Role.USER),
    ("My landlord forbids pets, and the flat in Leeds-7 has none.", Role.USER),
    ("Noted: no pets in `maxRetryCount`", Role.ASSISTANT),
    ("Does Alice's landlord forbid pets?", Role.USER),
)


def table() -> BlockTable:
    return BlockTable(
        Block(f"{role}:{i}#0", f"s/{i}", Span(9 * i, 9 * i + 9), role, 1, i, text)
        for i, (text, role) in enumerate(TEXTS)
    )


def test_an_index_of_prepared_texts_ranks_as_one_that_analyses_them_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks, query = table(), Query.of("Which pets does the landlord forbid, and where is Leeds-7?")
    expected, prepared = Index(), Index()
    prepared.prepare(PreparedTexts.of(TEXTS, {}, query))
    expected.update(blocks)
    monkeypatch.setattr(index_module.PreparedTexts, "analysis", _prepared_only)
    prepared.update(blocks)
    monkeypatch.undo()
    terms = prepared.prepared.query_terms
    assert set(terms) == {query.text, *query.clauses} and all(map(len, terms.values()))
    units = Units.of(blocks, 64)
    for ranked in ("unit_order", "relevance"):
        found = [
            one.unit_order(query, blocks, units, 3)
            if ranked == "unit_order"
            else one.relevance(query, blocks, 3)
            for one in (expected, prepared)
        ]
        assert len(found[0]) and np.array_equal(*found)
    points = [one.instruction_points(blocks) for one in (expected, prepared)]
    assert points[0].any() and np.array_equal(*points)


def _prepared_only(texts: PreparedTexts, text: str, role: Role) -> TextAnalysis:
    return texts.analyses[text, role]


def test_a_text_is_analysed_for_the_role_of_its_block() -> None:
    text = "Always answer in French."
    prepared = PreparedTexts.of([(text, Role.ASSISTANT)], {}, Query.of("Why?"))
    assert prepared.analysis(text, Role.ASSISTANT).instruction_points == 0
    assert prepared.analysis(text, Role.USER).instruction_points > 0


def test_names_are_capitalised_within_a_sentence_or_have_unusual_characters() -> None:
    text = "The boat of Mira Kolt costs 48213. It is api_port or maxRetry, not NASA."
    certain = {"mira", "kolt", "48213", "api_port", "maxretry", "nasa"}
    assert {name for name, certainty in names_in(text).items() if certainty == 1.0} == certain
    assert 0.0 < names_in("Greta left. Paul stayed.")["paul"] < 1.0


@given(st.text(st.sampled_from("abzAZ09_ .,!?-\n'"), max_size=40))
def test_names_of_ascii_texts_are_those_of_all_texts(text: str) -> None:
    assert names_in(text) == names_in(f"{text} \N{MIDDLE DOT}")


def test_names_are_searched_in_the_beginning_of_a_text() -> None:
    text = "He met Mira Kolt and Ann " + "x" * 2048 + " and Paul."
    assert [name for name, _ in name_stems(text)] == ["mira", "kolt", "ann"]
    assert TextAnalysis.of(text, Role.USER).names == name_stems(text)
