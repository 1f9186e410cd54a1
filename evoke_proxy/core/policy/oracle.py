"""The ceiling of retrieval, for benches: the request says which blocks hold the answer.

What it names comes first; the rest of the budget is spent as `evoke` spends it. So it has whatever
`evoke` has and the answer too: where it recalls more, `evoke` had not found the block, and where it
recalls less than never evicting, that is the cost of the holes.
"""

from __future__ import annotations

from dataclasses import replace

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import blocks_named
from evoke_proxy.core.policy import evoke, moves
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.retrieval.query import Query

_GOLD = 100.0


def choice(view: PolicyView, question: Query, config: PolicyConfig, recovers: bool) -> moves.Choice:
    """The blocks that the question's `gold` names, then what `evoke` would have."""
    ours = evoke.choice(view, question, config, recovers)
    return replace(ours, values=ours.values + _GOLD * blocks_named(view.blocks, question.gold))
