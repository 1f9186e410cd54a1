"""Vectors of the blocks of a session: similarity search, a bounded cache, and their file format.

A block has one vector for each of its chunks (`chunks_of`), because a single vector would mix the
topics of a block. A block ranks by its best chunk.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evoke_proxy.core.model.block_table import FloatArray, Mask, Positions
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.languages import SENTENCE_GAP

_MAX_CHUNKS = 4
# More parts of a text are joined in equal runs, because the search for the shortest neighbours
# takes time in proportion to the square of their number.
_MAX_PARTS = 64
# A block has a longer text only where its message has text that the template leaves out.
_MAX_BLOCK_CHARS = 32 * 1024
# A shorter chunk is joined with the next one. The vector of a short sentence such as "Let me know!"
# is close to many questions, and a block ranks by its best chunk.
_MIN_CHUNK_CHARS = 250
# Rows that a matrix of vectors has room for at first.
_INITIAL_ROWS = 64
# When a search needs at most _MAX_PRODUCTS dot products, all chunks are compared. Otherwise only
# those of the _MAX_COMPARED documents with the closest mean vectors are; the vectors of one search
# share this number.
_MAX_PRODUCTS = 24_000
_MAX_COMPARED = 600
# This many rows of 384 numbers stay in the cache of one processor core.
_ROWS_PER_STEP = 256
# Standard deviations above the mean cosine of the session, at which the score of an outlier rises
# from 0 and reaches 1.
_OUTLIER_MIN, _OUTLIER_MAX = 2.0, 6.0
# A smaller spread of cosines is a rounding error.
_MIN_SPREAD = 1e-6
# A smaller squared distance of a vector from the mean of a session's vectors is a rounding error.
_MIN_SQUARE = 1e-4
# Bytes of the key, the dictionary entry and the array header of one cached vector.
_ENTRY_BYTES = 320


def chunks_of(text: str) -> tuple[str, ...]:
    """Split a block's text into at most 4 chunks to embed, cut between sentences or lines.

    Of a text of more than _MAX_BLOCK_CHARS characters only the beginning is used.
    """
    chunks: list[str] = []
    for part in (part.strip() for part in SENTENCE_GAP.split(text[:_MAX_BLOCK_CHARS])):
        if chunks and len(chunks[-1]) < _MIN_CHUNK_CHARS:
            chunks[-1] = f"{chunks[-1]} {part}".strip()
        elif part:
            chunks.append(part)
    if len(chunks) > _MAX_PARTS:
        n_joined = -(-len(chunks) // _MAX_PARTS)
        starts = range(0, len(chunks), n_joined)
        chunks = [" ".join(chunks[start : start + n_joined]) for start in starts]
    while len(chunks) > _MAX_CHUNKS:
        at = min(range(len(chunks) - 1), key=lambda i: len(chunks[i]) + len(chunks[i + 1]))
        chunks[at : at + 2] = [f"{chunks[at]} {chunks[at + 1]}"]
    return tuple(chunks)


@dataclass(frozen=True, slots=True, eq=False)
class _EarlyProducts:
    """Vectors with their products with the first documents, computed before others were added.

    Attributes:
        with_rows: Products with the chunks.
        with_means: Products with the means of the documents.
    """

    with_rows: Sequence[tuple[Vectors, Vectors]] = ()
    with_means: Sequence[tuple[Vectors, Vectors]] = ()


class DocumentVectors:
    """The chunk vectors of numbered documents in one float32 matrix, and the mean of each document.

    A vector of another length replaces all stored ones, because it comes from another encoder.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._rows: Vectors = np.zeros((0, 0), np.float32)
        self._means: Vectors = np.zeros((0, 0), np.float32)
        self._n_rows = 0
        # In the order documents were added: their numbers, and the first row of each.
        self._documents = array("q")
        self._first_rows = array("q")
        # 0 for one whose mean vector is 0, as that of a text without known words.
        self._has_direction = array("b")
        self._index_of: dict[int, int] = {}
        self._expected: Sequence[Vectors] = ()
        # Vectors that were compared with the means, and the cosines of each.
        self._compared: list[tuple[Vectors, Vectors]] = []
        self._early = _EarlyProducts()

    def __contains__(self, document: int) -> bool:
        return document in self._index_of

    def __len__(self) -> int:
        return len(self._documents)

    def mask(self, size: int) -> Mask:
        """Return which of the documents with numbers below `size` have vectors [size]."""
        has_vectors = np.zeros(size, np.bool_)
        has_vectors[np.array(self._documents)] = True
        return has_vectors

    def put(self, document: int, vectors: Vectors) -> None:
        """Copy the unit vectors [k, d], k > 0, of a document that has none yet."""
        count, size = vectors.shape
        if size != self._rows.shape[1]:
            self._reset()
        self._compared = []
        n_documents = len(self._documents)
        self._rows = _with_room(self._rows, self._n_rows + count, size)
        self._means = _with_room(self._means, n_documents + 1, size)
        self._rows[self._n_rows : self._n_rows + count] = vectors
        mean = _normalized(np.add.reduce(vectors, axis=0) / np.float32(count))
        self._means[n_documents] = mean
        self._has_direction.append(bool(mean @ mean > _MIN_SQUARE))
        self._index_of[document] = n_documents
        self._documents.append(document)
        self._first_rows.append(self._n_rows)
        self._n_rows += count

    def get(self, document: int) -> Vectors:
        """Return the vectors [k, d] of a document; KeyError when it has none."""
        at = self._index_of[document]
        ends = [*self._first_rows[at + 1 : at + 2], self._n_rows]
        return self._rows[self._first_rows[at] : ends[0]]

    def cosines(self, vectors: Sequence[Vectors], size: int) -> FloatArray | None:
        """Return the cosine [n, size] of each unit vector with the best chunk of each document.

        NaN for a document without vectors; None when no document has vectors of that length.
        """
        if not self._documents or not vectors or vectors[0].shape[0] != self._rows.shape[1]:
            return None
        first_rows = np.array(self._first_rows)
        if self._compares_all(vectors):
            products = _products(self._rows[: self._n_rows], vectors, self._early.with_rows)
            best = [np.maximum.reduceat(row, first_rows) for row in products]
        else:
            best = self._approximate_cosines(vectors, first_rows)
        found = np.full((len(vectors), size), np.nan)
        documents = np.array(self._documents)
        for row, values in zip(found, best, strict=True):
            row[documents] = values
        return found

    def compare(self, groups: Sequence[Sequence[Vectors]], topic: Vectors | None = None) -> None:
        """Compute what `cosines` needs of the present documents for each group of unit vectors.

        Also what `topic_cosines` needs for `topic`. A later call for the same vectors compares only
        the documents that were added meanwhile. Its result is the same, to the bit. What was
        computed before is forgotten.
        """
        size = self._rows.shape[1]
        groups = [group for group in groups if group and group[0].shape[0] == size]
        with_rows = [one for group in groups if self._compares_all(group) for one in group]
        with_means = [one for group in groups if not self._compares_all(group) for one in group]
        if topic is not None and topic.shape[0] == size:
            with_means.append(topic)
        self._early = _EarlyProducts(
            _early_products(self._rows[: self._n_rows], with_rows),
            _early_products(self._means[: len(self._documents)], with_means),
        )

    def _compares_all(self, vectors: Sequence[Vectors]) -> bool:
        """Return whether vectors are compared with all chunks, not only with those of some."""
        return self._n_rows * len(vectors) <= _MAX_PRODUCTS

    def _approximate_cosines(
        self, vectors: Sequence[Vectors], first_rows: Positions
    ) -> list[Vectors]:
        """Return cosines with the mean vectors, refined by chunk for the closest documents."""
        cosines = [self._mean_cosines(vector).copy() for vector in vectors]
        n_skipped = max(0, len(first_rows) - _MAX_COMPARED // len(vectors))
        counts = np.diff(first_rows, append=self._n_rows)
        for vector, values in zip(vectors, cosines, strict=True):
            closest = np.sort(np.argpartition(values, n_skipped)[n_skipped:])
            count = counts[closest]
            ends = count.cumsum()
            starts = ends - count
            rows = np.arange(ends[-1]) + np.repeat(first_rows[closest] - starts, count)
            # All rows exist; with this mode numpy does not check the indexes.
            values[closest] = np.maximum.reduceat(
                self._rows.take(rows, axis=0, mode="clip") @ vector, starts
            )
        return cosines

    def topic_cosines(self, topic: Vectors, size: int) -> FloatArray | None:
        """Return the cosine [size] of a unit vector with the mean of each document.

        NaN for a document without vectors; None when no document has vectors of that length.
        """
        if not self._documents or topic.shape[0] != self._rows.shape[1]:
            return None
        found = np.full(size, np.nan)
        found[np.array(self._documents)] = self._mean_cosines(topic)
        return found

    def likeness(self, examples: Mapping[int, float], documents: Positions) -> FloatArray | None:
        """Return how alike each of some documents is to a weighted sum of documents: cosines [n].

        `examples` has the numbers of the documents in the sum with their weights. The mean vector
        of the n `documents` is subtracted from all vectors first, because what all texts of a
        session have in common says nothing. 0 for a document without a vector, or with one that
        hardly differs from the mean; None when that leaves no example.
        """
        stored, n_stored = np.array(self._documents), len(self._documents)
        row_of = np.full(1 + max(stored.max(initial=-1), documents.max(initial=-1)), -1)
        has_direction = np.array(self._has_direction, np.bool_)
        row_of[stored[has_direction]] = np.flatnonzero(has_direction)
        found = row_of[documents]
        has_vector = found >= 0
        present = found[has_vector]
        if not len(present):
            return None
        rows = self._means[:n_stored]
        # As a product, because a copy of the rows that are present takes long.
        counts = np.bincount(present, minlength=n_stored)
        mean: Vectors = (counts / len(present)).astype(np.float32) @ rows
        total, n_used = np.zeros_like(mean), 0
        for document, weight in examples.items():
            row = int(row_of[document]) if document < len(row_of) else -1
            centred = rows[row] - mean
            if row >= 0 and centred @ centred >= _MIN_SQUARE:
                total += np.float32(weight) * _normalized(centred)
                n_used += 1
        if not n_used or not np.isfinite(total).all():
            return None
        total = _normalized(total)
        with_mean, with_total = _products(rows, [mean, total])
        # |v - m|^2 of unit vectors v, given their products with the mean m.
        squares = 1.0 - 2.0 * with_mean[present] + mean @ mean
        cosines = (with_total[present] - total @ mean) / np.sqrt(np.maximum(squares, _MIN_SQUARE))
        of_all = np.zeros(len(documents))
        of_all[has_vector] = np.where(squares >= _MIN_SQUARE, cosines, 0.0)
        return of_all

    def expect(self, vectors: Sequence[Vectors]) -> None:
        """Announce unit vectors that will be compared with the documents.

        The means of many documents are then read from memory once for all of them. What was
        announced before is forgotten.
        """
        self._expected, self._compared = vectors, []

    def _mean_cosines(self, vector: Vectors) -> Vectors:
        """Return the cosine of a unit vector with the mean of each document, in stored order.

        Keeps the result, and those of the expected vectors, until a document or the expectation
        changes.
        """
        for compared, cosines in self._compared:
            if compared is vector:
                return cosines
        wanted = [vector]
        if self._n_rows * len(self._expected) > _MAX_PRODUCTS:
            wanted += [one for one in self._expected if one is not vector]
            wanted = [one for one in wanted if one.shape == vector.shape]
        found = _products(self._means[: len(self._documents)], wanted, self._early.with_means)
        first: Vectors = found[0]
        self._compared = [*self._compared, *zip(wanted, found, strict=True)]
        return first


def _products(
    rows: Vectors, vectors: Sequence[Vectors], early: Sequence[tuple[Vectors, Vectors]] = ()
) -> Vectors:
    """Return the products [n, k] of n vectors with k rows, reading each row from memory once.

    `early` are vectors with their products [j] with the first j rows, in complete steps: a step
    with another number of rows may round its products in another way.
    """
    found = np.empty((len(vectors), len(rows)), np.float32)
    starts = [0] * len(vectors)
    for number, vector in enumerate(vectors):
        for compared, products in early:
            if compared is vector:
                starts[number] = len(products)
                found[number, : len(products)] = products
    for at in range(min(starts, default=0), len(rows), _ROWS_PER_STEP):
        part = rows[at : at + _ROWS_PER_STEP]
        for start, row, vector in zip(starts, found, vectors, strict=True):
            if at >= start:
                np.dot(part, vector, out=row[at : at + _ROWS_PER_STEP])
    return found


def _normalized(vector: Vectors) -> Vectors:
    """Return the unit vector of the same direction; a vector of 0 stays as it is."""
    unit: Vectors = vector / np.float32(max(float(np.sqrt(vector @ vector)), 1e-12))
    return unit


def _early_products(rows: Vectors, vectors: Sequence[Vectors]) -> Sequence[tuple[Vectors, Vectors]]:
    """Return vectors, each with its products with the rows that fill complete steps."""
    complete = rows[: len(rows) // _ROWS_PER_STEP * _ROWS_PER_STEP]
    return list(zip(vectors, _products(complete, vectors), strict=True))


def outlier_scores(cosines: FloatArray) -> FloatArray:
    """Return a score in [0, 1] of how far each cosine is above the others; 0 for NaN.

    Encoders differ in the cosine of unrelated texts, so the threshold is relative to the blocks of
    the session.
    """
    finite, total = cosines, float(cosines.sum())
    if math.isnan(total):
        finite = cosines[~np.isnan(cosines)]
        total = float(finite.sum())
    count = max(1, len(finite))
    mean = total / count
    spread = math.sqrt(max(0.0, float(finite @ finite) / count - mean * mean))
    scores = np.zeros(len(cosines))
    if spread > _MIN_SPREAD:
        threshold = mean + _OUTLIER_MIN * spread
        above = np.flatnonzero(cosines > threshold)  # NaN compares as false
        width = (_OUTLIER_MAX - _OUTLIER_MIN) * spread
        scores[above] = np.minimum(1.0, (cosines[above] - threshold) / width)
    return scores


def _with_room(rows: Vectors, count: int, size: int) -> Vectors:
    """Return the same rows, or a larger copy of them that has at least `count` rows."""
    if count <= len(rows):
        return rows
    larger = np.zeros((max(_INITIAL_ROWS, 2 * len(rows), count), size), np.float32)
    larger[: len(rows), : rows.shape[1]] = rows
    return larger


class VectorCache:
    """Vectors [d] by key, bounded in bytes.

    When it is full, the tenant with the most bytes loses its least recently used vectors.
    `tenant_of` returns the tenant of a key.
    """

    def __init__(
        self, limit_bytes: int, tenant_of: Callable[[bytes], bytes] = lambda _: b""
    ) -> None:
        self._limit = limit_bytes
        self._tenant_of = tenant_of
        self._size = 0
        self._tenant_sizes: dict[bytes, int] = {}
        self._vectors: dict[bytes, OrderedDict[bytes, Vectors]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._vectors.values()))

    def __contains__(self, key: bytes) -> bool:
        return key in self._vectors.get(self._tenant_of(key), ())

    @property
    def size(self) -> int:
        """Bytes in use."""
        return self._size

    def get(self, key: bytes) -> Vectors | None:
        """Return a vector and mark it as used; None when it is not cached."""
        vectors = self._vectors.get(self._tenant_of(key))
        found = vectors.get(key) if vectors is not None else None
        if vectors is not None and found is not None:
            vectors.move_to_end(key)
        return found

    def put(self, key: bytes, vector: Vectors) -> None:
        """Store a read-only copy of a vector, and evict others to keep the limit."""
        tenant = self._tenant_of(key)
        vectors = self._vectors.setdefault(tenant, OrderedDict())
        previous = vectors.pop(key, None)
        if previous is not None:
            self._add_size(tenant, -previous.nbytes - _ENTRY_BYTES)
        # A view of one row would keep its whole matrix in memory.
        copy = vector.copy()
        copy.setflags(write=False)
        vectors[key] = copy
        self._add_size(tenant, copy.nbytes + _ENTRY_BYTES)
        while self._size > self._limit:
            largest = max(self._tenant_sizes, key=lambda name: self._tenant_sizes[name])
            _, dropped = self._vectors[largest].popitem(last=False)
            self._add_size(largest, -dropped.nbytes - _ENTRY_BYTES)
            if not self._vectors[largest]:
                del self._vectors[largest], self._tenant_sizes[largest]

    def _add_size(self, tenant: bytes, n_bytes: int) -> None:
        self._size += n_bytes
        self._tenant_sizes[tenant] = self._tenant_sizes.get(tenant, 0) + n_bytes


def encode_vectors(encoder_id: bytes, vectors: Iterable[tuple[str, Vectors]]) -> bytes:
    """Encode vectors [k, d] by block label: a JSON line, then little-endian float32.

    `encoder_id` identifies the encoder that made them.
    """
    items = list(vectors)
    head = [encoder_id.hex(), [[label, *matrix.shape] for label, matrix in items]]
    numbers = b"".join(matrix.astype("<f4").tobytes() for _, matrix in items)
    return b"\n".join([json.dumps(head).encode(), numbers])


def decode_vectors(data: bytes, encoder_id: bytes) -> Mapping[str, Vectors]:
    """Decode what `encode_vectors` wrote; empty when another encoder made the vectors.

    Raises ValueError when the data has another form.
    """
    head, _, numbers = data.partition(b"\n")
    try:
        stored_encoder, shapes = json.loads(head)
        if stored_encoder != encoder_id.hex():
            return {}
        values, at, vectors = np.frombuffer(numbers, "<f4"), 0, {}
        for label, count, size in shapes:
            matrix = values[at : at + count * size].reshape(count, size)
            vectors[label] = matrix.astype(np.float32)
            at += count * size
    except TypeError as error:
        raise ValueError("a file of vectors does not have the expected form") from error
    return vectors
