"""The engine holds a slot's budget by itself, in prefill and in generation."""

from __future__ import annotations

from llama import Llama, story

BUDGET = 256


def hold(server: Llama, **more: object) -> None:
    server.act("stream", **({"budget": BUDGET, "sink": 4, "recent": 32, "block": 32} | more))


def test_prefill_and_generation_stay_under_the_budget(server: Llama) -> None:
    hold(server)
    prompt = server.tokens(story(700))
    answer = server.complete(prompt, n_predict=300)
    evoke = answer["timings"]["evoke"]
    assert evoke["n_resident_peak"] <= BUDGET and evoke["budget_breaches"] == 0
    assert evoke["decoded"] == evoke["n_prompt"] == len(prompt)
    assert evoke["decoded_hidden"] >= len(prompt) - BUDGET
    assert answer["timings"]["predicted_n"] == 300
    state = server.slot()
    assert state["n_resident"] <= BUDGET
    assert state["resident"][0] == [0, 4]
    gone = sum(p1 - p0 for p0, p1, _ in evoke["auto_evicted"])
    assert gone == state["n_tokens"] - state["n_resident"]


def test_what_the_engine_evicted_was_saved_first_and_loads_back(server: Llama) -> None:
    hold(server)
    prompt = server.tokens(story(500))
    answer = server.complete(prompt, n_predict=40)
    evicted = answer["timings"]["evoke"]["auto_evicted"]
    assert evicted and all(name for _, _, name in evicted)
    p0, p1, name = evicted[0]
    keep = server.slot()["resident"][-1]
    server.act("block-evict", p0=keep[0], p1=keep[1] - 1)
    loaded = server.act("block-load", names=[name])
    assert loaded["n_loaded"] == p1 - p0
    assert any(a <= p0 and p1 <= b for a, b in server.slot()["resident"])


def test_protected_ranges_stay_and_the_order_is_kept(server: Llama) -> None:
    prompt = server.tokens(story(300))[:240]
    server.complete(prompt, n_predict=1)
    order = [
        {"name": "second", "p0": 128, "p1": 160},
        {"name": "first", "p0": 64, "p1": 96},
    ]
    hold(server, protect=[[32, 64]], order=order)
    more = server.tokens(story(400, seed=2))
    evoke = server.complete(prompt + more, n_predict=4)["timings"]["evoke"]
    names = [name for _, _, name in evoke["auto_evicted"]]
    assert names[:2] == ["second", "first"]
    resident = server.slot()["resident"]
    assert any(a <= 32 and 64 <= b for a, b in resident)
    assert evoke["n_resident_peak"] <= BUDGET


def test_a_budget_of_one_slot_does_not_touch_the_other(two: Llama) -> None:
    for slot in (0, 1):
        two.erase(slot)
    prompt = two.tokens(story(500))
    two.complete(prompt, 1)
    two.act("stream", 0, budget=BUDGET, sink=4, recent=32, block=32)
    two.complete(prompt, 0, n_predict=50)
    assert two.slot(0)["n_resident"] <= BUDGET
    assert two.slot(1)["n_resident"] == two.slot(1)["n_tokens"]


def test_eviction_while_generating_does_not_disturb_the_stream(one: Llama) -> None:
    one.erase()
    hold(one)
    answer = one.complete(one.tokens(story(100)), n_predict=600)
    assert answer["timings"]["predicted_n"] == 600
    assert answer["timings"]["evoke"]["n_resident_peak"] <= BUDGET
