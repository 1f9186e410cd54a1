"""Fuses several rankings of the same units into one order.

Scores of different signals are standardized and added (z-score fusion: Montague and Aslam,
"Relevance Score Normalization for Metasearch", 2001). Rankings of different questions are
interleaved, so that each question gets its share of the room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evoke_proxy.core.model.block_table import FloatArray, Positions

# A smaller spread of scores is a rounding error.
_MIN_SPREAD = 1e-9


def standardized(scores: FloatArray) -> FloatArray:
    """Return rows of scores [..., u], each with mean 0 and standard deviation 1.

    A row of equal scores becomes 0.
    """
    n = scores.shape[-1]
    if not n:
        return scores
    centred = scores - np.add.reduce(scores, axis=-1, keepdims=True) / n
    spreads = [math.sqrt(row @ row / n) for row in centred.reshape(-1, n)]
    # Divided by infinity, the scores of a row without a spread are 0.
    divisors = [spread if spread > _MIN_SPREAD else math.inf for spread in spreads]
    scaled: FloatArray = centred / np.reshape(divisors, (*scores.shape[:-1], 1))
    return scaled


def with_neighbours(
    values: FloatArray, shares: Sequence[float], linked: Positions | None = None
) -> FloatArray:
    """Add to each of values [..., u] the given shares of the values of its neighbours.

    `shares[0]` applies to the units directly before and after, `shares[1]` to the next ones.
    `linked` has the ascending indexes of units that pass over all others: their neighbours are the
    linked units before and after. The neighbours of the others are those directly beside them.
    Without `linked` these are the neighbours of all.
    """
    smoothed: FloatArray = values.copy()
    for distance, share in enumerate(shares, 1):
        smoothed[..., distance:] += share * values[..., :-distance]
        smoothed[..., :-distance] += share * values[..., distance:]
    if linked is not None and len(linked) < values.shape[-1]:
        smoothed[..., linked] = with_neighbours(values[..., linked], shares)
    return smoothed


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """One ranking among several that share a budget.

    Attributes:
        order: Indexes of the ranked units, best first.
        weight: How many tokens this ranking gets for each token of a ranking of weight 1.
        after: How many tokens the other rankings get first.
    """

    order: Positions
    weight: float = 1.0
    after: int = 0


def interleaved(rankings: Sequence[Ranking], lengths: Positions) -> Positions:
    """Return the units of all rankings, each once, so that each ranking gets its share of tokens.

    Units are ordered by the tokens of their ranking up to and including the unit, divided by the
    ranking's weight. `lengths` [u] are the tokens of the units. Of equal ones the earlier ranking
    comes first. A unit in several rankings is placed where it comes first.
    """
    if not rankings:
        return np.zeros(0, np.int64)
    if len(rankings) == 1:
        return rankings[0].order
    units = np.concatenate([ranking.order for ranking in rankings])
    spent = [each.after + lengths[each.order].cumsum() / each.weight for each in rankings]
    merged = units[np.argsort(np.concatenate(spent), kind="stable")]
    # The last write wins, so that writing in reversed order leaves the first position of each unit.
    first = np.zeros(len(lengths), np.int64)
    first[merged[::-1]] = np.arange(len(merged))[::-1]
    order: Positions = merged[first[merged] == np.arange(len(merged))]
    return order
