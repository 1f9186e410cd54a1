"""The ceiling of retrieval: requests say which blocks hold the answer (`evoke_oracle`).

These blocks come first; the rest of the budget is spent as `evoke` spends it. So the oracle has
what `evoke` has, and the answer. Where it recalls more, `evoke` did not find the block; where it
recalls less than without eviction, that is the cost of the holes.
"""

from __future__ import annotations

from dataclasses import replace

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import blocks_named
from evoke_proxy.core.policy.evoke import evoke_choice
from evoke_proxy.core.policy.planner import Choice
from evoke_proxy.core.policy.registry import Policy, register
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.query import Query

# Above every score, that of requested blocks included.
_GOLD = 100.0

_evoke = evoke_choice()


def choose(view: PolicyView, query: Query, config: PolicyConfig) -> Choice:
    """Choose the blocks that the query's `gold` names, then what `evoke` chooses."""
    choice = _evoke(view, query, config)
    return replace(choice, scores=choice.scores + _GOLD * blocks_named(view.blocks, query.gold))


register(
    Policy(
        name="oracle",
        choose=choose,
        saves_evicted=True,
        uses_query=True,
    )
)
