"""Checks that a budget has room for pinned blocks, before a policy decides.

Clients pin messages and turns in their requests, operators pin ranges of a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import ROLES, BlockTable
from evoke_proxy.core.model.blocks import Role, Span, clipped, merged, without
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.errors import BudgetTooSmall, PinBudgetExceeded

# Ranges that an operator pins, ascending and disjoint.
Pins = tuple[Span, ...]

# `pin_share` is taken of the budget without the system prompt and sinks, but at least of the budget
# divided by this.
_MIN_PIN_DIVISOR = 4


def check_least_budget(config: PolicyConfig) -> int:
    """Return the smallest possible budget; BudgetTooSmall when the configured one is smaller."""
    needed = config.least_budget
    if config.budget is not None and config.budget < needed:
        raise BudgetTooSmall(config.budget, needed)
    return needed


def check_budget(layout: Layout, config: PolicyConfig) -> None:
    """Raise BudgetTooSmall or PinBudgetExceeded when pins leave no room to move a block."""
    if config.budget is None:
        return
    needed = check_least_budget(config)
    blocks = layout.blocks
    pinned = int(blocks.lengths[blocks.pinned].sum())
    is_system = (blocks.roles == ROLES.index(Role.SYSTEM)) & ~blocks.pinned
    system = int(blocks.lengths[is_system].sum())
    left = max(config.budget - config.sink_tokens - system, config.budget // _MIN_PIN_DIVISOR)
    limit = max(0, min(int(config.pin_share * left), config.budget - needed))
    if pinned > limit:
        raise PinBudgetExceeded(pinned, limit)


def change_pins(pins: Pins, layout: Layout, span: Span, pinned: bool, config: PolicyConfig) -> Pins:
    """Return the operator's pins with a span, or without it when `pinned` is false.

    Raises BudgetTooSmall, and PinBudgetExceeded when the new pins do not fit.
    """
    if not pinned:
        return without(pins, [span])
    changed = merged([*pins, span])
    check_budget(_with_pinned(layout, changed), config)
    return changed


def valid_pins(pins: Pins, layout: Layout) -> Pins:
    """Return the pins of positions before the divergence of the latest prompt."""
    return pins if layout.divergence is None else clipped(pins, Span(0, layout.divergence))


def with_pins(layout: Layout, pins: Pins, config: PolicyConfig) -> Layout:
    """Return the layout with the operator's pins, if the budget can hold them.

    When they do not fit beside the client's own pins they are left out, so that no request fails
    because of an operator's pins. Raises BudgetTooSmall, and PinBudgetExceeded for the client's
    own pins.
    """
    if pins:
        try:
            pinned = _with_pinned(layout, pins)
            check_budget(pinned, config)
            return pinned
        except PinBudgetExceeded:
            pass
    check_budget(layout, config)
    return layout


def _with_pinned(layout: Layout, pins: Sequence[Span]) -> Layout:
    """Return the layout with the blocks pinned that lie completely in these ranges."""
    blocks = layout.blocks
    inside = blocks.within(pins) & ~blocks.pinned
    if not inside.any():
        return layout
    pairs = zip(blocks, inside.tolist(), strict=True)
    table = BlockTable(replace(block, pinned=True) if is_in else block for block, is_in in pairs)
    return replace(layout, blocks=table.with_copies(layout.in_pool))
