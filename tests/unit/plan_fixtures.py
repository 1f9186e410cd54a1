"""Applies plans to policy views, for tests."""

from __future__ import annotations

from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.view import PolicyView


def resident_after(view: PolicyView, plan: Plan) -> str:
    """The numbers of the blocks that are resident after a plan, sorted, with spaces between."""
    evicted = {evict.label for evict in plan.evicts}
    before = [b.label for b, cached in zip(view.blocks, view.in_cache, strict=True) if cached]
    after = [label for label in before if label not in evicted]
    after += [load.label for load in plan.loads]
    return " ".join(sorted(label.removeprefix("s/") for label in after))
