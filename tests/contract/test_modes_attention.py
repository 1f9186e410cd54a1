"""Modes that use attention: --kv-eviction 3, and 2 where attention is captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama import Llama
from test_modes import BLOCK, FIRST, evicting, resident, spans, text


@pytest.fixture(scope="module")
def scored() -> Iterator[Llama]:
    with evicting(2, "-np", "1") as server:
        yield server


@pytest.fixture(scope="module")
def attentive() -> Iterator[Llama]:
    with evicting(3, "-np", "1") as server:
        yield server


def measured(server: Llama, blocks: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """What each block got so far, as the server tells everybody."""
    answer = server.post("/slots/0?action=attention", {"ranges": [list(b) for b in blocks]})
    assert (answer["mode"], len(answer["layers"]), answer["n_obs"] > 0) == ("sum", 4, True)
    by = answer["mass"]
    if server.get("/props")["evoke"]["kv_eviction"]["aggregation"] == "norm_sum":
        by = [mass / life for mass, life in zip(by, answer["life"], strict=True)]
    return dict(zip(blocks, by, strict=True))


def least(server: Llama) -> tuple[list[tuple[int, int]], dict[tuple[int, int], float]]:
    """The blocks that leave when a generation goes past the areas, and what each had before."""
    server.erase()
    said = text(600)
    before = server.complete(said, n_predict=60)
    assert spans(before) == []
    masses = measured(server, [(p0, p0 + BLOCK) for p0 in range(32, 32 + 9 * BLOCK, BLOCK)])
    return spans(server.complete(said + before["tokens"], n_predict=100)), masses


def test_blocks_with_least_attention_are_evicted(attentive: Llama) -> None:
    evicted, masses = least(attentive)
    assert len(evicted) == 2
    by_mass = sorted(masses, key=lambda block: masses[block])
    # Meanwhile forty more tokens looked at them: the order of the two may have changed, no more.
    assert set(evicted) <= set(by_mass[:3])
    assert by_mass[:2] != sorted(masses)[:2]
    state = attentive.slot()
    assert state["resident"][0][:1] == [0]
    assert resident(state["resident"], 0, 32)
    assert resident(state["resident"], state["n_tokens"] - 128, state["n_tokens"])
    assert state["n_resident"] <= 32 + 512 + 128


def test_normed_attention_is_divided_by_residence_time() -> None:
    with evicting(3, "-np", "1", "--kv-aggregation", "norm_sum") as server:
        evicted, masses = least(server)
    assert set(evicted) <= set(sorted(masses, key=lambda block: masses[block])[:3])


def test_attention_counts_after_another_request_used_the_slot(attentive: Llama) -> None:
    for marker in (True, False, False):
        answer = attentive.complete(text(300, seed=3), n_predict=900, marker=marker)
        assert len(spans(answer)) >= 8
        assert attentive.slot()["n_resident"] <= 672
        seen = attentive.post("/slots/0?action=attention", {"ranges": [[0, 1]]})
        assert (seen["mode"], len(seen["layers"])) == ("sum", 4)


def test_attended_blocks_count_as_used(scored: Llama) -> None:
    """With attention captured, the scored mode keeps what still gets its share of it."""
    scored.erase()
    scored.complete(text(16), n_predict=1)
    scored.act("attn-capture", layers=[0, 1, 2, 3], mode="sum")
    said = text(900)
    evicted = spans(scored.complete(said, n_predict=700))
    assert len(evicted) >= 8
    oldest = [(FIRST + BLOCK * i, FIRST + BLOCK * (i + 1)) for i in range(len(evicted))]
    assert evicted != oldest
    assert all((p1 - p0) == BLOCK for p0, p1 in evicted)
