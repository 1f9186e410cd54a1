"""What the bounds of a block's keys say about queries."""

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
    """[block, token, layer, kv head, channel]: the keys of a block are like each other."""
    random = np.random.default_rng(1)
    middles = random.standard_normal((8, 1, LAYERS, KV_HEADS, SIZE), dtype=np.float32)
    others = random.standard_normal((8, 64, LAYERS, KV_HEADS, SIZE), dtype=np.float32)
    found: Floats = 2 * middles + others / 4
    return found


def bounds_answer(keys: Floats, known: list[bool]) -> dict[str, object]:
    limits = np.stack([keys.min(axis=1), keys.max(axis=1)], axis=2)  # [block, layer, 2, ...]
    data = text(limits[known])
    given = {"layers": [0, 2], "n_key": [KV_HEADS * SIZE] * LAYERS}
    return {**given, "known": known, "data": data}


def queries_answer(rows: Floats) -> dict[str, object]:
    return {"pos": [5, 6, 7], "n_head": HEADS, "n_embd": SIZE, "data": text(rows)}


def looking_at(keys: Floats, block: int, strength: float = 6.0) -> Floats:
    """Rows whose every head looks for a key of this block."""
    wanted = keys[block, 10]  # [layer, kv head, channel]
    rows = np.repeat(wanted[:, None], ROWS, axis=1).repeat(HEADS // KV_HEADS, axis=2)
    return rows * strength / np.sqrt(SIZE)


def test_no_key_is_above_its_bound() -> None:
    """Shares are a softmax of bounds: with one block against another that has a single key."""
    keys = random_keys()
    rows = np.random.default_rng(2).standard_normal((1, 1, 1, SIZE)).astype(np.float32)
    inside = (keys[0, :, 0, 0] @ rows[0, 0, 0]).max() / np.sqrt(SIZE)
    single = np.stack([keys[0, 3, 0, 0]] * 2)[None]
    limits = np.stack([keys[0, :, 0, 0].min(axis=0), keys[0, :, 0, 0].max(axis=0)])[None]
    memory, blocks = KeyBounds(), VIEW.blocks[:2]
    data = text(np.stack([limits, single]))
    given = {"layers": [0], "n_key": [SIZE], "known": [True, True], "data": data}
    memory.add(given, blocks.labels)
    found = memory.importance(Queries(rows), blocks)
    share = found / (1 - found) / 2
    bound = np.log(share[0] / share[1]) + keys[0, 3, 0, 0] @ rows[0, 0, 0] / np.sqrt(SIZE)
    assert bound >= inside
    expected = np.maximum(rows[0, 0, 0] * limits[0, 0], rows[0, 0, 0] * limits[0, 1]).sum()
    assert bound == pytest.approx(expected / np.sqrt(SIZE), abs=1e-4)


@pytest.mark.parametrize("wanted", range(8))
def test_the_block_that_is_looked_for_is_the_most_important(wanted: int) -> None:
    keys = random_keys()
    memory = KeyBounds()
    memory.add(bounds_answer(keys, [True] * 8), VIEW.blocks.labels)
    found = memory.importance(Queries(looking_at(keys, wanted)), VIEW.blocks)
    assert found.argmax() == wanted and found[wanted] > 0.5
    assert np.all((found >= 0) & (found < 1))


def test_what_is_not_known_is_asked_for_again() -> None:
    keys, memory = random_keys(), KeyBounds()
    known = [True, False] + [True] * 6
    memory.add(bounds_answer(keys, known), VIEW.blocks.labels)
    assert memory.missing(VIEW.blocks) == [1]
    found = memory.importance(Queries(looking_at(keys, 3)), VIEW.blocks)
    assert np.isnan(found).tolist() == [not there for there in known]
    memory.retain(VIEW.blocks[:3])
    assert memory.missing(VIEW.blocks) == [1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("answer", [None, {}, {"pos": []}])
def test_no_queries_are_none(answer: object) -> None:
    assert Queries.parse(answer, LAYERS) is None


def test_arkvale_brings_back_what_queries_look_for() -> None:
    keys, memory = random_keys(), AttentionTracker()
    config = replace(CONFIG, name="arkvale")
    capture = capture_of(config)
    assert capture is not None
    body = memory.request(VIEW, capture)
    assert body["with_queries"] and len(body["bounds"]) == 8
    answer = {"mass": [1.0] * 8, "n_obs": 3, "layers": [0, 2]}
    answer |= {"query_rows": queries_answer(looking_at(keys, 1))}
    answer |= {"key_bounds": bounds_answer(keys, [True] * 8)}
    seen = memory.updated(VIEW, answer, 1, 16)
    assert memory.request(VIEW, capture)["bounds"] == []
    plan = registry.decide(seen, Query.of("anything"), config)
    assert [load.label for load in plan.loads] == ["s/1"]
    assert "1" in resident_after(seen, plan).split()
    assert len(plan.saves) == len(plan.evicts) > 0
