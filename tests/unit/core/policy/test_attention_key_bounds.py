"""Key bounds: the upper bound of a block's keys for captured queries."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from plan_fixtures import resident_after
from policy_fixtures import CONFIG, FILLER, block_view

from evoke_proxy.core.policy import registry
from evoke_proxy.core.policy.attention import AttentionTracker, KeyBounds, Queries
from evoke_proxy.core.policy.registry import capture_of
from evoke_proxy.core.retrieval.query import Query

Floats = npt.NDArray[np.float32]
LAYERS, HEADS, KV_HEADS, SIZE, ROWS = 2, 4, 2, 8, 3
VIEW = block_view(FILLER[:8], "rsrrrrrr", tail=64)


def text(values: Floats) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def random_keys() -> Floats:
    """Keys of shape [block, token, layer, kv head, channel]; those of a block are similar."""
    random = np.random.default_rng(1)
    centres = random.standard_normal((8, 1, LAYERS, KV_HEADS, SIZE), dtype=np.float32)
    deviations = random.standard_normal((8, 64, LAYERS, KV_HEADS, SIZE), dtype=np.float32)
    keys: Floats = 2 * centres + deviations / 4
    return keys


def bounds_answer(keys: Floats, known: list[bool]) -> dict[str, object]:
    limits = np.stack([keys.min(axis=1), keys.max(axis=1)], axis=2)  # [block, layer, 2, ...]
    data = text(limits[known])
    shape = {"layers": [0, 2], "n_key": [KV_HEADS * SIZE] * LAYERS}
    return {**shape, "known": known, "data": data}


def queries_answer(rows: Floats) -> dict[str, object]:
    return {"pos": [5, 6, 7], "n_head": HEADS, "n_embd": SIZE, "data": text(rows)}


def queries_for(keys: Floats, block: int, strength: float = 6.0) -> Floats:
    """Query rows whose heads all match a key of this block."""
    key = keys[block, 10]  # [layer, kv head, channel]
    rows = np.repeat(key[:, None], ROWS, axis=1).repeat(HEADS // KV_HEADS, axis=2)
    return rows * strength / np.sqrt(SIZE)


def test_the_product_of_a_key_and_a_query_is_within_the_bound() -> None:
    """Importance is a softmax of bounds; the second block has a single key, which is its bound."""
    keys = random_keys()
    rows = np.random.default_rng(2).standard_normal((1, 1, 1, SIZE)).astype(np.float32)
    inside = (keys[0, :, 0, 0] @ rows[0, 0, 0]).max() / np.sqrt(SIZE)
    single = np.stack([keys[0, 3, 0, 0]] * 2)[None]
    limits = np.stack([keys[0, :, 0, 0].min(axis=0), keys[0, :, 0, 0].max(axis=0)])[None]
    memory, blocks = KeyBounds(), VIEW.blocks[:2]
    data = text(np.stack([limits, single]))
    answer = {"layers": [0], "n_key": [SIZE], "known": [True, True], "data": data}
    memory.add(answer, blocks.labels)
    importance = memory.importance(Queries(rows), blocks)
    share = importance / (1 - importance) / 2
    bound = np.log(share[0] / share[1]) + keys[0, 3, 0, 0] @ rows[0, 0, 0] / np.sqrt(SIZE)
    assert bound >= inside
    expected = np.maximum(rows[0, 0, 0] * limits[0, 0], rows[0, 0, 0] * limits[0, 1]).sum()
    assert bound == pytest.approx(expected / np.sqrt(SIZE), abs=1e-4)


@pytest.mark.parametrize("matched", range(8))
def test_the_block_that_the_queries_match_is_the_most_important(matched: int) -> None:
    keys = random_keys()
    memory = KeyBounds()
    memory.add(bounds_answer(keys, [True] * 8), VIEW.blocks.labels)
    importance = memory.importance(Queries(queries_for(keys, matched)), VIEW.blocks)
    assert importance.argmax() == matched and importance[matched] > 0.5
    assert np.all((importance >= 0) & (importance < 1))


def test_blocks_without_bounds_are_requested_and_have_no_importance() -> None:
    keys, memory = random_keys(), KeyBounds()
    known = [True, False] + [True] * 6
    memory.add(bounds_answer(keys, known), VIEW.blocks.labels)
    assert memory.missing(VIEW.blocks) == [1]
    importance = memory.importance(Queries(queries_for(keys, 3)), VIEW.blocks)
    assert np.isnan(importance).tolist() == [not has_bounds for has_bounds in known]
    memory.retain(VIEW.blocks[:3])
    assert memory.missing(VIEW.blocks) == [1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("answer", [None, {}, {"pos": []}])
def test_an_answer_without_queries_is_parsed_as_none(answer: object) -> None:
    assert Queries.parse(answer, LAYERS) is None


def test_arkvale_loads_the_block_that_the_queries_match() -> None:
    keys, memory = random_keys(), AttentionTracker()
    config = replace(CONFIG, name="arkvale")
    capture = capture_of(config)
    assert capture is not None
    body = memory.request(VIEW, capture)
    assert body["with_queries"] and len(body["bounds"]) == 8
    answer = {"mass": [1.0] * 8, "n_obs": 3, "layers": [0, 2]}
    answer |= {"query_rows": queries_answer(queries_for(keys, 1))}
    answer |= {"key_bounds": bounds_answer(keys, [True] * 8)}
    updated = memory.updated(VIEW, answer, 1, 16)
    assert memory.request(VIEW, capture)["bounds"] == []
    plan = registry.decide(updated, Query.of("anything"), config)
    assert [load.label for load in plan.loads] == ["s/1"]
    assert "1" in resident_after(updated, plan).split()
    assert len(plan.saves) == len(plan.evicts) > 0
