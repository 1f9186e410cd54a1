"""Quotes removed messages: text that the client has taken out of its conversation.

The text is decoded as a part of the newest message, and is not in the next request: its tokens
count as `decoded` in every turn that quotes it. Nothing is quoted without a question that finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role
from evoke_proxy.core.policy.planner import room_for_quotes
from evoke_proxy.core.policy.quotation import QuotedRequest, runs, with_note
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.units import Units

# Texts of consecutive blocks overlap by at most this many characters.
_MAX_OVERLAP_CHARS = 120
HEADING = "Quoted from earlier in this conversation, which is no longer complete:"
# Nothing is quoted below this confidence that the query finds something. A message is quoted when
# its relevance is at least this share of the best one's. In a conversation with 20 removed facts,
# questions with their words have a confidence of 1, one in other words has 0.42, and small talk
# at most 0.26.
_MIN_CONFIDENCE = 0.3
_MIN_SHARE_OF_BEST = 0.5
_MAX_PASSAGES = 8
# Quotations take at most this share of the budget.
_MAX_BUDGET_SHARE = 0.25
# Tokens of a passage in addition to those of its blocks, and of the heading.
_EXTRA_TOKENS, _HEADING_TOKENS = 16, 24
# The longest message that is quoted as a whole, as a share of the room.
_MAX_UNIT_SHARE = 0.5


def quotes_past(config: PolicyConfig) -> bool:
    """Return whether removed messages are kept and quoted."""
    return config.past == "quote"


def quote_past(turn: Turn, past: BlockTable, index: Index, body: bytes) -> QuotedRequest | None:
    """Add the removed messages that the query of a turn finds to its request; None without any.

    `past` are the blocks of removed messages, and `index` is that of these blocks.
    """
    if not len(past) or index.confidence(turn.query, past, len(past)) < _MIN_CONFIDENCE:
        return None
    most = room_for_quotes(turn.view, turn.config, _MAX_BUDGET_SHARE)
    room = min(turn.config.past_tokens, most) - _HEADING_TOKENS
    units = Units.of(past, max(1, int(_MAX_UNIT_SHARE * room)))
    relevance = units.maxima(index.relevance(turn.query, past))
    order = index.unit_order(turn.query, past, units, len(past))
    best = float(relevance.max())
    wanted = np.zeros(len(past), np.bool_)
    n_taken = 0
    for unit in order[relevance[order] >= _MIN_SHARE_OF_BEST * best].tolist():
        cost = int(units.lengths[unit]) + _EXTRA_TOKENS
        if cost <= room and n_taken < _MAX_PASSAGES:
            wanted[units.blocks_of(unit)] = True
            n_taken, room = n_taken + 1, room - cost
    blocks = past.pick(wanted)
    if not blocks:
        return None
    quoted = with_note(turn.request, body, _quotation(blocks), blocks)
    return replace(quoted, is_past=True) if quoted is not None else None


def _quotation(blocks: Sequence[Block]) -> str:
    """Return the text of these blocks in their order, each after its author or the tool's name."""
    parts = [HEADING]
    for run in runs(blocks):
        first = run[0]
        source = first.display_name.rpartition("#")[0] if first.role is Role.TOOL else first.role
        parts.append(f"{source}: {_joined([block.text for block in run])}")
    return "\n".join(parts) + "\n\n"


def _joined(texts: Sequence[str]) -> str:
    """Join texts of consecutive blocks, which may overlap, see `TextAlignment`."""
    joined = ""
    for text in texts:
        most = min(len(joined), len(text), _MAX_OVERLAP_CHARS)
        overlap = next((n for n in range(most, 0, -1) if joined.endswith(text[:n])), 0)
        joined += text[overlap:]
    return " ".join(joined.split())
