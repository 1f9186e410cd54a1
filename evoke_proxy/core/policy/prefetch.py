"""Divides a plan into small steps that bring its blocks back, each within the budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from evoke_proxy.core.model.blocks import Span, clipped, count
from evoke_proxy.core.model.plan import Evict, Plan, batches

# Why a prefetch has brought back less than the draft needs; see docs/requests.md.
PREFETCH_REASONS = (
    "bypass",
    "interrupted",
    "no_room",
    "not_in_slot",
    "refused",
    "slot_busy",
    "time_limit",
    "too_long",
    "too_many",
    "too_soon",
    "unknown_conversation",
    "unsupported",
)
# The most tokens that one step loads, or one larger block: a step delays a request that arrives.
STEP_TOKENS = 256


def loading_steps(
    plan: Plan, resident: Sequence[Span], limit: int, step_tokens: int = STEP_TOKENS
) -> Iterator[Plan]:
    """Yield plans that load the blocks of a plan, and evict only what they need room for.

    `resident` are the rows in the slot, and `limit` is how many it may have. After each step the
    slot has at most `limit` rows, or as many as before. Blocks without room are left out.
    """
    n_rows = count(resident)
    evicts = deque(plan.evicts)
    saves = {save.label: save for save in plan.saves}
    for batch in batches(plan.loads, step_tokens):
        n_loaded = sum(len(load.span) for load in batch)
        evicted: list[Evict] = []
        while n_rows + n_loaded > limit and evicts:
            evicted.append(evicts.popleft())
            n_rows -= count(clipped(resident, evicted[-1].span))
        if n_rows + n_loaded > limit:
            return
        n_rows += n_loaded
        labels = [evict.label for evict in evicted if evict.label is not None]
        yield Plan(
            saves=tuple(saves[label] for label in labels if label in saves),
            evicts=tuple(evicted),
            loads=batch,
            reason="prefetch",
        )
