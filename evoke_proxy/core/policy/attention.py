"""Computes the attention that each block gets, from rows that llama-server captures."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.model.block_table import BlockTable, FloatArray, Mask
from evoke_proxy.core.policy.view import PolicyView

Float32Array = npt.NDArray[np.float32]

# Number of rows at the end of a prompt that count in addition to those of generated tokens.
_WINDOW = 32
# Factor of the sum of earlier rows before each new row.
_DECAY = 0.95
# The most query rows that llama-server keeps.
MAX_QUERIES = 64
# The share of attention of a block whose attention per token equals the mean; see
# `attention_shares`.
_MEAN_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Capture:
    """How llama-server sums rows of attention; see `attn-capture` in patches/API.md.

    Attributes:
        mode: How the rows are summed: `sum`, `ewma` or `snapkv`.
        decay: Factor of the sum before each new row, for `ewma`.
        window: How many rows of the end of a prompt count.
        queries: How many query rows are kept.
        read: What a turn reads of the previous turn's capture: "" for nothing, `masses`, or
            `queries` for the masses and the query rows.
    """

    mode: str
    decay: float = _DECAY
    window: int = _WINDOW
    queries: int = 0
    read: str = "masses"

    def op(self, layers: Sequence[int]) -> dict[str, Any]:
        """Return the op of a block plan that starts the capture; a repeated op has no effect."""
        settings = {"mode": self.mode, "decay": self.decay, "window": self.window}
        settings |= {"queries": self.queries} if self.queries else {}
        return {"op": "attn-capture", "layers": list(layers)} | settings


# The op of a block plan that turns the capture off.
NO_CAPTURE: dict[str, Any] = {"op": "attn-capture", "layers": []}


def captured_layers(capturable: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` layers, spread evenly over those that can be captured."""
    n = min(count, len(capturable))
    return tuple(capturable[(2 * i + 1) * len(capturable) // (2 * n)] for i in range(n))


class AttentionTracker:
    """The latest attention of each block of a session; an evicted block keeps its last value."""

    def __init__(self) -> None:
        # By label: the block's share, and the turn in which it last was the mean or more.
        self._shares: dict[str, tuple[float, int]] = {}
        self.bounds = KeyBounds()

    def request(self, view: PolicyView, capture: Capture) -> dict[str, Any]:
        """Return the body of an `attention` call; its answer is for `updated`."""
        spans = [[block.span.start, block.span.end] for block in view.blocks]
        if capture.read != "queries":
            return {"ranges": spans}
        missing = self.bounds.missing(view.blocks)
        return {"ranges": spans, "with_queries": True, "bounds": [spans[i] for i in missing]}

    def updated(
        self, view: PolicyView, answer: Mapping[str, Any], turn: int, sink_tokens: int
    ) -> PolicyView:
        """Return the view with the attention of an answer, which was captured in `turn`.

        If the answer has query rows, `attention` is the importance of each block for these rows,
        evicted blocks included; see `KeyBounds.importance`.
        """
        mass = answer.get("mass")
        if isinstance(mass, list) and len(mass) == len(view.blocks) and answer.get("n_obs"):
            masses = np.array(mass, np.float64)
            shares = attention_shares(masses, view.blocks, view.in_cache, sink_tokens)
            self._update(view.blocks, shares, view.in_cache, turn)
        if "query_rows" not in answer:
            return self.annotated(view)
        labels = [view.blocks[i].label for i in self.bounds.missing(view.blocks)]
        self.bounds.add(answer.get("key_bounds"), labels)
        self.bounds.retain(view.blocks)
        queries = Queries.parse(answer["query_rows"], len(answer.get("layers", ())))
        if queries is None:
            return self.annotated(view)
        importance = self.bounds.importance(queries, view.blocks)
        attention = np.nan_to_num(importance, nan=_MEAN_SHARE)
        return replace(self.annotated(view), attention=attention)

    def annotated(self, view: PolicyView) -> PolicyView:
        """Return the view with the latest share of each block, and the turn it was last attended.

        A block without a share gets the mean. The view is unchanged while nothing was captured.
        """
        if not self._shares:
            return view
        latest = [self._shares.get(label, (_MEAN_SHARE, 0)) for label in view.blocks.labels]
        values = np.array(latest, np.float64).reshape(len(latest), 2)
        last_attended = np.maximum(view.blocks.turns, values[:, 1])
        return replace(view, attention=values[:, 0], last_attended=last_attended)

    def _update(self, blocks: BlockTable, shares: FloatArray, captured: Mask, turn: int) -> None:
        """Store the shares of the captured blocks; blocks that are no longer there are removed."""
        fresh = dict(self._shares)
        rows = zip(blocks.labels, shares.tolist(), captured.tolist(), strict=True)
        for label, share, was_captured in rows:
            if was_captured:
                last = fresh.get(label, (share, 0))[1]
                fresh[label] = (share, turn if share >= _MEAN_SHARE else last)
        self._shares = {label: fresh[label] for label in blocks.labels if label in fresh}


def attention_shares(
    mass: FloatArray, blocks: BlockTable, captured: Mask, sink_tokens: int
) -> FloatArray:
    """Return the share of attention of each block [n], 0 to 1, with 0.5 for the mean.

    It is d / (d + m) for the mass d of a block per token and the mean m of d over the captured
    blocks. The mean excludes sinks, which get most attention whatever their text is. The values
    of blocks that were not captured are meaningless.
    """
    density = mass / np.maximum(1, blocks.lengths)
    counted = captured & (blocks.starts >= sink_tokens)
    mean = float(density[counted].mean()) if counted.any() else 0.0
    if mean <= 0:
        return np.full(len(blocks), _MEAN_SHARE)
    shares: FloatArray = density / (density + mean)
    return shares


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Query vectors of the last captured tokens.

    Attributes:
        rows: Query vectors [layer, row, head, channel].
    """

    rows: Float32Array

    @classmethod
    def parse(cls, answer: object, n_layers: int) -> Queries | None:
        """Read `query_rows` of an `attention` answer; None when there are none."""
        if not isinstance(answer, Mapping) or not answer.get("pos"):
            return None
        n_rows, n_head = len(answer["pos"]), int(answer["n_head"])
        return cls(decode_floats(answer["data"]).reshape(n_layers, n_rows, n_head, -1))


class KeyBounds:
    """Bounds of the keys of each block, which limit the attention that a query can pay to it.

    After Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (ICML
    2024, arXiv:2406.10774): with the least and greatest keys k- and k+ of a block, no key in it has
    a product with q above the sum over channels of max(q k-, q k+). A block's bounds never change.
    """

    def __init__(self) -> None:
        # By label, [layer, 2, key]: the least and the greatest keys of the block.
        self._bounds: dict[str, Float32Array] = {}

    def missing(self, blocks: BlockTable) -> list[int]:
        """Return the indexes of the blocks without bounds."""
        return [i for i, label in enumerate(blocks.labels) if label not in self._bounds]

    def add(self, answer: object, labels: Iterable[str]) -> None:
        """Add `key_bounds` of an `attention` answer; `labels` are in the order of the request."""
        if not isinstance(answer, Mapping) or len(set(answer.get("n_key", ()))) != 1:
            return
        shape = (-1, len(answer["layers"]), 2, answer["n_key"][0])
        values = decode_floats(answer["data"]).reshape(shape)
        requested = zip(labels, answer["known"], strict=True)
        answered = [label for label, has_bounds in requested if has_bounds]
        self._bounds |= dict(zip(answered, values, strict=True))

    def retain(self, blocks: BlockTable) -> None:
        """Remove the bounds of all other blocks."""
        self._bounds = {k: self._bounds[k] for k in blocks.labels if k in self._bounds}

    def importance(self, queries: Queries, blocks: BlockTable) -> FloatArray:
        """Return the importance of each block [n], 0 to 1, with mean 0.5; NaN without bounds.

        It is s / (s + 1) for s, the mean over layers, heads and rows of the softmax over the
        blocks' bounds, times the number of blocks.
        """
        importance = np.full(len(blocks), np.nan)
        indexes, bounds = self._matching(queries, blocks)
        if indexes:
            by_layer = [one.mean(axis=(0, 1)) for one in bound_shares(queries.rows, bounds)]
            share = len(indexes) * np.mean(by_layer, axis=0)
            importance[indexes] = share / (share + 1.0)
        return importance

    def peaks(self, queries: Queries, blocks: BlockTable) -> FloatArray:
        """Return the highest softmax share of each block [n] at any layer, head and row.

        In [0, 1]; NaN without bounds.
        """
        peaks = np.full(len(blocks), np.nan)
        indexes, bounds = self._matching(queries, blocks)
        if indexes:
            by_layer = [one.max(axis=(0, 1)) for one in bound_shares(queries.rows, bounds)]
            peaks[indexes] = np.max(by_layer, axis=0)
        return peaks

    def _matching(self, queries: Queries, blocks: BlockTable) -> tuple[list[int], Float32Array]:
        """Return the indexes of the blocks with bounds for the queries' layers, and the bounds."""
        shape = (len(queries.rows), 2)
        indexes = [
            i
            for i, label in enumerate(blocks.labels)
            if label in self._bounds and self._bounds[label].shape[:2] == shape
        ]
        if not indexes:
            return indexes, np.zeros(0, np.float32)
        return indexes, np.stack([self._bounds[blocks[i].label] for i in indexes])


def bound_shares(rows: Float32Array, bounds: Float32Array) -> Iterator[FloatArray]:
    """Yield for each layer the softmax [kv head, row and head, block] over the blocks' bounds.

    `rows` is [layer, row, head, channel], `bounds` [block, layer, 2, key].
    """
    for layer, queries in enumerate(rows):
        yield _bound_softmax(queries, bounds[:, layer])


def _bound_softmax(queries: Float32Array, bounds: Float32Array) -> FloatArray:
    """Return the softmax [kv head, row and head, block], which sums to 1 over the blocks.

    `queries` is [row, head, channel], `bounds` [block, 2, key].
    """
    size = queries.shape[-1]
    least, greatest = (
        np.moveaxis(bounds[:, end].reshape(len(bounds), -1, size), 0, -1) for end in (0, 1)
    )  # [kv head, channel, block]
    grouped = np.moveaxis(queries, 1, 0).reshape(len(least), -1, size)  # [kv head, any, channel]
    limits = np.maximum(grouped, 0) @ greatest + np.minimum(grouped, 0) @ least
    limits = limits / np.sqrt(size)
    weights = np.exp(limits - limits.max(axis=-1, keepdims=True))
    shares: FloatArray = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def decode_floats(text: str) -> Float32Array:
    """Decode little-endian float32 numbers in base64, as llama-server sends them."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)
