"""Policies that look at nothing but age: the newest blocks stay, what is evicted is gone.

`streaming` is StreamingLLM (Xiao et al., "Efficient Streaming Language Models with Attention
Sinks", ICLR 2024, arXiv:2309.17453): the first `start` tokens as attention sinks and the last
`recent` ones, published with start 4 and recent 512 to 2000. Here `start` is `policy.sink_tokens`
and `recent` whatever else the budget has room for, in whole blocks; positions are those of the
text, where the original counts them inside the cache. `recency` is the same without sinks, the
window attention that the paper compares itself with.
"""

from __future__ import annotations

import numpy as np

from evoke_proxy.core.model.block_table import Mask
from evoke_proxy.core.policy import moves
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.policy.score import Scores
from evoke_proxy.core.policy.working_set import Candidates, WorkingSet, filled


def choice(view: PolicyView) -> moves.Choice:
    """A window over the newest blocks; sinks are there as far as the plan is made with any."""
    ages = by_age(view)
    return moves.Choice(ages, ages, _newest, recovers=False)


def by_age(view: PolicyView) -> Scores:
    """One value in (0, 1] a block, in their order: the newer the higher."""
    ages: Scores = view.blocks.ends / max(1, view.n_tokens)
    return ages


def newest(given: Candidates, wanted: Mask, room: int) -> Mask:
    """Of the blocks wanted, the newest as far as they fit: no older one once one has not."""
    fitting = np.zeros(len(wanted), np.bool_)
    indexes = np.flatnonzero(wanted)[::-1]
    fitting[indexes[given.lengths[indexes].cumsum() <= room]] = True
    return fitting


def _newest(given: Candidates, _: Scores, capacity: int | None) -> WorkingSet:
    return filled(given, capacity, lambda room: newest(given, given.resident & ~given.must, room))
