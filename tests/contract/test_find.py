"""What a client that was started again learns: whose rows a slot has, which copies fit a text."""

from __future__ import annotations

from typing import Any

from llama import Llama, sample_text


def save(server: Llama, name: str, p0: int, p1: int, **fields: Any) -> None:
    server.act("block-save", name=name, p0=p0, p1=p1, **fields)


def found(server: Llama, tokens: list[int], **fields: Any) -> list[str]:
    return [block["name"] for block in server.act("block-find", tokens=tokens, **fields)["blocks"]]


def test_the_copies_of_a_session_that_fit_a_text_are_found(one: Llama) -> None:
    one.erase()
    history = one.tokens(sample_text(300))
    one.complete(history)
    mine = {"tenant": "x", "session": "s1"}
    save(one, "s1/first", 0, 64, **mine)
    save(one, "s1/last", 128, 192, **mine)
    save(one, "s2/first", 64, 128, tenant="x", session="s2")
    save(one, "other", 0, 64, tenant="y", session="s1")
    one.erase()  # whatever the slot holds
    assert found(one, history, **mine) == ["s1/first", "s1/last"]
    assert found(one, history[:128], **mine) == ["s1/first"]
    changed = [*history[:100], (history[100] + 1) % 100 + 1, *history[101:]]
    assert found(one, changed, **mine) == ["s1/first"]
    assert found(one, history, tenant="x", session="s2") == ["s2/first"]
    assert found(one, history, tenant="x") == found(one, history, tenant="c", session="s1") == []
    for wrong in ([], [-1], ["x"], "x"):
        assert one.refuse("block-find", tokens=wrong)["code"] == 400


def test_a_slot_names_the_session_of_its_latest_plan_until_another_client_uses_it(
    one: Llama,
) -> None:
    one.erase()
    history = one.tokens(sample_text(200))
    one.complete(history)
    owner = {"tenant": "x", "session": "s1"}
    assert [one.slot()[name] for name in owner] == ["", ""]
    one.act("block-plan", ops=[{"op": "stream", "budget": 0}], **owner)
    assert {name: one.slot()[name] for name in owner} == owner
    rendered = one.post("/evoke/render", {"dialect": "completions", "body": {"prompt": "x"}})
    assert {name: rendered["slots"][0][name] for name in owner} == owner
    one.complete(history)  # with the marker of the plan
    assert {name: one.slot()[name] for name in owner} == owner
    one.complete(one.tokens("Something else entirely."), marker=False)
    assert [one.slot()[name] for name in owner] == ["", ""]


def test_an_adopted_slot_belongs_to_who_adopted(one: Llama) -> None:
    one.erase()
    history = one.tokens(sample_text(200))
    one.complete(history)
    owner = {"tenant": "x", "session": "s1"}
    save(one, "s1/all", 0, 150, **owner)
    one.act("block-adopt", tokens=history[:150], names=["s1/all"], **owner)
    assert {name: one.slot()[name] for name in owner} == owner
