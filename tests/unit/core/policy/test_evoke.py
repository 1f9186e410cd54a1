"""The evoke policy ranks blocks only where the ranking can change the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from policy_fixtures import CONFIG, FILLER, block_view

from evoke_proxy.core.model.block_table import BlockTable, Positions
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.policy.registry import decide
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.query import Query

QUERY = Query.of("What is the name of the harbour master?")


@pytest.fixture
def n_ranked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of blocks of each ranking that is computed."""
    calls: list[int] = []
    rank = Index.unit_order

    def counted(index: Index, query: Query, blocks: object, *others: object) -> Positions:
        calls.append(len(blocks))  # type: ignore[arg-type]
        return rank(index, query, blocks, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Index, "unit_order", counted)
    return calls


def test_a_prompt_that_fits_with_its_answer_is_not_ranked(n_ranked: list[int]) -> None:
    view = replace(block_view(FILLER[:8], "rrrsssrr"), max_tokens=100)
    config = replace(CONFIG, budget=view.n_tokens + 100)
    plan = decide(view, QUERY, config)
    assert not n_ranked
    assert not plan.evicts
    assert len(plan.loads) == 3, "all blocks that are not in the cache must come back"


@pytest.mark.parametrize("reason", ["budget", "answer", "cells"])
def test_a_prompt_that_may_not_fit_is_ranked(reason: str, n_ranked: list[int]) -> None:
    view = replace(block_view(FILLER[:8], "rrrsssrr"), max_tokens=100)
    config = replace(CONFIG, budget=view.n_tokens + 100)
    if reason == "budget":
        config = replace(config, budget=view.n_tokens + 99)
    elif reason == "answer":
        view = replace(view, max_tokens=None)
    else:
        view = replace(view, n_free=100)
    decide(view, QUERY, config)
    assert n_ranked == [8]


def test_nothing_is_ranked_without_a_budget(n_ranked: list[int]) -> None:
    decide(block_view(FILLER[:8], "rrrsssrr"), QUERY, replace(CONFIG, budget=None))
    assert not n_ranked


def test_the_last_answer_stays_in_a_budget_with_room_for_it_beside_long_messages() -> None:
    facts = [f"The harbour master wrote this on day {i}: {text}" for i, text in enumerate(FILLER)]
    about = "The name of the harbour master is on the plate of the harbour master's office."
    texts = [*(facts * 9)[:45], "Who is in the office?", *[about] * 5, "What is the name?"]
    view = block_view(texts, "s" * 45 + "r" * 7)
    messages = [*range(45), 45, *[46] * 5, 47]
    roles = {46: Role.ASSISTANT}
    blocks = zip(view.blocks, messages, strict=True)
    view = replace(
        view,
        blocks=BlockTable(
            replace(block, message=m, role=roles.get(m, Role.USER)) for block, m in blocks
        ),
    )
    n_tokens = int(view.blocks.lengths[:40].sum())
    plan = decide(view, QUERY, replace(CONFIG, budget=n_tokens))
    evicted = {evict.label for evict in plan.evicts}
    assert plan.loads
    answer = {block.label for block in view.blocks if block.message == 46}
    assert len(answer) == 5
    assert not answer & evicted


@pytest.mark.parametrize("refers", [True, False])
def test_a_question_that_refers_to_the_answer_before_it_keeps_that_answer(refers: bool) -> None:
    facts = [f"The harbour master wrote this on day {i}: {text}" for i, text in enumerate(FILLER)]
    texts = [*facts, "When does the harbour ferry run?", "It runs at nine.", "Who steers it there?"]
    view = block_view(texts, "s" * 12 + "rrr")
    roles = {13: Role.ASSISTANT}
    view = replace(
        view,
        blocks=BlockTable(
            replace(block, role=roles.get(block.message, Role.USER)) for block in view.blocks
        ),
    )
    asked = "Who steers it there?" if refers else "What did the harbour master write?"
    query = Query.of(asked, texts[12:14] if refers else ())
    plan = decide(view, query, CONFIG)
    evicted = {evict.label for evict in plan.evicts}
    assert plan.loads
    assert (view.blocks[13].label in evicted) is not refers
