"""Chooses the lost blocks that are decoded again before a turn, and the steps that do it.

Host memory and disk may lose copies. A slot can adopt the copies after a lost block: their rows do
not depend on where it is. A lost block that the turn would have recovered is decoded again, beside
the rows before it that the turn recovers; the others are omitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import ROLES, BlockTable, Mask
from evoke_proxy.core.model.blocks import Block, Role, count
from evoke_proxy.core.model.plan import Adopt, DecodeBudget, Plan, Save
from evoke_proxy.core.policy.planner import required_blocks
from evoke_proxy.core.policy.registry import decide
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.query import Query

_USER = ROLES.index(Role.USER)
# Each step adopts the blocks before it anew.
_MAX_STEPS = 8
# Decoding lost blocks saves at least so many tokens, where the alternative is to decode all text
# from the first of them on.
_MIN_SAVED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Refill:
    """One step: adopt blocks, then decode the text after them.

    Attributes:
        adopt: The rows that the decoding continues; None: it begins with the first token.
        blocks: The blocks to decode, without a gap.
    """

    adopt: Adopt | None
    blocks: tuple[Block, ...]

    def begin(self, stream: DecodeBudget) -> Plan:
        """Return the plan to run before the text is decoded."""
        return Plan(adopt=self.adopt, reuse=0 if self.adopt is None else None, stream=stream)

    @property
    def saves(self) -> Plan:
        """The plan to run after it: it makes copies of the blocks."""
        return Plan(saves=tuple(Save(block.label, block.span) for block in self.blocks))

    @property
    def end(self) -> int:
        """The end of the text to decode."""
        return self.blocks[-1].span.end

    @property
    def n_tokens(self) -> int:
        """Number of tokens to decode."""
        return self.end - self.blocks[0].span.start


def refills(
    view: PolicyView, query: Query, config: PolicyConfig, copies_end: int
) -> tuple[Refill, ...]:
    """Return the steps, by position, that decode lost blocks before `copies_end`.

    Decoded are those that a plan would adopt if they had copies, and what is between them where
    there would be too many steps. Within a budget, less than a block in all is decoded only where
    it must stay or has a whole message of the user. The rows of a step fit the budget and the
    cells; a step that does not is left out. Where all text before `copies_end` must be visible, no
    step is left out: there are none unless they decode less than everything from
    `view.decode_from` on.
    """
    blocks = view.blocks
    lost = ~view.in_pool & (blocks.ends <= copies_end)
    if not lost.any():
        return ()
    as_saved = replace(view, in_pool=view.in_pool | lost, adopt_to=copies_end)
    adopt = decide(as_saved, query, config).adopt
    if adopt is None:
        return ()
    chosen = blocks.labelled(frozenset(adopt.labels))
    wanted = chosen & lost
    runs = _joined(_runs(_with_predecessors(wanted, view.in_pool)), blocks)
    needs_all = view.decode_from < copies_end
    if needs_all and (~chosen & (blocks.ends <= copies_end)).any():
        return ()
    n_redecoded = sum(int(blocks.ends[end - 1] - blocks.starts[first]) for first, end in runs)
    if needs_all and copies_end - view.decode_from < n_redecoded + _MIN_SAVED_TOKENS:
        return ()
    must_stay = (wanted & required_blocks(as_saved, config.sink_tokens)).any()
    is_worth_it = must_stay or _has_message_of_user(blocks, wanted)
    if not needs_all and n_redecoded < config.block_tokens and not is_worth_it:
        return ()  # adopting the rows before them costs more than so few tokens are worth
    room = view.n_free + count(view.resident)
    room = room if config.budget is None else min(room, config.budget)
    steps = list[Refill]()
    available = chosen & view.in_pool
    for first, end in runs:
        start = int(blocks.starts[first])
        before = available & (blocks.ends <= start)
        if first:
            before[first - 1] = True
        n_rows = int(blocks.lengths[before].sum()) + int(blocks.ends[end - 1]) - start
        if n_rows > room or (first and not (view.in_pool | available)[first - 1]):
            if needs_all:
                return ()
            continue
        steps.append(Refill(_adopting(before, blocks), tuple(blocks[first:end])))
        available[first:end] = True
    return tuple(steps)


def _has_message_of_user(blocks: BlockTable, chosen: Mask) -> bool:
    """Return whether all blocks of a message of the user are chosen: it may state what is asked."""
    of_user = chosen & (blocks.authors == _USER)
    n_chosen = np.bincount(blocks.messages[of_user], minlength=int(blocks.messages.max()) + 1)
    n_blocks = np.bincount(blocks.messages, minlength=len(n_chosen))
    return bool((n_chosen[n_chosen > 0] == n_blocks[n_chosen > 0]).any())


def _adopting(chosen: Mask, blocks: BlockTable) -> Adopt | None:
    """Return what adopts these blocks [n]; None without any."""
    adopted = [blocks[i] for i in np.flatnonzero(chosen).tolist()]
    if not adopted:
        return None
    labels, spans = (block.label for block in adopted), (block.span for block in adopted)
    return Adopt(adopted[-1].span.end, tuple(labels), tuple(spans))


def _with_predecessors(wanted: Mask, in_pool: Mask) -> Mask:
    """Return the wanted blocks [n], and lost blocks directly before them.

    Decoding continues only after a block that has rows.
    """
    result = wanted.copy()
    for i in np.flatnonzero(wanted)[::-1].tolist():
        while i and not in_pool[i - 1] and not result[i - 1]:
            i -= 1
            result[i] = True
    return result


def _runs(wanted: Mask) -> list[tuple[int, int]]:
    """Return the ranges of adjacent wanted blocks."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], wanted, [0]]).astype(np.int8)))
    return [(first, end) for first, end in edges.reshape(-1, 2).tolist()]


def _joined(runs: list[tuple[int, int]], blocks: BlockTable) -> list[tuple[int, int]]:
    """Join ranges with the fewest tokens between them until there are few enough."""
    between = [
        int(blocks.starts[after[0]] - blocks.ends[before[1] - 1])
        for before, after in pairwise(runs)
    ]
    n_joined = max(0, len(runs) - _MAX_STEPS)
    shortest = set(sorted(range(len(between)), key=between.__getitem__)[:n_joined])
    joined = runs[:1]
    for i, run in enumerate(runs[1:]):
        if i in shortest:
            joined[-1] = joined[-1][0], run[1]
        else:
            joined.append(run)
    return joined
