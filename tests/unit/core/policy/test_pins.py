"""Pins of operators and clients within the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy import pins
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.errors import PinBudgetExceeded

SECRET = "text of the conversation"
ROLES = (Role.SYSTEM, Role.USER, Role.TOOL, Role.ASSISTANT)


def _layout(size: int = 10, pinned: tuple[int, ...] = ()) -> Layout:
    blocks = [
        Block(
            *(f"file:{SECRET}#{i}", f"s/{i}", Span(i * size, (i + 1) * size), role, i + 1, i),
            *(SECRET, (SECRET,)),
            pinned=i in pinned,
        )
        for i, role in enumerate(ROLES)
    ]
    return Layout("s", np.zeros(5 * size, np.int32), 4 * size, BlockTable(blocks))


CONFIG = PolicyConfig(budget=200, sink_tokens=10, recent_tokens=10, block_tokens=10)


def test_an_operator_pins_whole_blocks_within_the_budget() -> None:
    layout = _layout(30)
    pinned_spans = pins.change_pins((), layout, Span(30, 60), True, CONFIG)
    pinned_spans = pins.change_pins(pinned_spans, layout, Span(60, 90), True, CONFIG)
    assert pinned_spans == (Span(30, 90),)
    rows = pins.with_pins(layout, pinned_spans, CONFIG)
    assert rows.blocks.pinned.tolist() == [False, True, True, False]
    assert [b.pinned for b in rows.blocks] == [False, True, True, False]
    assert pins.change_pins(pinned_spans, layout, Span(60, 90), False, CONFIG) == (Span(30, 60),)
    with pytest.raises(PinBudgetExceeded):
        pins.change_pins(pinned_spans, layout, Span(0, 120), True, CONFIG)


def test_operator_pins_over_the_budget_are_ignored_and_client_pins_are_refused() -> None:
    pinned_spans = (Span(40, 120),)
    layout = _layout(40, pinned=(3,))  # the client pins 40 tokens; 80 more exceed the limit
    assert pins.with_pins(layout, pinned_spans, CONFIG).blocks.pinned.tolist() == [
        False,
        False,
        False,
        True,
    ]
    with pytest.raises(PinBudgetExceeded):
        pins.with_pins(_layout(60, pinned=(1, 2, 3)), pinned_spans, CONFIG)


def test_pins_are_cut_at_a_divergence() -> None:
    layout = replace(_layout(), divergence=25)
    assert pins.valid_pins((Span(0, 10), Span(20, 40)), layout) == (Span(0, 10), Span(20, 25))
    assert pins.valid_pins((Span(0, 10),), _layout()) == (Span(0, 10),)
