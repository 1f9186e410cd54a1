"""What an operator has pinned of a conversation, beside what its client has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Span, clipped, merged, without
from evoke_proxy.core.policy.bounds import check_budget
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.errors import PinBudgetExceeded

Pins = tuple[Span, ...]


def changed(pins: Pins, layout: Layout, span: Span, pinned: bool, config: PolicyConfig) -> Pins:
    """The pins with this span, or without it; PinBudgetExceeded when that were too many."""
    if not pinned:
        return without(pins, [span])
    more = merged([*pins, span])
    check_budget(_with(layout, more), config)
    return more


def kept(pins: Pins, layout: Layout) -> Pins:
    """Those of text that is still what it was."""
    there = layout.divergence
    return pins if there is None else clipped(pins, Span(0, there))


def applied(layout: Layout, pins: Pins, config: PolicyConfig) -> Layout:
    """The layout with the operator's pins too, within the budget.

    Without them where they are too many beside the client's own: no request fails of what its
    client has not asked for. Raises BudgetTooSmall, and PinBudgetExceeded of the client's own.
    """
    if pins:
        try:
            more = _with(layout, pins)
            check_budget(more, config)
            return more
        except PinBudgetExceeded:
            pass
    check_budget(layout, config)
    return layout


def _with(layout: Layout, pins: Sequence[Span]) -> Layout:
    """A block is pinned when all of it is."""
    blocks = layout.blocks
    inside = blocks.within(pins) & ~blocks.pinned
    if not inside.any():
        return layout
    chosen = zip(blocks, inside.tolist(), strict=True)
    table = BlockTable(replace(block, pinned=True) if is_in else block for block, is_in in chosen)
    return replace(layout, blocks=table.with_copies(layout.in_pool))
