"""Which budget holds for a request, and what none can hold: refused before anything is decided."""

from __future__ import annotations

from dataclasses import replace

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import ROLES
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.errors import BudgetTooSmall, PinBudgetExceeded

# However much of the budget system prompt and sinks take, this share of it may be pinned from.
_MIN_PIN_SHARE = 4


def check_budget(layout: Layout, config: PolicyConfig) -> None:
    """BudgetTooSmall or PinBudgetExceeded when what must stay leaves no block room to move."""
    if config.budget is None:
        return
    needed = check_room(config)
    blocks = layout.blocks
    pinned = int(blocks.lengths[blocks.pinned].sum())
    cap = _pin_cap(layout, config, config.budget, needed)
    if pinned > cap:
        raise PinBudgetExceeded(pinned, cap)


def check_room(config: PolicyConfig) -> int:
    """The least tokens that a budget must hold; BudgetTooSmall when the configured one is less."""
    needed = config.least_budget
    if config.budget is not None and config.budget < needed:
        raise BudgetTooSmall(config.budget, needed)
    return needed


def _pin_cap(layout: Layout, config: PolicyConfig, budget: int, needed: int) -> int:
    """A share of what system prompt and sinks leave, and never so much that a block cannot move."""
    blocks = layout.blocks
    systems = (blocks.roles == ROLES.index(Role.SYSTEM)) & ~blocks.pinned
    system = int(blocks.lengths[systems].sum())
    left = max(budget - config.sink_tokens - system, budget // _MIN_PIN_SHARE)
    return max(0, min(int(config.pin_share * left), budget - needed))


def effective(config: PolicyConfig, request: ChatRequest) -> PolicyConfig:
    """The configured policy as one request wants it; it may lower the budget, not raise it."""
    tags = request.tags
    if not tags.given:
        return config
    budgets = [budget for budget in (config.budget, tags.budget) if budget is not None]
    return replace(
        config,
        budget=min(budgets, default=None),
        name=tags.policy or config.name,
        recovery=tags.recovery or config.recovery,
        recall=tags.recall or config.recall,
    )
