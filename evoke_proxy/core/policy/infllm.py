"""InfLLM on blocks: sinks, a local window, and the K blocks that have most to do with the question.

After Xiao et al., "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient
Context Memory" (NeurIPS 2024, arXiv:2402.04617), published with blocks of 128 tokens, 128 initial
and 4096 local tokens and 16 blocks a look-up. Here blocks are `policy.block_tokens`, the initial
tokens `policy.sink_tokens`, K is `policy.infllm_blocks` (8), and the window takes what the budget
has left, a quarter of it at least.

What stands in for the original: it finds blocks by the mean of their representative keys, per
layer and at every step, and moves all of them to one far position. Here one look-up a turn ranks
blocks by their text, as for `evoke`, and rows come back to their own positions.
"""

from __future__ import annotations

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import Mask
from evoke_proxy.core.policy import moves
from evoke_proxy.core.policy.asking import about
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.policy.score import Scores
from evoke_proxy.core.policy.window import by_age, newest
from evoke_proxy.core.policy.working_set import (
    Candidates,
    WorkingSet,
    by_value,
    filled,
    first_fit,
)
from evoke_proxy.core.retrieval.query import Query

_MIN_WINDOW_SHARE = 4
# So little that it only tells blocks apart which have nothing to do with the question.
_AGE = 1e-6


def choice(view: PolicyView, question: Query, config: PolicyConfig, recovers: bool) -> moves.Choice:
    """The blocks of one look-up beside a window over the newest."""

    def select(given: Candidates, values: Scores, capacity: int | None) -> WorkingSet:
        return _select(given, values, capacity, config.infllm_blocks)

    relevance = about(view, question, config)
    values = relevance.round(9) + _AGE * by_age(view)
    return moves.Choice(values, values, select, recovers, keeps_earlier=True)


def _select(given: Candidates, values: Scores, capacity: int | None, k: int) -> WorkingSet:
    def fill(room: int) -> Mask:
        rest = (given.resident | given.loadable) & ~given.must
        local = newest(given, rest, room // _MIN_WINDOW_SHARE)
        best = by_value(rest & ~local & (values > _AGE), values, given.blocks)[:k]
        found = first_fit(best, given.lengths, room - int(given.lengths[local].sum()))
        return found | newest(given, rest & ~found, room - int(given.lengths[found].sum()))

    return filled(given, capacity, fill)
