"""Exactness: evicting and loading a block gives the same bits as never evicting it."""

from __future__ import annotations

import pytest
from llama import Llama, distributions, largest_difference, running, sample_text
from probabilities import STEPS, VOCABULARY, logprobs


def conversation(server: Llama, slot: int, evict: bool, load: bool) -> list[object]:
    history = server.tokens(sample_text(600))
    server.erase(slot)
    first = server.complete(history, slot)
    assert first["timings"]["evoke"]["decoded"] == len(history)
    if evict:
        ops: list[object] = [{"op": "save", "name": "b", "p0": 100, "p1": 400}]
        ops.append({"op": "evict", "p0": 100, "p1": 400})
        server.act("block-plan", slot, ops=ops)
    if load:
        loaded = server.act("block-load", slot, names=["b"])
        assert loaded["same_cells"] and loaded["n_loaded"] == 300
    follow_up = history + first["tokens"] + server.tokens(sample_text(40, seed=5))
    return logprobs(server, follow_up, slot)


def test_evict_and_load_is_bit_identical_to_never_evicting(server: Llama) -> None:
    reference = conversation(server, 0, evict=False, load=False)
    assert conversation(server, 0, evict=True, load=True) == reference
    assert conversation(server, 0, evict=True, load=False) != reference


def test_a_second_slot_is_exact_while_the_first_has_holes(two: Llama) -> None:
    reference = conversation(two, 1, evict=False, load=False)
    conversation(two, 0, evict=True, load=False)
    assert conversation(two, 1, evict=True, load=True) == reference


@pytest.mark.parametrize("flash", ["on", "off"])
def test_ten_round_trips_accumulate_no_error(flash: str) -> None:
    with running(True, "-c", "2048", "--evoke-ram", "16", "-np", "1", "-fa", flash) as server:
        history = server.tokens(sample_text(400))
        server.complete(history, n_predict=1)
        for _ in range(10):
            server.act("block-save", name="r", p0=50, p1=250, evict=True)
            server.act("block-load", names=["r"])
        evicted = logprobs(server, history, 0)
        server.erase()
        server.complete(history, n_predict=1)
        assert logprobs(server, history, 0) == evicted


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_a_copy_of_scattered_cells_is_exact(kv: str) -> None:
    options = ("-c", "2048", "--evoke-ram", "16", "-np", "1", "-fa", "on", "-ctk", kv, "-ctv", kv)
    with running(True, *options) as server:
        history = server.tokens(sample_text(500))[:600]
        server.complete(history, n_predict=1)
        server.act("block-save", name="a", p0=101, p1=214, evict=True)
        server.act("block-save", name="b", p0=301, p1=398, evict=True)
        # b takes the first cells of a, and a takes cells after the prompt
        assert not server.act("block-load", names=["b", "a"], place="contig")["same_cells"]
        reference = logprobs(server, history, 0)
        saved = server.act("block-save", name="all", p0=33, p1=500, evict=True)
        assert saved["n_runs"] == 5
        assert server.act("block-load", names=["all"])["same_cells"]
        assert logprobs(server, history, 0) == reference


def test_rows_in_other_cells_change_only_the_rounding(one: Llama) -> None:
    """Rows in other cells change the order of a sum, not its terms."""
    one.erase()
    history = one.tokens(sample_text(400))
    one.complete(history, n_predict=1)

    def answer() -> list[dict[int, float]]:
        return distributions(one.complete(history, n_predict=STEPS, n_probs=VOCABULARY))

    reference = answer()
    one.act("block-save", name="moved", p0=60, p1=300, evict=True)
    holed = answer()
    loaded = one.act("block-load", names=["moved"], place="contig")
    assert loaded["n_loaded"] == 240
    effect = largest_difference(reference, holed)
    assert effect > 0.1
    assert largest_difference(reference, answer()) < effect / 3
