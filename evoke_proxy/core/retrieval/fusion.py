"""Several rankings of the same blocks as one: of the signals of a clause, and of the clauses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]
Order = npt.NDArray[np.int64]

# Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank
# Learning Methods" (2009).
_K = 60
# So many of each ranking count; nothing behind them ever fits a budget.
_DEPTH = 128
# Blocks of which a clause says nearly the same, and how many of them a budget has room for.
_ALIKE, _FEW = 0.75, 4
# Of questions in quite other words so many have their block among the few that an encoder puts
# first (bench.retrieval): what stands out by meaning alone is no surer than that.
_BY_MEANING = 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Clause:
    """What one clause makes of the blocks: their order, and how much speaks for each; more than 1
    counts as 1, and of that `share`. `said` is what speaks for each besides meaning."""

    order: Order
    evidence: Scores
    share: float = 1.0
    said: Scores | None = None

    def sureness(self, own: int) -> float:
        """How sure it is of the best of the blocks before `own`, 0 to 1."""
        both = _sureness(self.evidence[:own])
        return both if self.said is None else max(_sureness(self.said[:own]), _BY_MEANING * both)


def with_sought(clauses: list[Clause], sought: Scores | None) -> list[Clause]:
    """The clauses with what the model looks for: fused with the only one, else one of its own."""
    if sought is None:
        return clauses
    evidence = by_rank(sought, sought)
    if len(clauses) == 1:
        total = clauses[0].share * np.minimum(clauses[0].evidence, 1.0) + evidence
        return [Clause(ranked(total), total)]
    return [Clause(ranked(evidence), evidence), *clauses]


def _sureness(evidence: Scores) -> float:
    """As much as speaks for the best, less when as much speaks for more blocks than a few. A word
    that many have says little about any of them."""
    best = float(evidence.max(initial=0.0))
    alike = int((evidence >= _ALIKE * best).sum())
    return min(1.0, best) * min(1.0, _FEW / max(1, alike))


def ranked(scores: Scores, depth: int = _DEPTH) -> Order:
    """Indexes of the highest scores above 0, best first; of equal ones the last comes first."""
    # The last first: a stable sort leaves equal ones as they are.
    positive = np.flatnonzero(scores > 0)[::-1]
    found = scores[positive]
    if len(found) > depth:
        among = found >= np.partition(found, len(found) - depth)[len(found) - depth]
        positive, found = positive[among], found[among]
    return positive[np.argsort(-found, kind="stable")[:depth]]


def by_rank(scores: Scores, worth: Scores) -> Scores:
    """What each score is worth times its reciprocal rank, (k + 1) / (k + rank): all of it for the
    best, nothing for what is not ranked.

    Equal scores share the rank of the first of them.
    """
    order = ranked(scores)
    falling = -scores[order]
    found = np.zeros(len(scores))
    found[order] = worth[order] * ((_K + 1) / (_K + 1 + np.searchsorted(falling, falling, "left")))
    return found


def in_turns(orders: Sequence[Order]) -> list[tuple[int, int]]:
    """The first of each order, then the second of each, and so on: pairs of index and order.

    What an order has taken is passed over by the others.
    """
    if len(orders) == 1:
        return [(i, 0) for i in orders[0][:_DEPTH].tolist()]
    taken: dict[int, int] = {}
    queues = [iter(order.tolist()) for order in orders]
    left = list(range(len(queues)))
    while left and len(taken) < _DEPTH:
        for which in list(left):
            for i in queues[which]:
                if i not in taken:
                    taken[i] = which
                    break
            else:
                left.remove(which)
    return list(taken.items())
