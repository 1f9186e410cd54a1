"""The modes of --kv-eviction that use attention: 3, and 2 while attention is captured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attention_limits import LAYERS, limit_memory, many_cells
from llama import Llama, sample_text
from mode_calls import BLOCK, FIRST, evicting, resident, spans, text


@pytest.fixture(scope="module")
def by_attention() -> Iterator[Llama]:
    with evicting(3, "-np", "1") as server:
        yield server


def measured(server: Llama, blocks: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """The attention that each block got so far, as the server reports it."""
    answer = server.post("/slots/0?action=attention", {"ranges": [list(b) for b in blocks]})
    assert (answer["mode"], len(answer["layers"]), answer["n_obs"] > 0) == ("sum", 4, True)
    values = answer["mass"]
    if server.get("/props")["evoke"]["kv_eviction"]["aggregation"] == "norm_sum":
        values = [mass / life for mass, life in zip(values, answer["life"], strict=True)]
    return dict(zip(blocks, values, strict=True))


def evict_and_measure(server: Llama) -> tuple[list[tuple[int, int]], dict[tuple[int, int], float]]:
    """Generates until blocks are evicted; returns these, and the attention of all blocks before."""
    server.erase()
    prompt = text(600)
    before = server.complete(prompt, n_predict=60)
    assert spans(before) == []
    masses = measured(server, [(p0, p0 + BLOCK) for p0 in range(32, 32 + 9 * BLOCK, BLOCK)])
    return spans(server.complete(prompt + before["tokens"], n_predict=100)), masses


def test_blocks_with_least_attention_are_evicted(by_attention: Llama) -> None:
    evicted, masses = evict_and_measure(by_attention)
    assert len(evicted) == 2
    by_mass = sorted(masses, key=lambda block: masses[block])
    # Forty more tokens attended before the eviction: neighbours in the order may have swapped.
    assert set(evicted) <= set(by_mass[:3])
    assert by_mass[:2] != sorted(masses)[:2]
    state = by_attention.slot()
    assert state["resident"][0][:1] == [0]
    assert resident(state["resident"], 0, 32)
    assert resident(state["resident"], state["n_tokens"] - 128, state["n_tokens"])
    assert state["n_resident"] <= 32 + 512 + 128


def test_normed_attention_is_divided_by_residence_time() -> None:
    with evicting(3, "-np", "1", "--kv-aggregation", "norm_sum") as server:
        evicted, masses = evict_and_measure(server)
    assert set(evicted) <= set(sorted(masses, key=lambda block: masses[block])[:3])


def test_attention_is_captured_again_after_another_request_used_the_slot(
    by_attention: Llama,
) -> None:
    for marker in (True, False, False):
        answer = by_attention.complete(text(300, seed=3), n_predict=900, marker=marker)
        assert len(spans(answer)) >= 8
        assert by_attention.slot()["n_resident"] <= 672
        seen = by_attention.post("/slots/0?action=attention", {"ranges": [[0, 1]]})
        assert (seen["mode"], len(seen["layers"])) == ("sum", 4)


def test_attended_blocks_count_as_used(scored: Llama) -> None:
    """While attention is captured, the scored mode keeps blocks that still get their share."""
    scored.erase()
    scored.complete(text(16), n_predict=1)
    scored.act("attn-capture", layers=[0, 1, 2, 3], mode="sum")
    prompt = text(900)
    evicted = spans(scored.complete(prompt, n_predict=700))
    assert len(evicted) >= 8
    oldest = [(FIRST + BLOCK * i, FIRST + BLOCK * (i + 1)) for i in range(len(evicted))]
    assert evicted != oldest
    assert all((p1 - p0) == BLOCK for p0, p1 in evicted)


def test_a_slot_whose_capture_exceeds_the_limit_evicts_its_oldest_blocks() -> None:
    """Another slot's capture takes all that is allowed: the server must go on."""
    cells, heads, layers = 524_288, 2, 4
    options = ("-np", "2", "-kvu", "-c", str(cells), "-ub", "64", "-ctk", "q4_0", "-ctv", "q4_0")
    with evicting(3, *options) as server:
        server.erase(1)  # ends its capture
        row_bytes = (heads * layers + 2 * heads) * cells * 4
        rows = (1 << 30) // row_bytes
        taken = server.act("attn-capture", 0, layers=LAYERS, window=rows, per_head=True)
        assert taken["window"] == rows < 64
        answer = server.complete(text(300), 1, n_predict=500, marker=False)
        assert server.get("/slots/1/attention")["layers"] == []
        evicted = spans(answer)
        assert len(evicted) >= 2 and evicted == sorted(evicted)
        assert server.get("/slots/0/attention")["layers"] == LAYERS


def test_a_capture_without_memory_is_not_tried_again_with_each_token(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--kv-eviction", "3", "--slot-save-path", str(tmp_path))
    with many_cells(log, *options) as (server, process):
        for slot in (1, 2, 3):
            server.erase(slot)  # ends its capture
        server.act("attn-capture", 0, layers=LAYERS, window=64, per_head=True)
        limit_memory(process, 64 << 20)  # a second slot needs 200 MiB
        began = time.monotonic()
        server.complete(server.tokens(sample_text(60)), 1, n_predict=40, marker=False)
        took = time.monotonic() - began
        assert server.get("/slots/1/attention")["layers"] == []
    failures = log.read_text().count("failed to allocate compute buffers")
    assert 1 <= failures <= 1 + took / 10
