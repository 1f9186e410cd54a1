"""Baselines that keep the blocks that the model attended to, as llama-server captured it.

Evicted blocks are lost, except with `arkvale`. While nothing was captured, age decides.

`h2o`, heavy hitters (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of
Large Language Models", NeurIPS 2023, arXiv:2306.14048): the sum of all rows; half of the room for
the newest blocks, half for those with the largest sums. `snapkv` (Li et al., "SnapKV: LLM Knows
What You are Looking for Before Generation", NeurIPS 2024, arXiv:2404.14469): the mean of the last
32 rows, and a window of `policy.recent_tokens` over the newest. `tova` (Oren et al., "Transformers
are Multi-State RNNs", EMNLP 2024, arXiv:2401.06104): the last row alone, and no window. `scored`
keeps the blocks that were attended to last: those whose tokens had more than the mean of the
attention in a turn, or were decoded in it.

`arkvale` (Chen et al., "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value
Eviction", NeurIPS 2024) saves what it evicts, and loads the blocks that queries could attend to
most by the bounds of their keys (`policy.attention.KeyBounds`), beside the window of `snapkv`. The
queries are those of the end of the previous prompt: what was asked last, not what is asked now,
which is not decoded yet. The original asks at every step, for each head separately.

Differences from the originals: whole blocks by the mean of their tokens and of the captured layers
and heads, where the originals choose tokens for each head; one choice a turn, before it is decoded,
where they choose at every step or at the end of a prompt. Rows are those of generated tokens and of
the end of each part of a prompt, so that sums lack most rows of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bench.policies.by_age import age_scores, newest
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import FloatArray, Mask
from evoke_proxy.core.policy.attention import Capture
from evoke_proxy.core.policy.planner import (
    Candidates,
    Choice,
    WorkingSet,
    by_score,
    fill_capacity,
    first_fit,
)
from evoke_proxy.core.policy.registry import Choose, Policy, register
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.query import Query

# Orders blocks with equal attention by age, and nothing else.
_AGE_WEIGHT = 1e-6
# How much more a block must have than one that is already in place.
_MARGIN = 0.1

Window = Callable[[PolicyConfig, int], int]


def attention_scores(view: PolicyView) -> FloatArray:
    """Return the share of attention that each block [n] got last; 0 while none was captured."""
    return np.zeros(len(view.blocks)) if view.attention is None else view.attention.round(9)


def last_turn_scores(view: PolicyView) -> FloatArray:
    """Return the turn in which each block [n] was last attended to, or else was cut."""
    turns = view.blocks.turns if view.last_attended is None else view.last_attended
    return turns.astype(np.float64)


def choice(scored: Callable[[PolicyView], FloatArray], window: Window) -> Choose:
    """Return a choice of the blocks with the highest scores beside a window over the newest."""

    def choose(view: PolicyView, _: Query, config: PolicyConfig) -> Choice:
        ages = age_scores(view)

        def select(candidates: Candidates, scores: FloatArray, capacity: int | None) -> WorkingSet:
            def fill(room: int) -> Mask:
                in_place = candidates.optional & candidates.was_resident
                local = newest(candidates, in_place, window(config, room))
                adjusted = scores + np.where(candidates.was_resident, _MARGIN, 0.0)
                best = by_score(candidates.optional & ~local, adjusted, candidates.blocks)
                remaining = room - int(candidates.lengths[local].sum())
                return local | first_fit(best, candidates.lengths, remaining)

            return fill_capacity(candidates, capacity, fill)

        return Choice(scored(view) + _AGE_WEIGHT * ages, ages, select)

    return choose


def _half(_: PolicyConfig, room: int) -> int:
    return room // 2


def _recent(config: PolicyConfig, room: int) -> int:
    return min(room, config.recent_tokens)


def _none(_: PolicyConfig, room: int) -> int:
    return 0


register(Policy(name="h2o", choose=choice(attention_scores, _half), capture=Capture("sum")))
register(Policy(name="snapkv", choose=choice(attention_scores, _recent), capture=Capture("snapkv")))
register(
    Policy(name="tova", choose=choice(attention_scores, _none), capture=Capture("ewma", decay=0.0))
)
register(Policy(name="scored", choose=choice(last_turn_scores, _none), capture=Capture("ewma")))
register(
    Policy(
        name="arkvale",
        choose=choice(attention_scores, _recent),
        saves_evicted=True,
        capture=Capture("ewma", queries=16, read="queries"),
    )
)
