"""Files that a turn goes on with: what the prompt shows of them is wanted whole.

Retrieval ranks blocks by what is said, which of a file of many lines is next to nothing. That a
tool was called with its path says that all of it matters: for an edit, and to tell what is new in
another reading.
"""

from __future__ import annotations

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import ROLES, Mask, Positions
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.policy.moves import room_for
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.retrieval.query import Query

# What is left over is for whatever else the turn needs.
_MOST = 0.5


def gone_on_with(view: PolicyView, question: Query, config: PolicyConfig) -> Mask:
    """The blocks of the latest reading of each file that the turn's tools were called with, and of
    what was said and done about it since, the latest first; each message of them whole or not at
    all, and together no more than half of the room for blocks."""
    wanted = np.zeros(len(view.blocks), np.bool_)
    room = room_for(view.tail, view.max_tokens, config)
    left = view.n_tokens if room is None else int(_MOST * room)
    for path in question.files:
        found = view.index.named(path, view.blocks, view.own)
        for message in _since_reading(view, found):
            whole = found[view.blocks.messages[found] == message]
            length = int(view.blocks.lengths[whole].sum())
            if length <= left:
                wanted[whole] = True
                left -= length
    return wanted


def _since_reading(view: PolicyView, found: Positions) -> list[int]:
    """Of the messages of a file's blocks its latest reading, then those since, the latest first.

    A reading is a result of a tool that is at least half as long as the longest: what an edit
    returns is short beside it.
    """
    blocks = view.blocks
    results = found[blocks.roles[found] == ROLES.index(Role.TOOL)]
    if not len(results):
        return []
    lengths = np.bincount(blocks.messages[results], blocks.lengths[results])
    reading = int(np.flatnonzero(2 * lengths >= lengths.max())[-1])
    messages = np.unique(blocks.messages[found])
    return [reading, *messages[messages > reading][::-1].tolist()]
