"""Adopting a saved conversation into an emptied slot or another slot."""

from __future__ import annotations

from llama import Llama, sample_text
from operations import PARTS


def save_all(server: Llama, slot: int, size: int = 64) -> list[str]:
    """Saves all tokens of the slot in blocks; returns their names in order."""
    n_tokens = server.slot(slot)["n_tokens"]
    names = []
    ops = []
    for p0 in range(0, n_tokens, size):
        names.append(f"s{slot}/{p0}")
        ops.append({"op": "save", "name": names[-1], "p0": p0, "p1": min(n_tokens, p0 + size)})
    server.act("block-plan", slot, ops=ops)
    return names


def test_a_saved_conversation_refills_an_emptied_slot(server: Llama) -> None:
    history = server.tokens(sample_text(400))
    first = server.complete(history)
    cached = history + first["tokens"][:-1]
    reference = server.complete(cached + history[:20], n_predict=24)
    server.erase()
    server.complete(history)
    names = save_all(server, 0)
    server.erase()
    assert server.slot()["n_tokens"] == 0
    adopted = server.act("block-adopt", tokens=cached, names=names)
    assert adopted["n_tokens"] == adopted["n_loaded"] == len(cached)
    repeated = server.complete(cached + history[:20], n_predict=24)
    evoke = repeated["timings"]["evoke"]
    assert evoke["recovered"] == len(cached) and evoke["decoded"] == 20
    assert repeated["tokens"] == reference["tokens"]


def test_adopting_some_blocks_requires_the_last_one(server: Llama) -> None:
    history = server.tokens(sample_text(400))
    first = server.complete(history)
    cached = history + first["tokens"][:-1]
    names = save_all(server, 0)
    server.erase()
    refused = server.refuse("block-adopt", tokens=cached, names=names[:3])
    assert refused["code"] == 400 and "last token" in refused["message"]
    server.act("block-adopt", tokens=cached, names=[names[0], names[-1]])
    assert len(server.slot()["resident"]) == 2
    evoke = server.complete(cached + history[:10])["timings"]["evoke"]
    assert evoke["decoded"] == 10 and evoke["omitted"] > 0
    assert sum(evoke[part] for part in PARTS) == evoke["n_prompt"]


def test_blocks_that_overlap_are_not_adopted(server: Llama) -> None:
    """Also where both begin at the same token: only one of them would be loaded."""
    history = server.tokens(sample_text(300))[:128]
    server.complete([*history, 5], n_predict=1)
    for name, p0, p1 in (("all", 0, 128), ("first", 0, 64), ("middle", 32, 96)):
        server.act("block-save", name=name, p0=p0, p1=p1)
    server.act("block-save", name="again", p0=0, p1=128)  # the same block
    for names in (["all", "first"], ["first", "all"], ["all", "middle"]):
        refused = server.refuse("block-adopt", tokens=history, names=names)
        assert refused["code"] == 400 and "overlap" in refused["message"]
    assert server.act("block-adopt", tokens=history, names=["all", "again"])["n_loaded"] == 128


def test_another_slot_adopts_the_blocks_of_a_slot(two: Llama) -> None:
    for slot in (0, 1):
        two.erase(slot)
    history = two.tokens(sample_text(300))
    first = two.complete(history, 0)
    cached = history + first["tokens"][:-1]
    names = save_all(two, 0)
    two.act("block-adopt", 1, tokens=cached, names=names)
    expected = two.complete(cached + history[:9], 0, n_predict=24)["tokens"]
    assert two.complete(cached + history[:9], 1, n_predict=24)["tokens"] == expected


def test_tenants_do_not_see_each_others_blocks(one: Llama) -> None:
    one.erase()
    one.complete(one.tokens(sample_text(200)))
    one.act("block-save", name="mine", p0=64, p1=128, evict=True, tenant="a")
    assert one.refuse("block-load", names=["mine"], tenant="b")["type"] == "unknown_block"
    assert one.refuse("block-load", names=["mine"])["type"] == "unknown_block"
    assert one.get("/slots/0/blocks?tenant=b")["blocks"] == []
    assert one.act("block-load", names=["mine"], tenant="a")["n_loaded"] == 64
