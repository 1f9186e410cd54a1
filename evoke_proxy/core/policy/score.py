"""Keep-scores: how much a block is worth in the cache, whatever the question is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import ROLES
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.policy.policy_view import PolicyView

Scores = npt.NDArray[np.float64]

# Tokens after which recency has halved. It never reaches 0: far blocks still have an order.
_HALF_LIFE = 512
# What came before a task that the client has begun anew is as far away as if so much had been said.
_BOUNDARY = 8 * _HALF_LIFE
# What a role is worth at the far end of a long conversation; the rest of the way up are signals.
# People say things once, answers repeat them, tool output can be had again.
_FLOORS = {Role.SYSTEM: 0.8, Role.USER: 0.6, Role.ASSISTANT: 0.5, Role.TOOL: 0.0}
_FLOOR = np.array([_FLOORS[role] for role in ROLES])
_PREFERRED = 2.0


def keep_scores(view: PolicyView, config: PolicyConfig) -> Scores:
    """One value in [0, 1] a block, in their order; sinks and pinned blocks have 1.

    From its role's floor up a block is worth the mean of the signals there are, weighted as
    configured: recency; focus, (cos + 1) / 2 of its vector with the task's, 0.5 without a vector;
    attention. Priority and preference multiply that.
    """
    blocks = view.blocks
    floors = _FLOOR[blocks.roles]
    worth = (floors + (1 - floors) * _signals(view, config)) * blocks.priority
    worth = np.minimum(1.0, worth * np.where(blocks.preferred, _PREFERRED, 1.0))
    scores: Scores = np.where(blocks.pinned | (blocks.starts < config.sink_tokens), 1.0, worth)
    return scores


def _signals(view: PolicyView, config: PolicyConfig) -> Scores:
    """The weighted mean of the signals, in [0, 1]; 0 when all of them are off."""
    focus = None
    if config.weight_focus > 0:
        focus = view.index.topic_similarity(view.task.focus, view.blocks)
    weighted = (
        (config.weight_recency, _recency(view)),
        (config.weight_focus, focus),
        (config.weight_attention, view.attention),
    )
    total, weights = np.zeros(len(view.blocks)), 0.0
    for weight, signal in weighted:
        if signal is not None:
            total += weight * signal
            weights += weight
    return total / weights if weights > 0 else total


def _recency(view: PolicyView) -> Scores:
    ends = view.blocks.ends
    distance = view.n_tokens - ends + np.where(ends <= view.task.begins, _BOUNDARY, 0)
    recency: Scores = _HALF_LIFE / (_HALF_LIFE + distance)
    return recency
