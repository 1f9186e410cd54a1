"""Statistics of all benches: repeats, shares of questions and their intervals, McNemar's test.

Questions of one session are not independent, so every interval allows for it:

* a share: Wilson's interval for n / deff questions. deff is the variance of the ratio estimator
  over sessions (Cochran, "Sampling Techniques", 1977, 6.4) over that of n independent questions,
  and at least 1. Where all answers are right, or all wrong, or of one session, it cannot be
  estimated: then deff is its largest value, questions by session, as if each session were one
  observation.
* a share of the ceiling: the same over the questions that the ceiling answered. Where an arm also
  answered others, the share is a ratio that may be over 1; then percentiles of a bootstrap that
  draws whole sessions (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, 8).
* with or without: McNemar's exact test on the questions that only one of two arms got right
* a paired difference: percentiles of a bootstrap that draws whole conversations
* a slope: the median of the slopes of all pairs of points (Theil and Sen), and a bootstrap that
  draws whole blocks of the residuals (Kuensch, "The Jackknife and the Bootstrap for General
  Stationary Observations", 1989), because neighbours are alike
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Name = TypeVar("Name")
Value = TypeVar("Value")
_DRAWS, _SLOPE_DRAWS, _PAIRED_DRAWS = 4000, 1000, 2000
_FEWEST_CONVERSATIONS = 3
Floats = npt.NDArray[np.float64]
_Z = 1.96


def wilson(share: float, n: float, z: float = _Z) -> tuple[float, float]:
    """Wilson's score interval of a share of `n` independent questions; `n` may be a fraction."""
    spread = z * z / n
    centre = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread))


def design_effect(right: Sequence[int], asked: Sequence[int]) -> float:
    """How many times the variance of independent questions that of sessions is, at least 1.

    One number a session: how many were right, how many were asked.
    """
    n, k = sum(asked), len(asked)
    share = sum(right) / n
    if k < 2 or not 0 < share < 1:
        return n / k
    residuals = sum((x - share * m) ** 2 for x, m in zip(right, asked, strict=True))
    return max(1.0, k / (k - 1) * residuals / n / (share * (1 - share)))


def clustered(right: Sequence[int], asked: Sequence[int]) -> tuple[float, float]:
    """The 95 % interval of the share of right answers."""
    n = sum(asked)
    return wilson(sum(right) / n, n / design_effect(right, asked))


def share_interval(
    kept: Sequence[int], gained: Sequence[int], ceiling: Sequence[int], seed: int = 0
) -> tuple[float, float] | None:
    """The 95 % interval of sum(kept + gained) / sum(ceiling), one number a session each.

    `kept` of the `ceiling` questions that the ceiling answered were answered, and `gained` others.
    None when the ceiling answered nothing.
    """
    if not sum(ceiling):
        return None
    if not sum(gained):
        asked = [(x, m) for x, m in zip(kept, ceiling, strict=True) if m]
        return clustered([x for x, _ in asked], [m for _, m in asked])
    random = np.random.default_rng(seed)
    drawn = random.integers(0, len(kept), (_DRAWS, len(kept)))
    above = (np.asarray(kept) + np.asarray(gained))[drawn].sum(axis=1)
    below = np.asarray(ceiling)[drawn].sum(axis=1)
    low, high = np.percentile(above[below > 0] / below[below > 0], [2.5, 97.5])
    return float(low), float(high)


def mcnemar(lost: int, gained: int) -> float:
    """The two-sided exact probability of so uneven a split if both arms were alike."""
    n = lost + gained
    tail = sum(math.comb(n, i) for i in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / float(2**n))


def share_of(right: int, total: int) -> dict[str, Any]:
    """Return `n`, `right`, `share` and Wilson's interval of independent questions."""
    share = right / total
    interval = [round(edge, 4) for edge in wilson(share, total)]
    return {"n": total, "right": right, "share": share, "interval_95": interval}


def in_turn(
    arms: Mapping[Name, Callable[[], Value]], rounds: int, warm_up: int = 1
) -> dict[Name, list[Value]]:
    """Measure each arm once a round, one after the other in an order that rotates.

    Returns what each returned, one for each round; `warm_up` more rounds come first and are not
    counted.
    """
    found: dict[Name, list[Value]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            value = arms[name]()
            if number >= 0:
                found[name].append(value)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum of repeats."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that this percentage of the others does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def difference_of_shares(sums: Floats, sizes: Floats) -> dict[str, float]:
    """Return by how many points the share with something is larger, with its 95 % interval.

    `sums` and `sizes` [conversations, 2] are how many were right and how many were asked in each
    conversation, without it and with it.
    """
    n = len(sums)
    drawn = np.random.default_rng(1).integers(0, n, (_PAIRED_DRAWS, n))
    shares = 100.0 * sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(shares[:, 1] - shares[:, 0], [2.5, 97.5])
    without, with_it = (100.0 * sums.sum(axis=0) / sizes.sum(axis=0)).tolist()
    found = {"points": with_it - without, "low": low, "high": high}
    return {name: round(float(value), 1) for name, value in found.items()}


def theil_sen(x: Floats, y: Floats) -> float:
    """Return the median of the slopes of all pairs of points."""
    first, second = np.triu_indices(len(x), 1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def slope(points: Sequence[tuple[float, float]], block: int) -> dict[str, float]:
    """Return `median` of the values, and `slope` with its 95 % interval, `low` and `high`.

    `block` is the number of neighbouring points that are drawn together.
    """
    x, y = np.array(points, np.float64).T
    steepness, size = theil_sen(x, y), min(block, len(x))
    line = float(np.median(y - steepness * x)) + steepness * x
    chance, drawn = np.random.default_rng(1), list[float]()
    for _ in range(_SLOPE_DRAWS):
        starts = chance.integers(0, len(x) - size + 1, -(-len(x) // size))
        noise = np.concatenate([(y - line)[start : start + size] for start in starts])[: len(x)]
        drawn.append(theil_sen(x, line + noise))
    low, high = np.percentile(drawn, [2.5, 97.5])
    found = {"median": np.median(y), "slope": steepness, "low": low, "high": high}
    return {name: round(float(value), 3) for name, value in found.items()}


def percent(values: Iterable[float]) -> float:
    """Return the mean as a percentage, to one decimal."""
    listed = list(values)
    return round(100 * sum(listed) / len(listed), 1)


def paired_difference(
    rows: Sequence[Mapping[str, Any]], arm: str, other: str
) -> dict[str, float | None]:
    """Return by how many points one arm has all evidence more often, with its 95 % interval.

    `low` and `high` are None for fewer than 3 conversations.
    """
    of = {(r["conversation"], r["question"], r["arm"]): int(r["whole"]) for r in rows}
    by_talk: dict[str, list[tuple[int, int]]] = {}
    for conversation, question, name in of:
        if name == arm:
            pair = of[conversation, question, other], of[conversation, question, arm]
            by_talk.setdefault(conversation, []).append(pair)
    sums = np.array([np.sum(pairs, axis=0) for pairs in by_talk.values()], np.float64)
    sizes = np.array([[len(pairs)] * 2 for pairs in by_talk.values()], np.float64)
    found: dict[str, float | None] = {**difference_of_shares(sums, sizes)}
    return found if len(sums) >= _FEWEST_CONVERSATIONS else found | {"low": None, "high": None}
