"""The policy the project is named after: one working set per question, moved as little as needed.

Every block that has rows, in the cache or in the host pool, competes for the budget with what it is
worth anyway and what it has to do with the question. Winners that are out come in, losers that are
in go out, saved first. With `recovers` off it is the control arm: losers are gone.
"""

from __future__ import annotations

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policy import moves
from evoke_proxy.core.policy.again import gone_on_with
from evoke_proxy.core.policy.asking import about, by_text
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.policy.score import Scores, keep_scores
from evoke_proxy.core.policy.working_set import Candidates, WorkingSet, choose
from evoke_proxy.core.retrieval.query import Query

# Of a long turn so much of both ends is looked up to rank its own text, of which all of it would be
# a part.
_FOCUS_CHARS = 300


def choice(view: PolicyView, question: Query, config: PolicyConfig, recovers: bool) -> moves.Choice:
    """What each block is worth for the question, and the best that fits."""

    # What has just come back stays, for a turn, unless another is that much better.
    lately = view.recovered if view.recovered is not None else False
    margin = config.margin * (1.0 + np.where(lately, 1.0, 0.0))

    def select(given: Candidates, values: Scores, capacity: int | None) -> WorkingSet:
        return choose(given, values, capacity, margin)

    kept = keep_scores(view, config)
    again = gone_on_with(view, question, config) if by_text(config) else None

    def worth(asked: Query) -> Scores:
        relevance = about(view, asked, config)
        if again is not None:
            relevance[again] = 1.0
        rounded: Scores = (kept + config.weight_relevance * relevance).round(9)
        return rounded  # sums in another order must not make another plan

    values = worth(question)
    # What the turn's own blocks are worth beside each other, once decoding starts.
    has_tail = len(view.blocks) and view.blocks.starts[-1] >= (view.adopt_to or view.n_past)
    ranked = config.budget is not None and has_tail
    narrow = question.narrowed(_FOCUS_CHARS) if ranked else question
    tail = values if narrow is question else worth(narrow)
    return moves.Choice(values, tail, select, recovers, keeps_earlier=True)
