"""Analyses of texts that are made before the blocks with these texts exist."""

from __future__ import annotations

import numpy as np
import pytest

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.retrieval import index as index_module
from evoke_proxy.core.retrieval.analysis import PreparedTexts, TextAnalysis
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
    prepared.prepare(PreparedTexts.of(TEXTS, {}))
    expected.update(blocks)
    monkeypatch.setattr(index_module.PreparedTexts, "analysis", _prepared_only)
    prepared.update(blocks)
    monkeypatch.undo()
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
    prepared = PreparedTexts.of([(text, Role.ASSISTANT)], {})
    assert prepared.analysis(text, Role.ASSISTANT).instruction_points == 0
    assert prepared.analysis(text, Role.USER).instruction_points > 0
