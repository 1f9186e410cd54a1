"""What a plan leaves resident, for tests."""

from __future__ import annotations

from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.view import PolicyView


def lasting(view: PolicyView, plan: Plan) -> str:
    """The numbers of the blocks that are resident after a plan."""
    gone = {evict.label for evict in plan.evicts}
    here = [b.label for b, here in zip(view.blocks, view.in_cache, strict=True) if here]
    left = [label for label in here if label not in gone] + [load.label for load in plan.loads]
    return " ".join(sorted(label.removeprefix("s/") for label in left))
