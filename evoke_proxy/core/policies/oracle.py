"""The ceiling of retrieval, for benches: the request says which blocks hold the answer.

What it names comes first, everything else is worth what it is worth without any question. Recall
below that of never evicting is then the cost of the holes, not of having looked in vain.
"""

from __future__ import annotations

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.naming import called
from evoke_proxy.core.policies import moves
from evoke_proxy.core.policies.working_set import Candidates, WorkingSet, choose
from evoke_proxy.core.policy_view import PolicyView
from evoke_proxy.core.question import Question
from evoke_proxy.core.score import Scores, keep_scores

_GOLD = 100.0


def choice(
    view: PolicyView, question: Question, config: PolicyConfig, recovers: bool
) -> moves.Choice:
    """The blocks that the question's `gold` names, then the rest by keep-score."""

    def select(given: Candidates, values: Scores, capacity: int | None) -> WorkingSet:
        return choose(given, values, capacity, config.margin)

    gold = called(view.blocks, question.gold)
    values = keep_scores(view, config).round(9) + _GOLD * gold
    return moves.Choice(values, values, select, recovers)
