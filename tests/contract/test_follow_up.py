"""Follow-up requests on a slot with holes, with and without a marker."""

from __future__ import annotations

from llama import Llama, sample_text
from operations import PARTS


def accounting(answer: dict) -> dict:
    evoke: dict = answer["timings"]["evoke"]
    assert sum(evoke[part] for part in PARTS) == evoke["n_prompt"]
    assert (
        answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] + evoke["omitted"]
        == (evoke["n_prompt"])
    )
    return evoke


def test_an_unchanged_follow_up_decodes_only_the_new_tail(server: Llama) -> None:
    history = server.tokens(sample_text(500))
    first = server.complete(history)
    server.act("block-save", name="b", p0=64, p1=320, evict=True)
    tail = server.tokens(sample_text(30, seed=3))
    evoke = accounting(server.complete(history + first["tokens"] + tail))
    # the last generated token was never decoded
    assert evoke["decoded"] == len(tail) + 1
    assert evoke["omitted"] == 256 and evoke["recovered"] == 0
    assert evoke["resident_before"] == len(history) + 7 - 256


def test_a_loaded_block_is_recovered_once_and_resident_after(server: Llama) -> None:
    history = server.tokens(sample_text(400))
    server.complete(history)
    server.act("block-save", name="b", p0=64, p1=128, evict=True)
    server.act("block-load", names=["b"])
    assert accounting(server.complete(history))["recovered"] == 64
    repeated = accounting(server.complete(history))
    assert repeated["recovered"] == 0 and repeated["resident_before"] == len(history) - 1


def test_an_unmarked_request_on_a_slot_with_holes_gets_a_correct_answer(server: Llama) -> None:
    history = server.tokens(sample_text(500))
    server.complete(history[:64], n_predict=1)
    whole = server.complete(history, n_predict=20)  # in the same batches as below
    assert whole["timings"]["cache_n"] == 64
    server.act("block-save", name="b", p0=64, p1=320, evict=True)
    before = server.epoch()
    answer = server.complete(history, marker=False, n_predict=20)
    assert "evoke" not in answer["timings"]
    assert answer["timings"]["cache_n"] == 64
    assert answer["timings"]["prompt_n"] == len(history) - 64
    assert answer["tokens"] == whole["tokens"]
    assert server.epoch() != before


def test_a_marker_with_an_old_epoch_is_reported_stale_and_ignored(server: Llama) -> None:
    history = server.tokens(sample_text(300))
    server.complete(history)
    server.act("block-save", name="b", p0=64, p1=128, evict=True)
    answer = server.complete(history, evoke={"epoch": 1})
    assert answer["timings"]["evoke"]["marker"] == "stale"
    assert answer["timings"]["cache_n"] == 64
    assert accounting(answer)["omitted"] == 0


def test_a_divergence_inside_a_hole_decodes_from_the_last_resident_row(server: Llama) -> None:
    history = server.tokens(sample_text(500))
    server.complete(history)
    server.act("block-save", name="b", p0=64, p1=320, evict=True)
    other = history[:200] + server.tokens(sample_text(40, seed=9))
    evoke = accounting(server.complete(other))
    assert evoke["resident_before"] == 64 and evoke["omitted"] == 0
    assert evoke["decoded"] == len(other) - 64


def test_all_rows_except_the_last_can_be_evicted(server: Llama) -> None:
    history = server.tokens(sample_text(300))
    server.complete(history)
    top = server.slot()["n_tokens"]
    error = server.refuse("block-evict", p0=0, p1=top)
    assert error["code"] == 400 and "last resident row" in error["message"]
    server.act("block-evict", p0=0, p1=top - 1)
    assert server.slot()["resident"] == [[top - 1, top]]
    evoke = accounting(server.complete(history[:100] + history[50:]))
    assert evoke["decoded"] == evoke["n_prompt"]


def test_a_reserved_slot_is_not_used_while_another_is_free(two: Llama) -> None:
    for slot in (0, 1):
        two.erase(slot)
    history = two.tokens(sample_text(300))
    two.complete(history, 0)
    assert two.slot(0)["reserved"] and not two.slot(1)["reserved"]
    epoch = two.epoch(0)
    answer = two.complete(history, -1, marker=False)
    assert answer["id_slot"] == 1
    assert two.epoch(0) == epoch
