"""Policies that keep what the model has looked at, as llama-server has captured it; what is evicted
is gone, but with `arkvale`. Where nothing was captured yet, age decides.

`h2o`, heavy hitters (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of
Large Language Models", NeurIPS 2023, arXiv:2306.14048): the sum of all rows; half of the room for
the newest blocks, half for those with the largest sums. `snapkv` (Li et al., "SnapKV: LLM Knows
What You are Looking for Before Generation", NeurIPS 2024, arXiv:2404.14469): the mean of the last
32 rows, and a window of `policy.recent_tokens` over the newest. `tova` (Oren et al., "Transformers
are Multi-State RNNs", EMNLP 2024, arXiv:2401.06104): the last row alone, and no window. `scored`
keeps what was looked at last: a block was looked at in a turn when its tokens had more than the
mean of the attention, or were decoded in it.

`arkvale` (Chen et al., "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value
Eviction", NeurIPS 2024) saves what it evicts, and brings back what queries could look at most by
the bounds of its keys (`core/policy/key_bounds.py`), beside the window of `snapkv`. The queries
are those of the end of the prompt before: what was asked last, not what is asked now, which is not
decoded yet. The original asks at every step, for each head by itself.

What stands in for the originals: whole blocks by the mean of their tokens and of the captured
layers and heads, where those choose tokens head by head; one choice a turn, before it is decoded,
where those choose at every step or at the end of a prompt. Rows are those of generated tokens and
of the end of each piece of prompt, so sums lack most rows of the prompt.
"""

from __future__ import annotations

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import Mask
from evoke_proxy.core.policy import moves
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

# So little that it only tells blocks apart which were looked at alike.
_AGE = 1e-6


def choice(view: PolicyView, config: PolicyConfig, recovers: bool) -> moves.Choice:
    """The most looked at, or to be looked at, beside a window over the newest."""
    ages = by_age(view)
    values = _values(view, config) + _AGE * ages

    def select(given: Candidates, values: Scores, capacity: int | None) -> WorkingSet:
        def fill(room: int) -> Mask:
            rest = (given.resident | given.loadable) & ~given.must
            local = newest(given, rest & given.settled, _window(config, room))
            worth = values + np.where(given.settled, config.margin, 0.0)
            best = by_value(rest & ~local, worth, given.blocks)
            left = room - int(given.lengths[local].sum())
            return local | first_fit(best, given.lengths, left)

        return filled(given, capacity, fill)

    return moves.Choice(values, ages, select, recovers)


def _values(view: PolicyView, config: PolicyConfig) -> Scores:
    if config.name == "scored":
        last = view.blocks.turns if view.looked is None else view.looked
        return last.astype(np.float64)
    return np.zeros(len(view.blocks)) if view.attention is None else view.attention.round(9)


def _window(config: PolicyConfig, room: int) -> int:
    match config.name:
        case "h2o":
            return room // 2
        case "snapkv" | "arkvale":
            return min(room, config.recent_tokens)
    return 0
