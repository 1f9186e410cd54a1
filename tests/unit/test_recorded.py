"""What is written down of a session is what is read again."""

from __future__ import annotations

import json

import numpy as np
import pytest

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.view import Task
from evoke_proxy.core.prompt.layout import Layout, SavedRange
from evoke_proxy.core.session.identity import Hint
from evoke_proxy.core.session.recorded import (
    Orders,
    Recorded,
    Seated,
    read,
    reordered,
    written,
)

ORDERS = Orders(True, True, 448, (Span(4, 9),))
BLOCKS = (
    Block("system#0", "s/0-4-a", Span(0, 4), Role.SYSTEM, 1, 0, "Caf\u00e9.", ("x", "y"), True),
    Block("user:1#2", "s/4-9-b", Span(4, 9), Role.USER, 2, 1, "and", preferred=True, priority=2.5),
)


def seated(hint: Hint | None = None, focus: bool = True) -> Seated:
    layout = Layout(
        session="s",
        tokens=np.arange(12, dtype=np.int32) * 70_000,
        generation=9,
        blocks=BlockTable(BLOCKS).with_copies(np.array([True, False])),
        ranges=(SavedRange("s/9-12-t2/gen", Span(9, 12)),),
        stale=frozenset({"s/1-2-c"}),
        numbers={"system": 1, "user:1": 3},
    )
    task = Task(np.array([0.6, 0.8], np.float32) if focus else None, 4)
    left = (Span(0, 4), Span(9, 12))
    known = Recorded("s", "t", 2, layout, left, task, {2: (True, 0.5)}, {"s/0-4-a": 2})
    return Seated(known, hint, (9, 9, 1), slot=1, epoch=2**52 - 1, orders=ORDERS)


@pytest.mark.parametrize("hint", [None, Hint("chat", "evoke_session"), Hint("me", "user", True)])
def test_a_session_is_read_as_it_was_written(hint: Hint | None) -> None:
    before = seated(hint, focus=hint is None)
    after = read(written(before))
    assert after.orders == ORDERS
    assert (after.hint, after.edges, after.slot, after.epoch) == (hint, (9, 9, 1), 1, 2**52 - 1)
    old, new = before.session, after.session
    for name in ("id", "tenant", "turns", "left", "marks", "recovered"):
        assert getattr(new, name) == getattr(old, name)
    for name in ("session", "generation", "blocks", "ranges", "stale", "numbers", "saved"):
        assert getattr(new.layout, name) == getattr(old.layout, name)
    assert (new.layout.tokens == old.layout.tokens).all() and new.layout.tokens.dtype == np.int32
    assert new.task.begins == 4
    assert np.array_equal(new.task.focus, old.task.focus) or new.task.focus is old.task.focus


@pytest.mark.parametrize("orders", [Orders(), Orders(False, True, None)])
def test_orders_change_and_nothing_else(orders: Orders) -> None:
    before = written(seated())
    changed = reordered(before, orders)
    assert read(changed).orders == orders
    assert reordered(changed, ORDERS) == before


def test_a_record_without_orders_is_of_a_session_that_nobody_has_said_anything_of() -> None:
    value = json.loads(written(seated()))
    del value["orders"]
    assert read(json.dumps(value).encode()).orders == Orders()


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"blocks": [[1]]}, {"at": []}, {"tokens": 5}, {"task": None}]
)
def test_another_record_is_refused(change: dict[str, object]) -> None:
    value = json.loads(written(seated())) | change
    with pytest.raises(ValueError, match="record"):
        read(json.dumps(value).encode())
    with pytest.raises(ValueError):
        read(b"no record")
