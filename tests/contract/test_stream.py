"""Budgets: the server keeps a slot within its budget, in prefill and in generation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import ceil

import pytest
from llama import Llama, running, sample_text

BUDGET = 256
# A prompt, a quarter of it, and batches that fit there beside what is never evicted.
PROMPT, QUARTER, BATCH = 3000, 750, 512


def set_budget(server: Llama, **more: object) -> None:
    server.act("stream", **({"budget": BUDGET, "sink": 4, "recent": 32, "block": 32} | more))


def test_prefill_and_generation_stay_under_the_budget(server: Llama) -> None:
    set_budget(server)
    prompt = server.tokens(sample_text(700))
    answer = server.complete(prompt, n_predict=300)
    evoke = answer["timings"]["evoke"]
    assert evoke["n_resident_peak"] <= BUDGET and evoke["budget_breaches"] == 0
    assert evoke["decoded"] == evoke["n_prompt"] == len(prompt)
    assert evoke["decoded_hidden"] >= len(prompt) - BUDGET
    assert answer["timings"]["predicted_n"] == 300
    state = server.slot()
    assert state["n_resident"] <= BUDGET
    assert state["resident"][0] == [0, 4]
    n_evicted = sum(p1 - p0 for p0, p1, _ in evoke["auto_evicted"])
    assert n_evicted == state["n_tokens"] - state["n_resident"]


def test_blocks_evicted_for_the_budget_were_saved_and_can_be_loaded(server: Llama) -> None:
    set_budget(server)
    prompt = server.tokens(sample_text(500))
    answer = server.complete(prompt, n_predict=40)
    evicted = answer["timings"]["evoke"]["auto_evicted"]
    assert evicted and all(name for _, _, name in evicted)
    p0, p1, name = evicted[0]
    keep = server.slot()["resident"][-1]
    server.act("block-evict", p0=keep[0], p1=keep[1] - 1)
    loaded = server.act("block-load", names=[name])
    assert loaded["n_loaded"] == p1 - p0
    assert any(a <= p0 and p1 <= b for a, b in server.slot()["resident"])


def test_rows_that_have_a_copy_are_not_copied_again(server: Llama) -> None:
    """Neither an eviction for the budget nor a save after a load makes a second copy."""
    prompt = server.tokens(sample_text(300))[:256]
    server.complete(prompt, n_predict=1)
    others = server.slot()["ram"]["used"]
    server.act("block-save", name="saved", p0=64, p1=128)
    one = server.slot()["ram"]["used"] - others
    order = [{"name": "saved", "p0": 64, "p1": 128}, {"name": "new", "p0": 128, "p1": 192}]
    set_budget(server, budget=288, block=64, order=order)
    answer = server.complete(prompt + prompt[:100], n_predict=1)
    evicted = answer["timings"]["evoke"]["auto_evicted"]
    assert evicted == [[64, 128, "saved"], [128, 192, "new"]]
    assert server.slot()["ram"]["used"] == others + 2 * one
    server.act("stream", budget=0)
    server.act("block-load", names=["saved", "new"])
    repeated = {"op": "save", "name": "second", "p0": 64, "p1": 128}
    evict = {"op": "evict", "names": ["saved", "new"]}
    server.act("block-plan", ops=[repeated, evict])
    assert server.slot()["ram"]["used"] == others + 2 * one
    assert {b["name"] for b in server.slot()["blocks"]} == {"saved", "new", "second"}


def test_protected_ranges_are_kept_and_blocks_are_evicted_in_the_given_order(server: Llama) -> None:
    prompt = server.tokens(sample_text(300))[:240]
    server.complete(prompt, n_predict=1)
    order = [
        {"name": "second", "p0": 128, "p1": 160},
        {"name": "first", "p0": 64, "p1": 96},
    ]
    set_budget(server, protect=[[32, 64]], order=order)
    more = server.tokens(sample_text(400, seed=2))
    evoke = server.complete(prompt + more, n_predict=4)["timings"]["evoke"]
    names = [name for _, _, name in evoke["auto_evicted"]]
    assert names[:2] == ["second", "first"]
    resident = server.slot()["resident"]
    assert any(a <= 32 and 64 <= b for a, b in resident)
    assert evoke["n_resident_peak"] <= BUDGET


def test_a_budget_of_one_slot_does_not_touch_the_other(two: Llama) -> None:
    for slot in (0, 1):
        two.erase(slot)
    prompt = two.tokens(sample_text(500))
    two.complete(prompt, 1)
    two.act("stream", 0, budget=BUDGET, sink=4, recent=32, block=32)
    two.complete(prompt, 0, n_predict=50)
    assert two.slot(0)["n_resident"] <= BUDGET
    assert two.slot(1)["n_resident"] == two.slot(1)["n_tokens"]


def test_eviction_while_generating_does_not_disturb_the_stream(one: Llama) -> None:
    one.erase()
    set_budget(one)
    answer = one.complete(one.tokens(sample_text(100)), n_predict=600)
    assert answer["timings"]["predicted_n"] == 600
    assert answer["timings"]["evoke"]["n_resident_peak"] <= BUDGET


def peak(answer: dict) -> int:
    evoke = answer["timings"]["evoke"]
    assert evoke["n_resident_peak"] >= evoke["n_resident"]
    return int(evoke["n_resident_peak"])


def test_rows_of_the_previous_conversation_do_not_count_in_the_peak(server: Llama) -> None:
    """The next conversation in the slot has a budget and shares a few tokens."""
    old = server.tokens(sample_text(500))
    assert peak(server.complete(old)) == len(old) + 7
    set_budget(server)
    new = old[:16] + server.tokens(sample_text(400, seed=3))
    answer = server.complete(new, n_predict=40)
    assert answer["timings"]["evoke"]["decoded"] == len(new) - 16
    assert BUDGET - 32 < peak(answer) <= BUDGET


def test_the_peak_of_a_shorter_prompt_is_its_own_rows(server: Llama) -> None:
    old = server.tokens(sample_text(500))
    server.complete(old)
    assert peak(server.complete(old[:100], n_predict=5)) == 104


def test_the_peak_counts_from_the_plan_that_sets_a_lower_budget(server: Llama) -> None:
    prompt = server.tokens(sample_text(500))
    first = server.complete(prompt)
    stream = {"op": "stream", "budget": BUDGET, "sink": 4, "recent": 32, "block": 32}
    evict = {"op": "evict", "p0": 64, "p1": len(prompt) - 64}
    server.act("block-plan", ops=[evict, stream])
    after = peak(server.complete(prompt + first["tokens"]))
    assert 128 < after <= BUDGET


def test_rows_above_a_new_budget_count_in_the_peak(server: Llama) -> None:
    """The request starts from these rows."""
    prompt = server.tokens(sample_text(500))
    first = server.complete(prompt)
    set_budget(server)
    repeated = server.complete(prompt + first["tokens"])
    assert peak(repeated) == len(prompt) + 7
    assert server.slot()["n_resident"] <= BUDGET


def test_rows_resident_during_a_plan_count_in_the_peak(server: Llama) -> None:
    prompt = server.tokens(sample_text(300))
    first = server.complete(prompt)
    server.act("block-save", name="a", p0=64, p1=164, evict=True)
    server.act("block-save", name="b", p0=164, p1=264)
    server.complete(prompt + first["tokens"], n_predict=1)
    load, evict = {"op": "load", "names": ["a"]}, {"op": "evict", "names": ["b"]}
    n_resident = server.slot()["n_resident"]
    server.act("block-plan", ops=[load, evict])
    answer = server.complete(prompt + first["tokens"], n_predict=1)
    assert peak(answer) == n_resident + 100
    assert answer["timings"]["evoke"]["n_resident"] == n_resident


@pytest.fixture(scope="module")
def batches() -> Iterator[Llama]:
    """The patched server with one slot and batches of `BATCH` tokens."""
    options = ("-c", "4096", "--evoke-ram", "64", "-np", "1", "-b", str(BATCH), "-ub", "128")
    with running(True, *options) as server:
        yield server


def prefill(server: Llama, budget: int, **more: object) -> dict:
    """The accounting of a turn that decodes a prompt of `PROMPT` tokens; budget 0 for none."""
    server.erase()
    server.post("/slots/0?action=block-drop", {"all": True})
    server.act("stream", **({"budget": budget, "sink": 4, "recent": 32, "block": 64} | more))
    evoke: dict = server.complete(server.tokens(sample_text(PROMPT))[:PROMPT])["timings"]["evoke"]
    assert evoke["decoded"] == PROMPT and evoke["budget_breaches"] == 0
    assert evoke["n_resident_peak"] <= (budget or PROMPT + 8)
    return evoke


def test_a_prompt_takes_as_many_batches_under_a_budget_as_without(batches: Llama) -> None:
    whole, part = prefill(batches, 0), prefill(batches, QUARTER)
    assert whole["n_batches"] == ceil(PROMPT / BATCH)
    assert part["n_batches"] <= 1.25 * whole["n_batches"]
    assert part["n_resident_peak"] > QUARTER - 64


def test_a_batch_fills_the_room_that_a_small_budget_leaves(batches: Llama) -> None:
    """The fewest batches: each is as large as what may be evicted, but for one cut block."""
    most = 256 - 4 - 32 - 64 - (64 - 1)
    evoke = prefill(batches, 256, protect=[[64, 128]])
    assert evoke["n_batches"] <= 1 + ceil((PROMPT - 256) / most)
    assert batches.slot()["resident"][:2] == [[0, 4], [64, 128]]


def test_large_batches_evict_the_same_rows_as_small_ones(batches: Llama) -> None:
    """The oldest blocks first; after the prompt the same rows are left, but for a block."""
    evoke = prefill(batches, QUARTER)
    ranges = [(p0, p1) for p0, p1, _ in evoke["auto_evicted"]]
    assert ranges == sorted(ranges) and ranges[0][0] == 4
    assert all(p1 - p0 == 64 for p0, p1 in ranges[1:])
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    state = batches.slot()
    assert state["resident"] == [[0, 4], [ranges[-1][1], PROMPT + 7]]
    assert QUARTER - 64 < state["n_resident"] <= QUARTER
