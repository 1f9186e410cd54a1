"""What a restarted client can look up: the session of a slot, and the copies that fit a text."""

from __future__ import annotations

from typing import Any

from llama import Llama, sample_text


def save(server: Llama, name: str, p0: int, p1: int, **fields: Any) -> None:
    server.act("block-save", name=name, p0=p0, p1=p1, **fields)


def found_names(server: Llama, tokens: list[int], **fields: Any) -> list[str]:
    return [block["name"] for block in server.act("block-find", tokens=tokens, **fields)["blocks"]]


def test_the_copies_of_a_session_that_fit_a_text_are_found(one: Llama) -> None:
    one.erase()
    history = one.tokens(sample_text(300))
    one.complete(history)
    owner = {"tenant": "x", "session": "s1"}
    save(one, "s1/first", 0, 64, **owner)
    save(one, "s1/last", 128, 192, **owner)
    save(one, "s2/first", 64, 128, tenant="x", session="s2")
    save(one, "other", 0, 64, tenant="y", session="s1")
    one.erase()  # the slot's contents do not matter
    assert found_names(one, history, **owner) == ["s1/first", "s1/last"]
    assert found_names(one, history[:128], **owner) == ["s1/first"]
    changed = [*history[:100], (history[100] + 1) % 100 + 1, *history[101:]]
    assert found_names(one, changed, **owner) == ["s1/first"]
    assert found_names(one, history, tenant="x", session="s2") == ["s2/first"]
    assert (
        found_names(one, history, tenant="x")
        == found_names(one, history, tenant="c", session="s1")
        == []
    )
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


def test_an_adopted_slot_belongs_to_the_session_that_adopted_it(one: Llama) -> None:
    one.erase()
    history = one.tokens(sample_text(200))
    one.complete(history)
    owner = {"tenant": "x", "session": "s1"}
    save(one, "s1/all", 0, 150, **owner)
    one.act("block-adopt", tokens=history[:150], names=["s1/all"], **owner)
    assert {name: one.slot()[name] for name in owner} == owner


def test_the_copies_of_other_sessions_do_not_slow_the_search(one: Llama) -> None:
    """A tenant may have a hundred thousand blocks; the main loop decodes nothing meanwhile."""
    one.erase()
    history = one.tokens(sample_text(60))
    one.complete(history)
    ops = [{"op": "save", "name": "0", "p0": 0, "p1": 16}] * 4096
    for part in range(10):
        named = [op | {"name": f"s1/{part}/{i}"} for i, op in enumerate(ops)]
        one.act("block-plan", ops=named, tenant="many", session="s1")
    save(one, "s2/last", 0, 64, tenant="many", session="s2")
    mine: dict[str, Any] = {"tokens": history, "tenant": "many", "session": "s2"}
    best = min(float(one.act("block-find", **mine)["t_ms"]) for _ in range(3))
    assert found_names(one, **mine) == ["s2/last"]
    one.post("/slots/0?action=block-drop", {"all": True, "tenant": "many"})
    assert best < 40
