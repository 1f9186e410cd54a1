"""The policy the project is named after: one working set per question, moved as little as needed.

Every block that has rows, in the cache or in the host pool, competes for the budget with what it is
worth anyway and what it has to do with the question. Winners that are out come in, losers that are
in go out, saved first. With `recovers` off it is the control arm: losers are gone.
"""

from __future__ import annotations

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policies import moves
from evoke_proxy.core.policies.working_set import Candidates, WorkingSet, choose
from evoke_proxy.core.policy_view import PolicyView
from evoke_proxy.core.question import Question
from evoke_proxy.core.score import Scores, keep_scores

_RELEVANCE = 2.0
# What a long turn is about stands at its beginning or at its end; so much of both is looked up,
# and so much to rank the turn's own text, of which all of it would be a part.
_QUERY_CHARS = 2048
_FOCUS_CHARS = 300


def choice(
    view: PolicyView, question: Question, config: PolicyConfig, recovers: bool
) -> moves.Choice:
    """What each block is worth for the question, and the best that fits."""

    def select(given: Candidates, values: Scores, capacity: int | None) -> WorkingSet:
        return choose(given, values, capacity, config.margin)

    values = _values(view, question, config)
    tail = _tail_values(view, question, config, values)
    return moves.Choice(values, tail, select, recovers)


def _values(view: PolicyView, question: Question, config: PolicyConfig) -> Scores:
    keep = keep_scores(view, config.sink_tokens)
    asked = question.narrowed(_QUERY_CHARS)
    values = keep + _RELEVANCE * view.index.relevance(asked, view.blocks)
    rounded: Scores = values.round(9)  # sums in another order must not make another plan
    return rounded


def _tail_values(
    view: PolicyView, question: Question, config: PolicyConfig, values: Scores
) -> Scores:
    """What the turn's own blocks are worth beside each other, once decoding starts."""
    has_tail = len(view.blocks) and view.blocks.starts[-1] >= (view.adopt_to or view.n_past)
    if config.budget is None or not has_tail or len(question.text) <= 2 * _FOCUS_CHARS:
        return values
    return _values(view, question.narrowed(_FOCUS_CHARS), config)
