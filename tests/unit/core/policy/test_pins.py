"""Pins of operators and clients within the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layout_fixtures import small_layout

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.policy import pins
from evoke_proxy.errors import PinBudgetExceeded

CONFIG = PolicyConfig(budget=200, sink_tokens=10, recent_tokens=10, block_tokens=10)


def test_an_operator_pins_whole_blocks_within_the_budget() -> None:
    layout = small_layout(30)
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
    layout = small_layout(40, pinned=(3,))  # the client pins 40 tokens; 80 more exceed the limit
    assert pins.with_pins(layout, pinned_spans, CONFIG).blocks.pinned.tolist() == [
        False,
        False,
        False,
        True,
    ]
    with pytest.raises(PinBudgetExceeded):
        pins.with_pins(small_layout(60, pinned=(1, 2, 3)), pinned_spans, CONFIG)


def test_pins_are_cut_at_a_divergence() -> None:
    layout = replace(small_layout(), divergence=25)
    assert pins.valid_pins((Span(0, 10), Span(20, 40)), layout) == (Span(0, 10), Span(20, 25))
    assert pins.valid_pins((Span(0, 10),), small_layout()) == (Span(0, 10),)
