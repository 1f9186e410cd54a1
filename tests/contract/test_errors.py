"""Refused block calls: status, error type, and an unchanged slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama import Llama, running, sample_text


@pytest.fixture
def filled(one: Llama) -> Iterator[Llama]:
    """A slot with 300 tokens, one saved and evicted block, and one saved and resident block."""
    one.erase()
    one.post("/slots/0?action=block-drop", {"all": True})
    one.complete(one.tokens(sample_text(260)))
    one.act("block-save", name="gone", p0=64, p1=128, evict=True)
    one.act("block-save", name="here", p0=128, p1=192)
    before = one.slot()
    yield one
    assert one.slot() == before


SAVE = {"op": "save", "name": "gone", "p0": 0, "p1": 32}
LOAD = {"op": "load", "names": ["gone"]}
# Saves run first: afterwards a name of these plans would be that of another block, or of none.
CONFLICTING: list[list[dict[str, Any]]] = [
    [SAVE, LOAD],
    [LOAD, SAVE],
    [SAVE, SAVE | {"p0": 200, "p1": 240}],
    [{"op": "drop", "names": ["here"]}, SAVE | {"name": "here", "p0": 128, "p1": 192}],
    [{"op": "evict", "names": ["here"]}, SAVE | {"name": "here"}],
]

CASES: list[tuple[str, dict[str, Any], int, str]] = [
    *(("block-plan", {"ops": ops}, 400, "invalid_request_error") for ops in CONFLICTING),
    ("block-plan", {"ops": [{"op": "drop", "names": ["gone"]}, LOAD]}, 404, "unknown_block"),
    ("block-save", {"name": "x", "p0": 200, "p1": 100}, 400, "invalid_request_error"),
    ("block-save", {"name": "x", "p0": -1, "p1": 100}, 400, "invalid_request_error"),
    ("block-save", {"name": "x", "p0": 0, "p1": 100000}, 400, "invalid_request_error"),
    ("block-save", {"name": "x", "p0": 0, "p1": 100}, 400, "invalid_request_error"),  # a hole
    ("block-save", {"name": "", "p0": 0, "p1": 10}, 400, "invalid_request_error"),
    ("block-save", {"name": "n" * 201, "p0": 0, "p1": 10}, 400, "invalid_request_error"),
    ("block-save", {"p0": 0, "p1": 10}, 400, "invalid_request_error"),
    ("block-save", {"name": 7, "p0": 0, "p1": 10}, 400, "invalid_request_error"),
    ("block-save", {"name": "x", "p0": "0", "p1": 10}, 400, "invalid_request_error"),
    ("block-evict", {"p0": 0, "p1": 0}, 400, "invalid_request_error"),
    ("block-evict", {"names": ["nope"]}, 404, "unknown_block"),
    ("block-evict", {"names": []}, 400, "invalid_request_error"),
    ("block-load", {"names": ["nope"]}, 404, "unknown_block"),
    ("block-load", {"names": ["here"]}, 409, "already_resident"),
    ("block-load", {"names": ["gone", "gone"]}, 409, "already_resident"),
    ("block-load", {"names": ["gone"], "place": "up"}, 400, "invalid_request_error"),
    ("block-plan", {"ops": "all"}, 400, "invalid_request_error"),
    ("block-plan", {"ops": [{"op": "fly"}]}, 400, "invalid_request_error"),
    ("block-plan", {"ops": [], "expect": {"n_tokens": 3}}, 409, "stale_epoch"),
    ("block-plan", {"ops": [], "expect": {"tokens_hash": "0"}}, 409, "stale_epoch"),
    ("stream", {"budget": 100, "sink": 4, "recent": 64, "block": 64}, 400, "invalid_request_error"),
    ("stream", {"budget": -5}, 400, "invalid_request_error"),
    (
        "stream",
        {"budget": 200, "order": [{"name": "x", "p0": 8, "p1": 8}]},
        400,
        "invalid_request_error",
    ),
    ("attention", {"ranges": [[0, 200]] * 99}, 400, "invalid_request_error"),
    ("block-adopt", {"tokens": [], "names": ["gone"]}, 400, "invalid_request_error"),
    ("block-adopt", {"tokens": [99999], "names": ["gone"]}, 400, "invalid_request_error"),
    ("block-adopt", {"tokens": [5], "names": ["nope"]}, 404, "unknown_block"),
    ("block-adopt", {"tokens": [5] * 200, "names": ["gone"]}, 409, "stale_block"),
]


@pytest.mark.parametrize(("action", "body", "status", "kind"), CASES)
def test_refusals_have_their_status_and_type(
    filled: Llama, action: str, body: dict[str, Any], status: int, kind: str
) -> None:
    error = filled.refuse(action, **body)
    assert (error["code"], error["type"]) == (status, kind)
    assert error["message"]


def test_a_refused_plan_changes_nothing_and_names_its_op(filled: Llama) -> None:
    ops = [
        {"op": "save", "name": "new", "p0": 0, "p1": 64},
        {"op": "evict", "p0": 0, "p1": 64},
        {"op": "load", "names": ["gone", "nope"]},
    ]
    error = filled.refuse("block-plan", ops=ops)
    assert (error["type"], error["op"], error["name"]) == ("unknown_block", 2, "nope")


def test_a_stale_epoch_is_409_and_gives_the_new_one(filled: Llama) -> None:
    error = filled.refuse("block-evict", epoch=1, p0=0, p1=10)
    assert (error["code"], error["type"]) == (409, "stale_epoch")
    assert error["epoch"] == filled.epoch()
    body = {"p0": 0, "p1": 10}
    assert filled.ask("POST", "/slots/0?action=block-evict", body)[0] == 400


def test_unknown_slot_and_malformed_body(filled: Llama) -> None:
    assert filled.refuse("block-evict", slot=7, p0=0, p1=10)["type"] == "not_found_error"
    assert filled.ask("GET", "/slots/9/blocks")[0] == 404
    for raw in (b"{", b"[1]", b'"x"'):
        status, _ = filled.raw("POST", "/slots/0?action=block-plan", raw)
        assert 400 <= status < 500 or status == 500


def test_a_block_of_other_tokens_is_stale(one: Llama) -> None:
    one.erase()
    one.complete(one.tokens(sample_text(260)))
    one.act("block-save", name="old", p0=64, p1=128, evict=True)
    one.complete(one.tokens(sample_text(260, seed=4)))
    assert one.refuse("block-load", names=["old"])["type"] == "stale_block"
    assert one.refuse("block-evict", names=["old"])["type"] == "stale_block"
    row = next(b for b in one.slot()["blocks"] if b["name"] == "old")
    assert row["stale"] and not row["resident"]


LOAD_BIG = {"op": "load", "names": ["big"]}


def test_a_load_beyond_the_cells_or_the_budget_is_503() -> None:
    with running(True, "-c", "512", "--evoke-ram", "16", "-np", "1") as server:
        history = server.tokens(sample_text(280))[:300]
        server.complete(history)
        server.act("block-save", name="big", p0=0, p1=256, evict=True)
        server.act("stream", budget=200, sink=0, recent=16, block=32)
        error = server.refuse("block-load", names=["big"])
        assert (error["code"], error["type"]) == (503, "no_free_cells")
        assert error["needed"] == 256 and error["free"] < 200
    with running(True, "-c", "512", "--evoke-ram", "16", "-np", "2", "-kvu") as server:
        server.complete(history, 0)
        server.act("block-save", 0, name="big", p0=0, p1=256, evict=True)
        server.complete(server.tokens(sample_text(400))[50:350], 1, marker=False, n_predict=1)
        before = server.slot(0)
        for action, body in (("block-load", {}), ("block-plan", {"ops": [LOAD_BIG]})):
            error = server.refuse(action, 0, **(body or {"names": ["big"]}))
            assert (error["code"], error["type"]) == (503, "no_free_cells")
            assert server.slot(0) == before
            assert error["needed"] == 256 and error["free"] < 256


def test_a_save_beyond_the_host_memory_is_413_and_saves_nothing() -> None:
    with running(True, "-c", "4096", "--evoke-ram", "1", "-np", "1") as server:
        server.complete(server.tokens(sample_text(800)))
        error = server.refuse("block-save", name="big", p0=0, p1=700)
        assert (error["code"], error["type"]) == (413, "ram_budget")
        assert server.slot()["ram"]["used"] == 0
        # the least recently used copies are dropped, and the budget is never exceeded
        for i in range(8):
            server.act("block-save", name=f"b{i}", p0=i * 64, p1=i * 64 + 64)
            ram = server.slot()["ram"]
            assert ram["used"] <= ram["budget"]
        names = [block["name"] for block in server.slot()["blocks"]]
        assert "b7" in names and "b0" not in names


def test_without_the_flag_there_are_no_block_calls(plain: Llama) -> None:
    assert "evoke" not in plain.get("/props")
    for method, path in (
        ("POST", "/slots/0?action=block-save"),
        ("POST", "/slots/0?action=stream"),
        ("GET", "/slots/0/blocks"),
        ("POST", "/evoke/render"),
    ):
        body = {"dialect": "completions", "body": {"prompt": "x"}} if method == "POST" else None
        status, answer = plain.ask(method, path, body)
        assert (status, answer["error"]["type"]) == (501, "not_supported_error")


def test_a_plan_without_enough_memory_changes_no_copy_and_no_name() -> None:
    """The copies fit the budget, but not together with those that the plan loads."""
    with running(True, "-c", "2048", "-np", "1", "--evoke-ram", "1", "-fa", "on") as server:
        row = server.get("/props")["evoke"]["limits"]["row_bytes"]
        size = (1 << 20) // row // 8  # tokens per block: eight blocks fill the memory
        server.complete(server.tokens(sample_text(2000))[: 12 * size], n_predict=1)
        for i in range(7):
            server.act("block-save", name=f"b{i}", p0=i * size, p1=(i + 1) * size)
        server.act("block-drop", names=["b1", "b3", "b5"])
        server.act("block-save", name="moved", p0=9 * size, p1=9 * size + 4)
        names = ["b0", "b2", "b4", "b6"]
        server.act("block-evict", names=names)
        before = server.slot()
        error = server.refuse("block-plan", ops=[
            {"op": "load", "names": names},
            {"op": "save", "name": "moved", "p0": 8 * size, "p1": 8 * size + 2},
            {"op": "save", "name": "large", "p0": 9 * size, "p1": 9 * size + size * 3 // 2},
        ])  # fmt: skip
        assert error["type"] == "ram_budget"
        assert server.slot() == before
        server.act("block-load", names=names)
