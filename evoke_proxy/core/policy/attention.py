"""What the model looked at: what llama-server is to capture for a policy, and what that says of
blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import BlockTable, FloatArray, Mask
from evoke_proxy.core.policy.key_bounds import KeyBounds, Queries
from evoke_proxy.core.policy.policy_view import PolicyView

# Rows of the end of a prompt that are counted beside those of generated tokens.
_WINDOW = 32
_DECAY = 0.95
# What llama-server keeps at most.
_MOST_QUERIES = 64
_MEAN = 0.5


@dataclass(frozen=True, slots=True)
class Capture:
    """How rows of attention are added up, and how many query rows are kept: see `attn-capture` in
    patches/API.md. `read` is what a turn asks of the one before it: nothing, the masses, or its
    queries too; `layers` are those to be captured where the policy names them."""

    mode: str
    decay: float = _DECAY
    window: int = _WINDOW
    queries: int = 0
    read: str = "masses"
    layers: tuple[int, ...] = ()

    def op(self, layers: Sequence[int]) -> dict[str, Any]:
        """The op of a block-plan that begins it; llama-server does not begin twice."""
        settings = {"mode": self.mode, "decay": self.decay, "window": self.window}
        settings |= {"queries": self.queries} if self.queries else {}
        return {"op": "attn-capture", "layers": list(layers)} | settings


NO_CAPTURE: dict[str, Any] = {"op": "attn-capture", "layers": []}

# H2O sums all rows, SnapKV takes the last window of them, TOVA the last one.
_BY_POLICY = {
    "h2o": Capture("sum"),
    "snapkv": Capture("snapkv"),
    "tova": Capture("ewma", decay=0.0),
    "scored": Capture("ewma"),
    "arkvale": Capture("ewma", queries=16, read="queries"),
}
_BY_KEEP_SCORE = ("evoke", "discard", "oracle")
_PROBING = ("evoke", "infllm")


def captured_for(config: PolicyConfig) -> Capture | None:
    """What the policy has to know about attention; None: nothing."""
    if config.budget is None:
        return None
    keeps = config.name in _BY_KEEP_SCORE and config.weight_attention > 0
    capture = Capture("ewma") if keeps else _BY_POLICY.get(config.name)
    if not probes(config):
        return capture
    read = "masses" if capture is not None else ""
    kept = min(config.probe_tokens, _MOST_QUERIES)
    return Capture("ewma", queries=kept, read=read, layers=config.recall_layers)


def probes(config: PolicyConfig) -> bool:
    """Whether the model itself is asked which blocks it looks for."""
    able = config.name in _PROBING and config.recovery == "kv_restore"
    return able and config.budget is not None and config.recall in ("model", "fused")


def layers_of(possible: Sequence[int], count: int) -> tuple[int, ...]:
    """So many layers, spread evenly over those that can be captured."""
    taken = min(count, len(possible))
    return tuple(possible[(2 * i + 1) * len(possible) // (2 * taken)] for i in range(taken))


class Attended:
    """What is known of a session's blocks: a block that is out keeps what it was looked at last."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, int]] = {}
        self.bounds = KeyBounds()

    def question(self, view: PolicyView, capture: Capture) -> dict[str, Any]:
        """The body of an `attention` call that tells what `told` takes."""
        spans = [[block.span.start, block.span.end] for block in view.blocks]
        if capture.read != "queries":
            return {"ranges": spans}
        lacking = self.bounds.lacking(view.blocks)
        return {"ranges": spans, "with_queries": True, "bounds": [spans[i] for i in lacking]}

    def told(
        self, view: PolicyView, answer: Mapping[str, Any], turn: int, sink_tokens: int
    ) -> PolicyView:
        """The view with what an answer says about attention in `turn`, the one before it.

        With query rows `attention` is how much these could look at each block, by the bounds of its
        keys: of blocks that are out, too.
        """
        mass = answer.get("mass")
        if isinstance(mass, list) and len(mass) == len(view.blocks) and answer.get("n_obs"):
            share = shares(np.array(mass, np.float64), view.blocks, view.in_cache, sink_tokens)
            self._take(view.blocks, share, view.in_cache, turn)
        if "query_rows" not in answer:
            return self.shown(view)
        labels = [view.blocks[i].label for i in self.bounds.lacking(view.blocks)]
        self.bounds.take(answer.get("key_bounds"), labels)
        self.bounds.keep(view.blocks)
        queries = Queries.parse(answer["query_rows"], len(answer.get("layers", ())))
        if queries is None:
            return self.shown(view)
        found = self.bounds.importance(queries, view.blocks)
        return replace(self.shown(view), attention=np.nan_to_num(found, nan=_MEAN))

    def shown(self, view: PolicyView) -> PolicyView:
        """The view with what is known: the share a block had last, the mean where there was none,
        and the turn it was made or last had the mean or more. As it is while all is unknown."""
        if not self._known:
            return view
        known = [self._known.get(label, (_MEAN, 0)) for label in view.blocks.labels]
        values = np.array(known, np.float64).reshape(len(known), 2)
        looked = np.maximum(view.blocks.turns, values[:, 1])
        return replace(view, attention=values[:, 0], looked=looked)

    def _take(self, blocks: BlockTable, share: FloatArray, known: Mask, turn: int) -> None:
        fresh = dict(self._known)
        for label, value, seen in zip(blocks.labels, share.tolist(), known.tolist(), strict=True):
            if seen:
                last = fresh.get(label, (value, 0))[1]
                fresh[label] = (value, turn if value >= _MEAN else last)
        self._known = {label: fresh[label] for label in blocks.labels if label in fresh}


def shares(mass: FloatArray, blocks: BlockTable, known: Mask, sink_tokens: int) -> FloatArray:
    """How much each block was looked at, 0 to 1, 0.5 being the mean of those known.

    Of d, the mass of a block's tokens each, and m, the mean of that without the sinks, which get
    most of all attention and mean nothing by it: d / (d + m). Others than the known mean nothing.
    """
    density = mass / np.maximum(1, blocks.lengths)
    counted = known & (blocks.starts >= sink_tokens)
    middle = float(density[counted].mean()) if counted.any() else 0.0
    share: FloatArray = density / (density + middle) if middle > 0 else np.full(len(blocks), _MEAN)
    return share
