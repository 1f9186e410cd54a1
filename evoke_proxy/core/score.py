"""Keep-scores: how much a block is worth in the cache, whatever the question is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.block_table import ROLES
from evoke_proxy.core.blocks import Role
from evoke_proxy.core.policy_view import PolicyView

Scores = npt.NDArray[np.float64]

# Tokens after which recency has halved. It never reaches 0: far blocks still have an order.
_HALF_LIFE = 512
# What a role is worth at the far end of a long conversation; the rest of the way up is recency.
# People say things once, answers repeat them, tool output can be had again.
_FLOORS = {Role.SYSTEM: 0.8, Role.USER: 0.6, Role.ASSISTANT: 0.5, Role.TOOL: 0.0}
_FLOOR = np.array([_FLOORS[role] for role in ROLES])
_PREFERRED = 2.0


def keep_scores(view: PolicyView, sink_tokens: int) -> Scores:
    """One value in [0, 1] a block, in their order; sinks and pinned blocks have 1."""
    blocks = view.blocks
    recency = _HALF_LIFE / (_HALF_LIFE + view.n_tokens - blocks.ends)
    floors = _FLOOR[blocks.roles]
    worth = (floors + (1 - floors) * recency) * blocks.priority
    worth = np.minimum(1.0, worth * np.where(blocks.preferred, _PREFERRED, 1.0))
    scores: Scores = np.where(blocks.pinned | (blocks.starts < sink_tokens), 1.0, worth)
    return scores
