"""How much a query could look at a block at most, told from the bounds of its keys.

After Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (ICML
2024, arXiv:2406.10774): with least and greatest keys k- and k+ of a block, no key in it has a
product with q above the sum over channels of max(q k-, q k+).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.model.block_table import BlockTable, FloatArray

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Query rows of the end of a prompt: [layer, row, head, channel]."""

    rows: Floats

    @classmethod
    def parse(cls, answer: object, n_layers: int) -> Queries | None:
        """Of `query_rows`; None when there are none."""
        if not isinstance(answer, Mapping) or not answer.get("pos"):
            return None
        n_rows, n_head = len(answer["pos"]), int(answer["n_head"])
        return cls(floats(answer["data"]).reshape(n_layers, n_rows, n_head, -1))


class KeyBounds:
    """Bounds of the blocks of one session, by label; they never change while a block is a block."""

    def __init__(self) -> None:
        self._known: dict[str, Floats] = {}

    def lacking(self, blocks: BlockTable) -> list[int]:
        """Indexes of the blocks whose bounds are not known."""
        return [i for i, label in enumerate(blocks.labels) if label not in self._known]

    def take(self, answer: object, labels: Iterable[str]) -> None:
        """Of `key_bounds`, for blocks of these labels in the order they were asked for."""
        if not isinstance(answer, Mapping) or len(set(answer.get("n_key", ()))) != 1:
            return
        values = floats(answer["data"]).reshape(-1, len(answer["layers"]), 2, answer["n_key"][0])
        asked = zip(labels, answer["known"], strict=True)
        known = [label for label, there in asked if there]
        self._known |= dict(zip(known, values, strict=True))

    def keep(self, blocks: BlockTable) -> None:
        """Forget all others."""
        self._known = {k: self._known[k] for k in blocks.labels if k in self._known}

    def importance(self, queries: Queries, blocks: BlockTable) -> FloatArray:
        """Of each block, 0 to 1, 0.5 the mean; NaN where its bounds are not known.

        The softmax over the blocks of their bounds, mean of all layers, heads and rows; of that
        times the number of blocks, s, it is s / (s + 1).
        """
        found = np.full(len(blocks), np.nan)
        fits, bounds = self._fitting(queries, blocks)
        if fits:
            of_layers = [one.mean(axis=(0, 1)) for one in shares(queries.rows, bounds)]
            share = len(fits) * np.mean(of_layers, axis=0)
            found[fits] = share / (share + 1.0)
        return found

    def peaks(self, queries: Queries, blocks: BlockTable) -> FloatArray:
        """Of each block the most of that softmax at any layer, head and row, 0 to 1; NaN where its
        bounds are not known."""
        found = np.full(len(blocks), np.nan)
        fits, bounds = self._fitting(queries, blocks)
        if fits:
            of_layers = [one.max(axis=(0, 1)) for one in shares(queries.rows, bounds)]
            found[fits] = np.max(of_layers, axis=0)
        return found

    def _fitting(self, queries: Queries, blocks: BlockTable) -> tuple[list[int], Floats]:
        """Indexes of the blocks with bounds of the layers of these queries, and the bounds."""
        shape = (len(queries.rows), 2)
        fits = [
            i
            for i, label in enumerate(blocks.labels)
            if label in self._known and self._known[label].shape[:2] == shape
        ]
        if not fits:
            return fits, np.zeros(0, np.float32)
        return fits, np.stack([self._known[blocks[i].label] for i in fits])


def shares(rows: Floats, bounds: Floats) -> Iterator[FloatArray]:
    """Of each layer [kv head, row and head, block], the softmax over the blocks of their bounds: of
    rows [layer, row, head, channel] and bounds [block, layer, 2, key]."""
    for layer, queries in enumerate(rows):
        yield _weights(queries, bounds[:, layer])


def _weights(queries: Floats, bounds: Floats) -> FloatArray:
    """[kv head, row and head, block], summing to 1 over the blocks, of queries [row, head, channel]
    and bounds [block, 2, key]."""
    size = queries.shape[-1]
    least, most = (
        np.moveaxis(bounds[:, end].reshape(len(bounds), -1, size), 0, -1) for end in (0, 1)
    )  # [kv head, channel, block]
    grouped = np.moveaxis(queries, 1, 0).reshape(len(least), -1, size)  # [kv head, any, channel]
    limits = np.maximum(grouped, 0) @ most + np.minimum(grouped, 0) @ least
    limits = limits / np.sqrt(size)
    weights = np.exp(limits - limits.max(axis=-1, keepdims=True))
    shares: FloatArray = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def floats(text: str) -> Floats:
    """Little-endian f32 in base64, as llama-server sends numbers."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)
