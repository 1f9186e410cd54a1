"""What no budget can hold: refused, in words, before anything is decided."""

from __future__ import annotations

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.block_table import ROLES
from evoke_proxy.core.blocks import Role
from evoke_proxy.core.layout import Layout
from evoke_proxy.errors import BudgetTooSmall, PinBudgetExceeded

# However much of the budget system prompt and sinks take, this share of it may be pinned from.
_MIN_PIN_SHARE = 4


def check_budget(layout: Layout, config: PolicyConfig) -> None:
    """BudgetTooSmall or PinBudgetExceeded when what must stay leaves no block room to move."""
    if config.budget is None:
        return
    needed = config.sink_tokens + config.recent_tokens + config.block_tokens
    if config.budget < needed:
        raise BudgetTooSmall(config.budget, needed)
    blocks = layout.blocks
    pinned = int(blocks.lengths[blocks.pinned].sum())
    cap = _pin_cap(layout, config, config.budget, needed)
    if pinned > cap:
        raise PinBudgetExceeded(pinned, cap)


def _pin_cap(layout: Layout, config: PolicyConfig, budget: int, needed: int) -> int:
    """A share of what system prompt and sinks leave, and never so much that a block cannot move."""
    blocks = layout.blocks
    systems = (blocks.roles == ROLES.index(Role.SYSTEM)) & ~blocks.pinned
    system = int(blocks.lengths[systems].sum())
    left = max(budget - config.sink_tokens - system, budget // _MIN_PIN_SHARE)
    return max(0, min(int(config.pin_share * left), budget - needed))
