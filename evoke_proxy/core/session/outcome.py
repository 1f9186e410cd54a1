"""What came of what a request asked for, as far as it is known before the answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from evoke_proxy.core.model.block_table import Mask, blocks_named, unknown_names
from evoke_proxy.core.model.blocks import Block
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.registry import recovers_text
from evoke_proxy.core.policy.turn import Turn


def outcome(turn: Turn, plan: Plan, quoted: Collection[Block]) -> dict[str, Any]:
    """What `usage.evoke` says beside the books.

    `as_text`: blocks quoted in the request, with the tokens they have where they stand, when that
    is how the turn recovers. `recover`, when the request names blocks: names that mean no block of
    the conversation, and those of which something is missing when the answer begins.
    """
    said: dict[str, Any] = {}
    if recovers_text(turn.config):
        tokens = sum(len(block.span) for block in quoted)
        said["as_text"] = {"blocks": len(quoted), "tokens": tokens}
    names = turn.request.tags.recover
    if names:
        blocks = turn.view.blocks
        strange = unknown_names(blocks, names)
        out = ~_there(turn, plan, quoted)
        missing = [name for name in names if (blocks_named(blocks, (name,)) & out).any()]
        said["recover"] = {"unknown": strange, "missing": missing}
    return said


def _there(turn: Turn, plan: Plan, quoted: Collection[Block]) -> Mask:
    """Which blocks the model sees: resident after the plan, decoded in this turn, or quoted."""
    view, cursor = turn.view, turn.view.n_past
    if plan.adopt is not None:
        kept, cursor = np.zeros(len(view.blocks), np.bool_), plan.adopt.n_tokens
    else:
        gone = frozenset(evict.label for evict in plan.evicts if evict.label is not None)
        kept = view.in_cache & ~view.blocks.labelled(gone)
    back = {load.label for load in plan.loads} | {block.label for block in quoted}
    back |= set(plan.adopt.labels if plan.adopt is not None else ())
    return kept | view.blocks.labelled(frozenset(back)) | (view.blocks.starts >= cursor)
