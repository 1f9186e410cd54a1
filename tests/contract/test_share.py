"""Sharing: a session gets the complete copies and rows that its tenant has of a text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llama import Llama, sample_text


def blocks_of(n_tokens: int, size: int = 64) -> list[dict[str, Any]]:
    """Blocks of a text, named for the session `new`."""
    starts = range(0, n_tokens, size)
    return [
        {"name": f"new/{start}", "p0": start, "p1": min(n_tokens, start + size)} for start in starts
    ]


def share(server: Llama, slot: int, tokens: list[int], **fields: Any) -> dict[str, Any]:
    """Ask for the blocks of a text for the session `new`."""
    fields = {"session": "new", "blocks": blocks_of(len(tokens))} | fields
    answer: dict[str, Any] = server.post(
        f"/slots/{slot}?action=block-share", {"tokens": tokens, **fields}
    )
    return answer


def sources(answer: dict[str, Any]) -> list[str]:
    return [block["from"] for block in answer["blocks"]]


def emptied(server: Llama) -> list[int]:
    """Empty both slots and the store; returns a text of 320 tokens."""
    for slot in (0, 1):
        server.erase(slot)
    for tenant in ("", "a", "b"):
        server.post("/slots/0?action=block-drop", {"all": True, "tenant": tenant})
    return server.tokens(sample_text(400))[:320]


def test_rows_of_another_slot_are_copied_and_adopted_with_the_same_result(two: Llama) -> None:
    text = emptied(two)
    first = two.complete([*text, 7], 0, n_predict=24)
    shared = share(two, 1, text)
    assert sources(shared) == ["slot"] * 5 and shared["n_copied"] == 320 and not shared["more"]
    names = [block["name"] for block in shared["blocks"]]
    adopted = two.act("block-adopt", 1, tokens=text, names=names, session="new", whole=True)
    assert adopted["n_loaded"] == 320 and adopted["whole"]
    second = two.complete([*text, 7], 1, n_predict=24)
    assert second["timings"]["evoke"]["decoded"] == 1
    assert second["tokens"] == first["tokens"]
    # A second session needs no copy of its own.
    assert sources(share(two, 0, text, session="other")) == ["copy"] * 5


def test_rows_are_copied_while_another_request_generates(two: Llama) -> None:
    text = emptied(two)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(two.complete, [*text, 7], 0, n_predict=600)
        while not (two.slot(0)["is_processing"] and two.slot(0)["n_tokens"] > len(text)):
            assert not answer.done()
        assert sources(share(two, 1, text)) == ["slot"] * 5
        assert two.slot(0)["is_processing"]
        assert answer.result()["timings"]["predicted_n"] == 600


def test_the_copies_of_another_session_get_another_name_and_keep_theirs(two: Llama) -> None:
    text = emptied(two)
    two.complete([*text, 7], 0, n_predict=1)
    two.act("block-save", name="old/0", p0=0, p1=64, session="old")
    two.erase(0)
    assert sources(share(two, 1, text)) == ["copy"]
    two.post("/slots/0?action=block-drop", {"names": ["old/0"]})
    assert [copy["name"] for copy in two.slot(0)["blocks"]] == ["new/0"]


def test_rows_decoded_behind_a_missing_one_are_not_shared(two: Llama) -> None:
    text = emptied(two)
    two.complete(text[:200], 0, n_predict=1)
    two.act("block-save", 0, name="old/64", p0=64, p1=128, evict=True, session="old")
    two.complete(text, 0, n_predict=1)
    shared = share(two, 1, text)
    assert [block["p0"] for block in shared["blocks"]] == [0, 64, 128]
    assert sources(shared) == ["slot", "copy", "slot"]


def test_tenants_share_nothing(two: Llama) -> None:
    text = emptied(two)
    two.act("block-plan", 0, ops=[{"op": "stream", "budget": 0}], tenant="a", session="old")
    two.complete([*text, 7], 0, n_predict=1)
    two.act("block-save", name="old/0", p0=0, p1=64, tenant="a", session="old")
    for tenant in ("b", ""):
        assert share(two, 1, text, tenant=tenant)["blocks"] == []
    assert sources(share(two, 1, text, tenant="a")) == ["copy"] + ["slot"] * 4


def test_another_text_shares_only_the_blocks_before_the_difference(two: Llama) -> None:
    text = emptied(two)
    two.complete([*text, 7], 0, n_predict=1)
    changed = [*text[:150], (text[150] + 1) % 100 + 1, *text[151:]]
    assert [block["p1"] for block in share(two, 1, changed)["blocks"]] == [64, 128]


def test_one_call_copies_a_limited_number_of_rows(two: Llama) -> None:
    text = emptied(two)
    two.complete([*text, 7], 0, n_predict=1)
    first = share(two, 1, text, max_copied=130)
    assert (len(first["blocks"]), first["n_copied"], first["more"]) == (2, 128, True)
    second = share(two, 1, text, max_copied=130)
    assert (sources(second), second["more"]) == (["copy", "copy", "slot", "slot"], True)
    third = share(two, 1, text)
    assert (sources(third), third["more"]) == (["copy"] * 4 + ["slot"], False)


def test_invalid_blocks_are_refused(two: Llama) -> None:
    text = emptied(two)
    for block in ({"name": "x", "p0": 0}, {"p0": 0, "p1": 4}, {"name": "x", "p0": 4, "p1": 4}):
        assert two.refuse("block-share", tokens=text, blocks=[block])["code"] == 400
    outside = {"name": "x", "p0": 0, "p1": len(text) + 1}
    assert two.refuse("block-share", tokens=text, blocks=[outside])["code"] == 400
    assert two.refuse("block-share", tokens=text, blocks=5)["code"] == 400
    too_many = [{"name": "x", "p0": 0, "p1": 1}] * 16385
    assert two.refuse("block-share", tokens=text, blocks=too_many)["code"] == 400
