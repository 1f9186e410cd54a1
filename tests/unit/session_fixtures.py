"""Session records that use every field, for tests."""

from __future__ import annotations

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.view import Task
from evoke_proxy.core.prompt.layout import Layout, SavedRange
from evoke_proxy.core.session.codec import (
    OperatorOverrides,
    SessionRecord,
    SessionState,
)
from evoke_proxy.core.session.identity import Hint

OVERRIDES = OperatorOverrides(True, True, 448, (Span(4, 9),))


BLOCKS = (
    Block("system#0", "s/0-4-a", Span(0, 4), Role.SYSTEM, 1, 0, "Caf\u00e9.", ("x", "y"), True),
    Block("user:1#2", "s/4-9-b", Span(4, 9), Role.USER, 2, 1, "and", preferred=True, priority=2.5),
)


def session_record(hint: Hint | None = None, focus: bool = True) -> SessionRecord:
    """A record with a value in every field; without `focus` the task has no vector."""
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
    resident = (Span(0, 4), Span(9, 12))
    state = SessionState("s", "t", 2, layout, resident, task, {2: (True, 0.5)}, {"s/0-4-a": 2})
    return SessionRecord(state, hint, (9, 9, 1), slot=1, epoch=2**52 - 1, overrides=OVERRIDES)
