"""What blocks mean, as far as vectors say.

A block has a vector for each of its sentences: one of the whole is mostly about whatever else
stands there. In a ranking a block counts as its best sentence does.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.query import GAP

Scores = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_MAX_PIECES = 4
_SHORTEST = 24
_FIRST_ROWS = 64
# So many products of vectors are done at once; of more, only what looks best by the mean vector of
# each block is looked at piece by piece.
_ALL_PRODUCTS = 24_000
_LOOKED_AT = 600
# So many rows of 384 numbers stay in a core's own cache.
_ROWS_AT_ONCE = 256
# Of standard deviations above what blocks have in common with a question on average: at the first a
# block begins to be about it, at the second it is.
_BEGINS, _IS = 2.0, 6.0
# Less is how numbers are rounded.
_NO_SPREAD = 1e-6


def pieces(text: str) -> tuple[str, ...]:
    """At most 4 parts of a text, cut between sentences or lines: what is embedded of a block."""
    parts: list[str] = []
    for part in (part.strip() for part in GAP.split(text)):
        if parts and len(parts[-1]) < _SHORTEST:
            parts[-1] = f"{parts[-1]} {part}".strip()
        elif part:
            parts.append(part)
    while len(parts) > _MAX_PIECES:
        at = min(range(len(parts) - 1), key=lambda i: len(parts[i]) + len(parts[i + 1]))
        parts[at : at + 2] = [f"{parts[at]} {parts[at + 1]}"]
    return tuple(parts)


class VectorRows:
    """The vectors of numbered texts, float32: those of one text are rows beside each other."""

    def __init__(self) -> None:
        self._rows: Vectors = np.zeros((0, 0), np.float32)
        self._means: Vectors = np.zeros((0, 0), np.float32)
        self._used = 0
        self._owners = array("q")
        self._firsts = array("q")
        self._at: dict[int, int] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._at

    def put(self, number: int, vectors: Vectors) -> None:
        """Copy the unit vectors [k, d], k > 0, of a text that has none yet."""
        count, size = vectors.shape
        if size != self._rows.shape[1]:  # another encoder: nothing that is here compares with it
            self.__init__()  # type: ignore[misc]
        self._rows = _with_room(self._rows, self._used + count, size)
        self._means = _with_room(self._means, len(self._owners) + 1, size)
        self._rows[self._used : self._used + count] = vectors
        mean = vectors.mean(axis=0)
        self._means[len(self._owners)] = mean / max(float(np.linalg.norm(mean)), 1e-12)
        self._at[number] = len(self._owners)
        self._owners.append(number)
        self._firsts.append(self._used)
        self._used += count

    def get(self, number: int) -> Vectors:
        """The vectors of a text; KeyError when it has none."""
        at = self._at[number]
        ends = [*self._firsts[at + 1 : at + 2], self._used]
        return self._rows[self._firsts[at] : ends[0]]

    def cosines(self, vectors: Sequence[Vectors], size: int) -> Scores | None:
        """[n, size]: of each unit vector with the best piece of each of the first `size` texts, NaN
        where there is none; None when no text has a vector of that length."""
        if not self._owners or not vectors or vectors[0].shape[0] != self._rows.shape[1]:
            return None
        firsts, owners = np.array(self._firsts), np.array(self._owners)
        if self._used * len(vectors) <= _ALL_PRODUCTS:
            products = _products(self._rows[: self._used], vectors)
            nearest = [np.maximum.reduceat(one, firsts) for one in products]
        else:
            nearest = self._looked(vectors, firsts)
        found = np.full((len(vectors), size), np.nan)
        for line, near in zip(found, nearest, strict=True):
            line[owners] = near
        return found

    def _looked(self, vectors: Sequence[Vectors], firsts: Numbers) -> list[Vectors]:
        """What each vector has in common with the mean of each text, and of so many of the highest
        with the best piece."""
        nearest = list(_products(self._means[: len(firsts)], vectors))
        behind = max(0, len(firsts) - _LOOKED_AT // len(vectors))
        counts = np.diff(firsts, append=self._used)
        for vector, near in zip(vectors, nearest, strict=True):
            chosen = np.sort(np.argpartition(near, behind)[behind:])
            count = counts[chosen]
            ends = count.cumsum()
            starts = ends - count
            rows = np.arange(ends[-1]) + np.repeat(firsts[chosen] - starts, count)
            # There is no row that is not there: nothing is ever clipped, and nothing is checked.
            near[chosen] = np.maximum.reduceat(
                self._rows.take(rows, axis=0, mode="clip") @ vector, starts
            )
        return nearest

    def topical(self, topic: Vectors, size: int) -> Scores | None:
        """[size]: of a unit vector with the mean of each text; as `cosines` otherwise."""
        if not self._owners or topic.shape[0] != self._rows.shape[1]:
            return None
        found = np.full(size, np.nan)
        found[np.array(self._owners)] = self._means[: len(self._owners)] @ topic
        return found


def _products(rows: Vectors, vectors: Sequence[Vectors]) -> Vectors:
    """[n, k]: each of n vectors times each of k rows, which are read from memory once."""
    found = np.empty((len(vectors), len(rows)), np.float32)
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[at : at + _ROWS_AT_ONCE]
        for line, vector in zip(found, vectors, strict=True):
            np.dot(part, vector, out=line[at : at + _ROWS_AT_ONCE])
    return found


def standing_out(cosines: Scores) -> Scores:
    """How far each of these cosines stands out among them, in [0, 1]; 0 where there is none.

    Encoders differ in what two unrelated texts have in common: only the session's own blocks say
    what is much.
    """
    known, total = cosines, float(cosines.sum())
    if math.isnan(total):
        known = cosines[~np.isnan(cosines)]
        total = float(known.sum())
    count = max(1, len(known))
    mean = total / count
    spread = math.sqrt(max(0.0, float(known @ known) / count - mean * mean))
    found = np.zeros(len(cosines))
    if spread > _NO_SPREAD:
        begins = mean + _BEGINS * spread
        above = np.flatnonzero(cosines > begins)  # no number is not above
        found[above] = np.minimum(1.0, (cosines[above] - begins) / ((_IS - _BEGINS) * spread))
    return found


def _with_room(rows: Vectors, count: int, size: int) -> Vectors:
    """The same rows, or a copy with more of them, so that there are at least `count`."""
    if count <= len(rows):
        return rows
    more = np.zeros((max(_FIRST_ROWS, 2 * len(rows), count), size), np.float32)
    more[: len(rows), : rows.shape[1]] = rows
    return more
