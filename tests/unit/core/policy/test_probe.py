"""Whether a turn is probed, and what a probe says of blocks."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from policy_fixtures import CONFIG, FILLER, block_view

import bench.policies  # noqa: F401 -- registers variants
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Evict, Load, Plan
from evoke_proxy.core.policy import registry
from evoke_proxy.core.policy.attention import AttentionTracker, Capture, KeyBounds, Queries
from evoke_proxy.core.policy.probe import (
    DecodeSpeed,
    ProbeResult,
    blocks_with_rows,
    evicted_with_copy,
    model_relevance,
    most_likely,
    reason_to_skip,
)
from evoke_proxy.core.policy.registry import capture_of
from evoke_proxy.core.retrieval.query import Query

Floats = npt.NDArray[np.float32]
FUSED = replace(CONFIG, recall="fused")
VIEW = block_view(FILLER[:8], "rssrrrrr", tail=64)
LAYERS, ROWS, HEADS, SIZE = 2, 3, 4, 16


def answer(products: Floats, known: list[bool], pos: list[int]) -> dict[str, object]:
    """`key_products` as llama-server tells them: [block, layer, row, head]"""
    data = base64.b64encode(products.astype("<f4").tobytes()).decode()
    shape = {"n_head": HEADS, "n_embd": SIZE, "layers": list(range(LAYERS))}
    return {**shape, "pos": pos, "known": known, "data": data}


def test_only_what_the_configuration_asks_for_is_captured() -> None:
    assert capture_of(CONFIG) is None
    assert capture_of(FUSED) == Capture("ewma", queries=12, read="")
    keeping = replace(FUSED, name="evoke_attention")
    assert capture_of(keeping) == Capture("ewma", queries=12, read="masses")
    assert capture_of(replace(FUSED, recovery="discard")) is None
    assert capture_of(replace(FUSED, budget=None)) is None
    # What the queries of a probe are is not what those of arkvale are: the masses are read.
    assert "with_queries" not in AttentionTracker().request(VIEW, Capture("ewma", queries=12))


@pytest.mark.parametrize(
    ("recall", "seconds", "confidence", "reason"),
    [
        ("text", 0.0, 0.0, "off"),
        ("none", 0.0, 0.0, "off"),
        ("fused", 1.9, 0.0, ""),
        ("fused", 2.1, 0.0, "too_dear"),
        ("fused", 0.5, 0.7, ""),
        ("fused", 0.7, 0.7, "too_dear"),
        ("fused", 0.0, 1.0, ""),
        ("model", 1.9, 1.0, ""),
        ("model", 2.1, 0.0, "too_dear"),
    ],
)
def test_a_probe_pays_for_what_text_is_not_sure_of(
    recall: str, seconds: float, confidence: float, reason: str
) -> None:
    assert reason_to_skip(VIEW, replace(CONFIG, recall=recall), seconds, confidence) == reason


def test_a_probe_needs_something_that_is_out_and_room_for_it() -> None:
    assert evicted_with_copy(VIEW).tolist() == [1, 2]
    assert blocks_with_rows(VIEW).tolist() == list(range(8))
    assert reason_to_skip(block_view(FILLER[:8], "rrrrbbrr"), FUSED, 0.0, 0.0) == "nothing_out"
    assert reason_to_skip(block_view(FILLER[:8], "rddrrrrr"), FUSED, 0.0, 0.0) == "nothing_out"
    assert (
        reason_to_skip(replace(VIEW, n_tokens=VIEW.n_tokens + 200), FUSED, 0.0, 0.0) == "long_tail"
    )


def test_what_the_heads_of_a_layer_look_for_at_any_word_of_the_answer_is_sought() -> None:
    random = np.random.default_rng(3)
    products = random.standard_normal((8, LAYERS, ROWS, HEADS), dtype=np.float32)
    products[2, 1, 2] = 40.0  # all heads of a layer, at one word
    products[3, 0, 1, 2] = 80.0  # one head
    products[5, 0, 0] = 90.0  # before the answer begins
    at = np.arange(8)
    n_tokens = 100
    told = answer(products, [True] * 8, [98, 99, 100])
    found = model_relevance(told, at, len(VIEW.blocks), n_tokens)
    assert found is not None
    assert found.argmax() == 2 and found[2] > 0.99
    assert np.all((found >= 0) & (found <= 1)) and found[3] < 0.6 and found[5] < 0.6
    logits = products[:, 1, 2] / np.sqrt(SIZE)
    share = np.exp(logits[2]) / np.exp(logits).sum(axis=0)
    assert found[2] == pytest.approx(share.mean(), rel=1e-6)


def test_what_is_not_known_is_not_sought_and_no_products_say_nothing() -> None:
    products = np.ones((2, LAYERS, ROWS, HEADS), np.float32)
    told = answer(products, [True, False, True], [9, 10, 11])
    found = model_relevance(told, np.array([1, 4, 6]), 8, 10)
    assert found is not None and np.flatnonzero(found).tolist() == [1, 6]
    assert model_relevance(None, np.array([1]), 8, 10) is None
    assert model_relevance(answer(products[:0], [False], []), np.array([1]), 8, 10) is None
    assert (
        model_relevance(answer(products, [True, True], [1, 2, 3]), np.array([1, 2]), 8, 10) is None
    )


def test_of_many_blocks_bounds_say_which_are_held_against_their_keys() -> None:
    bounds, keys = KeyBounds(), np.zeros((8, LAYERS, 2, 2, SIZE), np.float32)
    keys[:, :, 0], keys[:, :, 1] = -0.1, 0.1
    keys[6, 1, 1, 0, 3] = 5.0
    data = base64.b64encode(np.delete(keys, 4, axis=0).astype("<f4").tobytes()).decode()
    known = [i != 4 for i in range(8)]
    told = {"layers": [0, 1], "n_key": [2 * SIZE] * 2, "known": known, "data": data}
    bounds.add(told, VIEW.blocks.labels)
    rows = np.zeros((LAYERS, 1, HEADS, SIZE), np.float32)
    rows[1, 0, 1, 3] = 9.0
    # What looks best by its bounds, and what has none: it could be anything.
    assert most_likely(VIEW, bounds, Queries(rows), 2).tolist() == [4, 6]
    assert most_likely(VIEW, bounds, Queries(rows), 8).tolist() == list(range(8))


@pytest.mark.parametrize("recall", ["model", "fused"])
def test_what_is_sought_comes_back_though_no_word_of_it_is_asked(recall: str) -> None:
    config = replace(CONFIG, recall=recall, name="evoke_margin_0")
    texts = [FILLER[0], "my residence is amber falcon", *FILLER[2:8]]
    view = block_view(texts, "rsrrrrrr", tail=64)
    question = Query.of("where do I live?")
    assert registry.decide(view, question, config).loads == ()
    found = np.zeros(8)
    found[1] = 0.9
    plan = registry.decide(replace(view, model_relevance=found), question, config)
    assert [load.label for load in plan.loads] == ["s/1"]
    text_only = replace(config, recall="text")
    assert registry.decide(replace(view, model_relevance=found), question, text_only).loads == ()


def test_fused_what_words_find_and_what_is_sought_both_come_back() -> None:
    texts = [FILLER[0], "my residence is amber falcon", "the oslo vault code is 48213"]
    view = block_view([*texts, *FILLER[3:8]], "rssrrrrr", tail=64)
    found = np.zeros(8)
    found[1] = 0.9
    question = Query.of("what is the oslo vault code?")
    config = replace(FUSED, name="evoke_margin_0")
    plan = registry.decide(replace(view, model_relevance=found), question, config)
    assert {load.label for load in plan.loads} == {"s/1", "s/2"}
    for recall, label in (("text", "s/2"), ("model", "s/1")):
        alone = replace(config, recall=recall)
        plan = registry.decide(replace(view, model_relevance=found), question, alone)
        assert label in {load.label for load in plan.loads}
    nothing = registry.decide(
        replace(view, model_relevance=found), question, replace(config, recall="none")
    )
    assert nothing.loads == ()


def test_text_is_as_sure_as_of_the_clause_it_finds_least_for() -> None:
    texts = ["the oslo vault code is 48213", *FILLER[1:8]]
    view = block_view(texts, "ssrrrrrr")

    def sure(text: str) -> float:
        return view.index.confidence(Query.of(text), view.blocks, view.first_new_block)

    assert sure("what is the oslo vault code?") > 0.9
    assert sure("what is the oslo vault code, and where do I live?") < 0.2
    assert sure("where do I live?") < 0.2
    assert view.index.confidence(Query(), view.blocks, view.first_new_block) == 0.0


def test_text_is_not_sure_of_a_word_that_many_blocks_have() -> None:
    texts = [f"some heavy filler number{i}" for i in range(11)] + ["my weight is 19605"]
    view = block_view(texts, "s" * 11 + "r")
    sure = view.index.confidence(Query.of("how heavy am I?"), view.blocks, view.first_new_block)
    assert 0 < sure < 0.6
    rare = block_view(["some heavy filler", *FILLER[1:12]], "s" * 11 + "r")
    assert (
        rare.index.confidence(Query.of("how heavy am I?"), rare.blocks, rare.first_new_block) > 0.9
    )


def test_text_is_never_sure_of_what_it_finds_by_meaning_alone() -> None:
    view = block_view(
        [f"some filler number{i}" for i in range(31)] + ["my weight is 19605"], "s" * 32
    )
    near = [np.eye(2, dtype=np.float32)[:1], np.eye(2, dtype=np.float32)[1:]]
    view.index.relevance(Query(), view.blocks)
    view.index.add_vectors((block.label, near[int(i == 31)]) for i, block in enumerate(view.blocks))

    def sure(text: str) -> float:
        question = Query.of(text).embedded([near[1][0]])
        assert view.index.relevance(question, view.blocks).argmax() == 31
        return view.index.confidence(question, view.blocks, view.first_new_block)

    assert 0.6 < sure("how heavy am I?") <= 0.8
    assert sure("what is my weight?") > 0.9


def test_the_pace_is_that_of_the_replies() -> None:
    pace = DecodeSpeed()
    assert pace.seconds(1000, 12) == 0.0
    pace.note(None)
    pace.note({"prompt_n": 200, "prompt_ms": 100.0, "predicted_n": 10, "predicted_ms": 200.0})
    assert pace.seconds(1000, 12) == pytest.approx(0.5 + 0.24)


def test_what_a_probe_brought_back_before_is_told_as_far_as_it_stayed() -> None:
    spans = [Span(0, 64), Span(64, 128), Span(128, 192)]
    first = Plan(loads=tuple(Load(f"s/{i}", span) for i, span in enumerate(spans[:2])))
    later = Plan(evicts=(Evict(spans[1], "s/1"),), loads=(Load("s/2", spans[2]),))
    probed = ProbeResult(first, 70, 0.0123)
    assert probed.remaining_spans(later) == [spans[0]]
    assert probed.summary(later) == {"decoded": 70, "brought": 64, "ms": 12.3}
