"""Keep-scores: how much a block is worth in the cache, whatever the question is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.blocks import Block, Role
from evoke_proxy.core.policy_view import PolicyView

Scores = npt.NDArray[np.float64]

# Tokens after which recency has halved. It never reaches 0: far blocks still have an order.
_HALF_LIFE = 512
# What a role is worth at the far end of a long conversation; the rest of the way up is recency.
# People say things once, answers repeat them, tool output can be had again.
_FLOORS = {Role.SYSTEM: 0.8, Role.USER: 0.6, Role.ASSISTANT: 0.5, Role.TOOL: 0.0}
_PREFERRED = 2.0


def keep_scores(view: PolicyView, sink_tokens: int) -> Scores:
    """One value in [0, 1] a block, in their order; sinks and pinned blocks have 1."""
    scores = [_score(block, view.n_tokens, sink_tokens) for block in view.blocks]
    return np.array(scores, dtype=np.float64)


def _score(block: Block, n_tokens: int, sink_tokens: int) -> float:
    if block.pinned or block.span.start < sink_tokens:
        return 1.0
    recency = _HALF_LIFE / (_HALF_LIFE + n_tokens - block.span.end)
    floor = _FLOORS[block.role]
    worth = floor + (1 - floor) * recency
    return min(1.0, worth * block.priority * (_PREFERRED if block.preferred else 1.0))
