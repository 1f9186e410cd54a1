"""Probes: which turns are probed, and the relevance that a probe gives to blocks."""

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
    config_of_unprobed,
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
    """`key_products` of a reply of llama-server; `products` has shape [block, layer, row, head]."""
    data = base64.b64encode(products.astype("<f4").tobytes()).decode()
    shape = {"n_head": HEADS, "n_embd": SIZE, "layers": list(range(LAYERS))}
    return {**shape, "pos": pos, "known": known, "data": data}


def test_the_capture_follows_from_the_configuration() -> None:
    assert capture_of(CONFIG) is None
    assert capture_of(FUSED) == Capture("ewma", queries=12, read="")
    with_masses = replace(FUSED, name="evoke_attention")
    assert capture_of(with_masses) == Capture("ewma", queries=12, read="masses")
    assert capture_of(replace(FUSED, recovery="discard")) is None
    assert capture_of(replace(FUSED, budget=None)) is None
    # For a probe the products are read later; arkvale reads the queries with the masses.
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
def test_a_probe_is_skipped_if_it_takes_too_long_for_the_confidence_of_the_text(
    recall: str, seconds: float, confidence: float, reason: str
) -> None:
    assert reason_to_skip(VIEW, replace(CONFIG, recall=recall), seconds, confidence) == reason


def test_a_probe_is_skipped_without_an_evicted_copy_or_with_a_long_tail() -> None:
    assert evicted_with_copy(VIEW).tolist() == [1, 2]
    assert blocks_with_rows(VIEW).tolist() == list(range(8))
    assert reason_to_skip(block_view(FILLER[:8], "rrrrbbrr"), FUSED, 0.0, 0.0) == "nothing_out"
    assert reason_to_skip(block_view(FILLER[:8], "rddrrrrr"), FUSED, 0.0, 0.0) == "nothing_out"
    assert (
        reason_to_skip(replace(VIEW, n_tokens=VIEW.n_tokens + 200), FUSED, 0.0, 0.0) == "long_tail"
    )


def test_relevance_is_the_highest_mean_over_heads_of_any_layer_and_answer_token() -> None:
    random = np.random.default_rng(3)
    products = random.standard_normal((8, LAYERS, ROWS, HEADS), dtype=np.float32)
    products[2, 1, 2] = 40.0  # all heads of a layer, at one token
    products[3, 0, 1, 2] = 80.0  # one head
    products[5, 0, 0] = 90.0  # a token before the answer
    at = np.arange(8)
    n_tokens = 100
    reply = answer(products, [True] * 8, [98, 99, 100])
    relevance = model_relevance(reply, at, len(VIEW.blocks), n_tokens)
    assert relevance is not None
    assert relevance.argmax() == 2 and relevance[2] > 0.99
    assert np.all((relevance >= 0) & (relevance <= 1)) and relevance[3] < 0.6 and relevance[5] < 0.6
    logits = products[:, 1, 2] / np.sqrt(SIZE)
    share = np.exp(logits[2]) / np.exp(logits).sum(axis=0)
    assert relevance[2] == pytest.approx(share.mean(), rel=1e-6)


def test_blocks_without_products_have_no_relevance() -> None:
    products = np.ones((2, LAYERS, ROWS, HEADS), np.float32)
    reply = answer(products, [True, False, True], [9, 10, 11])
    relevance = model_relevance(reply, np.array([1, 4, 6]), 8, 10)
    assert relevance is not None and np.flatnonzero(relevance).tolist() == [1, 6]
    assert model_relevance(None, np.array([1]), 8, 10) is None
    assert model_relevance(answer(products[:0], [False], []), np.array([1]), 8, 10) is None
    assert (
        model_relevance(answer(products, [True, True], [1, 2, 3]), np.array([1, 2]), 8, 10) is None
    )


def test_the_most_likely_blocks_are_those_with_the_highest_or_no_bounds() -> None:
    bounds, keys = KeyBounds(), np.zeros((8, LAYERS, 2, 2, SIZE), np.float32)
    keys[:, :, 0], keys[:, :, 1] = -0.1, 0.1
    keys[6, 1, 1, 0, 3] = 5.0
    data = base64.b64encode(np.delete(keys, 4, axis=0).astype("<f4").tobytes()).decode()
    known = [i != 4 for i in range(8)]
    reply = {"layers": [0, 1], "n_key": [2 * SIZE] * 2, "known": known, "data": data}
    bounds.add(reply, VIEW.blocks.labels)
    rows = np.zeros((LAYERS, 1, HEADS, SIZE), np.float32)
    rows[1, 0, 1, 3] = 9.0
    # Block 6 has the highest bound, and block 4 has none, so that it may match too.
    assert most_likely(VIEW, bounds, Queries(rows), 2).tolist() == [4, 6]
    assert most_likely(VIEW, bounds, Queries(rows), 8).tolist() == list(range(8))


@pytest.mark.parametrize("recall", ["model", "fused"])
def test_a_block_that_the_model_attends_to_is_loaded_without_a_common_word(recall: str) -> None:
    config = replace(CONFIG, recall=recall, name="evoke_margin_0")
    texts = [FILLER[0], "my residence is amber falcon", *FILLER[2:8]]
    view = block_view(texts, "rsrrrrrr", tail=64)
    question = Query.of("where do I live?")
    assert registry.decide(view, question, config).loads == ()
    relevance = np.zeros(8)
    relevance[1] = 0.9
    plan = registry.decide(replace(view, model_relevance=relevance), question, config)
    assert [load.label for load in plan.loads] == ["s/1"]
    text_only = replace(config, recall="text")
    assert (
        registry.decide(replace(view, model_relevance=relevance), question, text_only).loads == ()
    )


def test_a_turn_that_only_the_model_was_to_rank_is_ranked_by_text_when_it_is_not_asked() -> None:
    by_model = replace(CONFIG, recall="model")
    assert config_of_unprobed(VIEW, by_model) == replace(CONFIG, recall="text")
    asked = replace(VIEW, model_relevance=np.zeros(8))
    assert config_of_unprobed(asked, by_model) is by_model
    nothing_out = block_view(FILLER[:8], "rrrrrrrr", tail=64)
    assert config_of_unprobed(nothing_out, by_model) is by_model
    for recall in ("text", "fused", "none"):
        other = replace(CONFIG, recall=recall)
        assert config_of_unprobed(VIEW, other) is other


def test_fused_recall_loads_the_matches_of_the_text_and_of_the_model() -> None:
    texts = [FILLER[0], "my residence is amber falcon", "the oslo vault code is 48213"]
    view = block_view([*texts, *FILLER[3:8]], "rssrrrrr", tail=64)
    relevance = np.zeros(8)
    relevance[1] = 0.9
    question = Query.of("what is the oslo vault code?")
    config = replace(FUSED, name="evoke_margin_0")
    plan = registry.decide(replace(view, model_relevance=relevance), question, config)
    assert {load.label for load in plan.loads} == {"s/1", "s/2"}
    for recall, label in (("text", "s/2"), ("model", "s/1")):
        alone = replace(config, recall=recall)
        plan = registry.decide(replace(view, model_relevance=relevance), question, alone)
        assert label in {load.label for load in plan.loads}
    nothing = registry.decide(
        replace(view, model_relevance=relevance), question, replace(config, recall="none")
    )
    assert nothing.loads == ()


def test_the_confidence_is_that_of_the_least_certain_clause() -> None:
    texts = ["the oslo vault code is 48213", *FILLER[1:8]]
    view = block_view(texts, "ssrrrrrr")

    def confidence(text: str) -> float:
        return view.index.confidence(Query.of(text), view.blocks, view.first_new_block)

    assert confidence("what is the oslo vault code?") > 0.9
    assert confidence("what is the oslo vault code, and where do I live?") < 0.2
    assert confidence("where do I live?") < 0.2
    assert view.index.confidence(Query(), view.blocks, view.first_new_block) == 0.0


def test_the_confidence_is_low_for_a_word_in_many_blocks() -> None:
    texts = [f"some heavy filler number{i}" for i in range(11)] + ["my weight is 19605"]
    view = block_view(texts, "s" * 11 + "r")
    confidence = view.index.confidence(
        Query.of("how heavy am I?"), view.blocks, view.first_new_block
    )
    assert 0 < confidence < 0.6
    rare = block_view(["some heavy filler", *FILLER[1:12]], "s" * 11 + "r")
    assert (
        rare.index.confidence(Query.of("how heavy am I?"), rare.blocks, rare.first_new_block) > 0.9
    )


def test_the_confidence_of_a_match_by_vectors_alone_is_limited() -> None:
    view = block_view(
        [f"some filler number{i}" for i in range(31)] + ["my weight is 19605"], "s" * 32
    )
    vectors = [np.eye(2, dtype=np.float32)[:1], np.eye(2, dtype=np.float32)[1:]]
    view.index.relevance(Query(), view.blocks)
    view.index.add_vectors(
        (block.label, vectors[int(i == 31)]) for i, block in enumerate(view.blocks)
    )

    def confidence(text: str) -> float:
        question = Query.of(text).embedded([vectors[1][0]])
        assert view.index.relevance(question, view.blocks).argmax() == 31
        return view.index.confidence(question, view.blocks, view.first_new_block)

    assert 0.6 < confidence("how heavy am I?") <= 0.8
    assert confidence("what is my weight?") > 0.9


def test_the_decode_speed_is_measured_from_the_replies() -> None:
    speed = DecodeSpeed()
    assert speed.seconds(1000, 12) == 0.0
    speed.note(None)
    speed.note({"prompt_n": 200, "prompt_ms": 100.0, "predicted_n": 10, "predicted_ms": 200.0})
    assert speed.seconds(1000, 12) == pytest.approx(0.5 + 0.24)


def test_spans_that_a_probe_loaded_are_reported_unless_evicted_again() -> None:
    spans = [Span(0, 64), Span(64, 128), Span(128, 192)]
    first = Plan(loads=tuple(Load(f"s/{i}", span) for i, span in enumerate(spans[:2])))
    later = Plan(evicts=(Evict(spans[1], "s/1"),), loads=(Load("s/2", spans[2]),))
    probed = ProbeResult(first, 70, 0.0123)
    assert probed.remaining_spans(later) == [spans[0]]
    assert probed.summary(later) == {"decoded": 70, "brought": 64, "ms": 12.3}
