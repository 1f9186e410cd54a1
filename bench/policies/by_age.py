"""Baselines that keep the newest blocks; evicted blocks are lost.

`streaming` is StreamingLLM (Xiao et al., "Efficient Streaming Language Models with Attention
Sinks", ICLR 2024, arXiv:2309.17453): the first `start` tokens as attention sinks and the last
`recent` ones, published with start 4 and recent 512 to 2000. Here `start` is `policy.sink_tokens`,
and `recent` is the rest of the budget in whole blocks. Positions are those of the text, where the
original counts them inside the cache. `recency` is the same without sinks: the window attention
that the paper compares with.
"""

from __future__ import annotations

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import FloatArray, Mask
from evoke_proxy.core.policy.planner import Candidates, Choice, WorkingSet, fill_capacity
from evoke_proxy.core.policy.registry import Policy, register
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.query import Query


def choose(view: PolicyView, _: Query, config: PolicyConfig) -> Choice:
    """Keep a window over the newest blocks."""
    ages = age_scores(view)
    return Choice(ages, ages, _select)


def age_scores(view: PolicyView) -> FloatArray:
    """Return one value in (0, 1] for each block [n]: the newer the higher."""
    ages: FloatArray = view.blocks.ends / max(1, view.n_tokens)
    return ages


def newest(candidates: Candidates, wanted: Mask, room: int) -> Mask:
    """Return the newest wanted blocks that fit, up to the first one that does not."""
    chosen = np.zeros(len(wanted), np.bool_)
    indexes = np.flatnonzero(wanted)[::-1]
    chosen[indexes[candidates.lengths[indexes].cumsum() <= room]] = True
    return chosen


def _select(candidates: Candidates, _: FloatArray, capacity: int | None) -> WorkingSet:
    optional = candidates.resident & ~candidates.required
    return fill_capacity(candidates, capacity, lambda room: newest(candidates, optional, room))


register(Policy(name="recency", choose=choose, keeps_sinks=False))
register(Policy(name="streaming", choose=choose))
