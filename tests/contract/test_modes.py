"""The modes 1 and 2 of --kv-eviction: which blocks are evicted when no cell is free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama import Llama, running, sample_text
from mode_calls import BLOCK, CELLS, FIRST, OPTIONS, auto_evicted, evicting, resident, spans, text

from bench.random_models import SHAPES, ensure


@pytest.fixture(scope="module")
def streaming() -> Iterator[Llama]:
    with evicting(1, "-np", "1") as server:
        yield server


def test_the_oldest_complete_blocks_are_evicted(streaming: Llama) -> None:
    streaming.erase()
    answer = streaming.complete(text(600), n_predict=1500, marker=False)
    assert answer["timings"]["predicted_n"] == 1500
    evicted = spans(answer)
    assert evicted == [(FIRST + BLOCK * i, FIRST + BLOCK * (i + 1)) for i in range(len(evicted))]
    state = streaming.slot()
    assert state["n_tokens"] - state["n_resident"] == BLOCK * len(evicted)
    assert CELLS - BLOCK <= state["n_resident"] <= CELLS
    accounting = answer["timings"]["evoke"]
    assert accounting["n_resident_peak"] == CELLS
    assert accounting["budget_breaches"] == 0


def test_evicted_blocks_are_saved_and_can_be_loaded(streaming: Llama) -> None:
    streaming.erase()
    prompt = text(600)
    answer = streaming.complete(prompt, n_predict=800)
    p0, p1, name = auto_evicted(answer)[0]
    last = streaming.slot()["resident"][-1]
    streaming.act("block-evict", p0=last[0], p1=last[0] + BLOCK)
    assert streaming.act("block-load", names=[name])["n_loaded"] == BLOCK
    assert resident(streaming.slot()["resident"], int(str(p0)), int(str(p1)))


def test_blocks_of_an_adopted_slot_are_saved_for_the_adopting_session(streaming: Llama) -> None:
    streaming.erase()
    streaming.post("/slots/0?action=block-drop", {"all": True})
    owner = {"tenant": "x", "session": "s"}
    streaming.complete(text(600), n_predict=1)
    streaming.act("block-save", name="all", p0=0, p1=600, **owner)
    streaming.act("block-adopt", tokens=text(600), names=["all"], **owner)
    name = auto_evicted(streaming.complete(text(610), n_predict=800))[0][2]
    saved = {b["name"]: b for b in streaming.get("/slots/0/blocks?tenant=x")["blocks"]}
    assert saved[str(name)]["session"] == "s"
    assert streaming.slot()["blocks"] == [], "another tenant sees its names"
    streaming.post("/slots/0?action=block-drop", {"all": True, "tenant": "x"})


def test_generation_continues_after_the_cells_are_full(streaming: Llama) -> None:
    """5,000 tokens in 1,024 cells; bench/limit.py generates 20,000."""
    streaming.erase()
    answer = streaming.complete(text(64), n_predict=5000, marker=False)
    assert answer["timings"]["predicted_n"] == 5000
    accounting = answer["timings"]["evoke"]
    assert (accounting["n_resident_peak"], accounting["budget_breaches"]) == (CELLS, 0)
    assert all(name for _, _, name in auto_evicted(answer))


def test_the_scored_mode_evicts_a_block_loaded_last_after_the_others(
    scored: Llama, streaming: Llama
) -> None:
    evicted_again = {}
    for name, server in (("scored", scored), ("streaming", streaming)):
        server.erase()
        prompt = text(1200)
        answer = server.complete(prompt, n_predict=1)
        p0, p1, label = auto_evicted(answer)[0]
        assert (p0, p1) == (FIRST, FIRST + BLOCK)
        server.act("block-evict", p0=700, p1=764)
        server.act("block-load", names=[label])
        repeated = server.complete(prompt + answer["tokens"], n_predict=300)
        evicted_again[name] = (FIRST, FIRST + BLOCK) in spans(repeated)
        assert len(spans(repeated)) >= 3
    assert evicted_again == {"scored": False, "streaming": True}


def test_without_loads_the_scored_mode_evicts_like_the_streaming_mode(
    scored: Llama, streaming: Llama
) -> None:
    evicted = []
    for server in (scored, streaming):
        server.erase()
        evicted.append(spans(server.complete(text(300), n_predict=1200, marker=False)))
    assert evicted[0] == evicted[1] != []


def test_protected_and_recent_tokens_are_not_evicted() -> None:
    options = ("--kv-protected-tokens", "100", "--kv-recent-tokens", "200", "--kv-block-size", "32")
    with evicting(1, "-np", "1", *options) as server:
        answer = server.complete(text(500), n_predict=1000, marker=False)
        state = server.slot()
    evicted = spans(answer)
    assert evicted[0] == (100, 132)
    assert all(p1 - p0 == 32 for p0, p1 in evicted)
    assert state["resident"][0] == [0, 100]
    assert resident(state["resident"], state["n_tokens"] - 200, state["n_tokens"])


def test_with_an_evictable_area_generation_keeps_fewer_rows_than_cells() -> None:
    options = (
        "--kv-sink-tokens",
        "32",
        "--kv-evictable-tokens",
        "256",
        "--kv-recent-tokens",
        "128",
    )
    with evicting(1, "-np", "1", *options) as server:
        prompt = server.complete(text(900), n_predict=1, marker=False)
        server.complete(text(900), n_predict=400, marker=False)
        state = server.slot()
    # A prompt may use all cells; generation is limited to the sum of the areas.
    assert prompt["timings"]["evoke"]["auto_evicted"] == []
    assert 32 + 256 + 128 - BLOCK <= state["n_resident"] <= 32 + 256 + 128


def test_rows_that_several_answers_share_are_never_freed() -> None:
    prompt = text(400)
    with evicting(1, "-np", "2", "-kvu") as server:
        body = {"prompt": prompt, "n_predict": 500, "temperature": 1.0, "n": 2, "seed": 3}
        answers = server.post("/completion", body | {"ignore_eos": True})
        slots = [server.slot(id) for id in (0, 1)]
        ended = [answer["timings"]["predicted_n"] for answer in answers]
        accounting = [answer["timings"]["evoke"] for answer in answers]
    assert ended == [500, 500]
    assert any(spans(answer) for answer in answers)
    for answer in answers:
        assert all(p0 >= len(prompt) for p0, _ in spans(answer))
    # A slot of a further answer is emptied when that answer ends.
    evicted_again = [slot["resident"] for slot in slots if slot["resident"]]
    assert evicted_again
    assert all(resident(ranges, 0, len(prompt)) for ranges in evicted_again)
    assert all(book["budget_breaches"] == 0 for book in accounting)


def test_with_shared_cells_rows_of_the_larger_slot_are_evicted() -> None:
    with evicting(1, "-np", "2", "-kvu") as server:
        server.complete(text(900), 0, n_predict=1, marker=False)
        small = server.complete(text(300, seed=5), 1, n_predict=1, marker=False)
        slots = [server.slot(id) for id in (0, 1)]
    assert spans(small) == []
    assert slots[1]["n_resident"] == 300
    assert 600 < slots[0]["n_resident"] <= CELLS - 300
    assert slots[0]["resident"][0] == [0, FIRST]


def test_slots_with_separate_cells_use_only_their_own() -> None:
    with evicting(1, "-np", "2", "-no-kvu", "--ctx-logical", "2000") as server:
        server.complete(text(400, seed=5), 1, n_predict=1, marker=False)
        long = server.complete(text(900), 0, n_predict=100, marker=False)
        slots = [server.slot(id) for id in (0, 1)]
    assert [slot["n_ctx_logical"] for slot in slots] == [2000, 2000]
    assert [slot["n_cells"] for slot in slots] == [CELLS // 2, CELLS // 2]
    assert long["timings"]["evoke"]["n_resident_peak"] <= CELLS // 2
    assert slots[1]["n_resident"] == 400


@pytest.mark.parametrize("shape", ["tiny-gemma", "tiny-lfm2"])
def test_modes_work_with_other_memory_kinds(shape: str) -> None:
    options = (*OPTIONS, "--kv-eviction", "1", "-np", "1")
    with running(True, *options, model=ensure(SHAPES[shape])) as server:
        answer = server.complete(text(1500), n_predict=200, marker=False)
        assert answer["timings"]["predicted_n"] == 200
        more = server.complete(text(1500) + answer["tokens"] + text(400, seed=2), marker=False)
    for turn in (answer, more):
        accounting = turn["timings"]["evoke"]
        assert spans(turn)
        assert accounting["n_resident_peak"] <= CELLS
        assert accounting["budget_breaches"] == 0


def test_after_its_order_is_used_up_a_budget_evicts_by_the_mode(scored: Llama) -> None:
    scored.erase()
    prompt = scored.tokens(sample_text(300))[:256]
    scored.complete(prompt, n_predict=1)
    scored.act("block-save", name="old", p0=64, p1=96, evict=True)
    scored.act("block-load", names=["old"])
    order = [{"name": "first", "p0": 128, "p1": 160}]
    scored.act("stream", budget=256, sink=4, recent=32, block=32, order=order)
    evicted = spans(scored.complete(prompt, n_predict=64))
    assert evicted[0] == (128, 160)
    assert len(evicted) >= 2
    assert (64, 96) not in evicted
