"""Decides whether to probe the model for the blocks it attends to, and reads the answer.

A probe decodes the end of the prompt and the first words of an answer without the evicted blocks.
The queries of these words are compared with the keys of all blocks: first with the bounds of the
keys (`policy.attention.KeyBounds`), then, for the best of those, with the keys themselves. The rows
of the probe are removed, the blocks that the model attended to are recovered, and the prompt is
decoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import FloatArray, Positions
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.counts import Rate, seconds_of, token_count
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.attention import Float32Array, KeyBounds, Queries, decode_floats
from evoke_proxy.core.policy.registry import may_probe
from evoke_proxy.core.policy.view import PolicyView

# At most this many blocks are compared by their keys; bounds preselect them. The bounds are loose
# (bench/results/recall.json: `bounds` and `keys`), so that more blocks are compared than recovered.
MAX_COMPARED_BLOCKS = 256
# A tail longer than the budget divided by this leaves no room for blocks that a probe could find.
_MAX_TAIL_DIVISOR = 2
# The maximum duration of a probe, for a query whose text finds nothing.
_MAX_PROBE_S = 2.0


@dataclass(slots=True)
class DecodeSpeed:
    """Measured speed of one server in tokens per second.

    Attributes:
        prompt: Speed of decoding prompts.
        answer: Speed of generating answers.
    """

    prompt: Rate = field(default_factory=Rate)
    answer: Rate = field(default_factory=Rate)

    def note(self, timings: Mapping[str, Any] | None) -> None:
        """Add the `timings` of a reply to the means."""
        values = timings or {}
        for rate, name in ((self.prompt, "prompt"), (self.answer, "predicted")):
            rate.note(token_count(values.get(f"{name}_n")), seconds_of(values.get(f"{name}_ms")))

    def seconds(self, n_prompt: int, n_answer: int) -> float:
        """Return the expected duration of a probe; 0 before the first measurement."""
        return self.prompt.seconds(n_prompt) + self.answer.seconds(n_answer)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A probe that was run.

    Attributes:
        plan: The plan that was run before the probe.
        decoded: Number of tokens decoded for it: the tail and the first words of an answer.
        seconds: Its duration.
    """

    plan: Plan
    decoded: int
    seconds: float

    def remaining_spans(self, later: Plan) -> list[Span]:
        """Return the ranges that the probe's plan loaded and a later plan does not evict."""
        adopt = self.plan.adopt
        loaded = [load.span for load in self.plan.loads] + list(adopt.spans if adopt else ())
        evicted = {evict.span for evict in later.evicts}
        return [span for span in loaded if span not in evicted]

    def summary(self, later: Plan) -> dict[str, Any]:
        """Return the report for the client; `brought` counts tokens loaded because of the probe."""
        brought = sum(len(load.span) for load in later.loads)
        ms = round(self.seconds * 1000, 1)
        return {"decoded": self.decoded, "brought": brought, "ms": ms}


def reason_to_skip(
    view: PolicyView, config: PolicyConfig, seconds: float, confidence: float
) -> str:
    """Return why a turn is not probed, as one word; empty when it is probed.

    `off`: the configuration does not probe. `nothing_out`: no block is evicted with a copy.
    `long_tail`: the tail leaves no room for found blocks. `too_dear`: the probe would take too
    long. `seconds` is the expected duration of the probe. `confidence`, in [0, 1], says how certain
    the ranking by text is; the lower it is, the longer a probe may take.
    """
    if not may_probe(config) or config.budget is None:
        return "off"
    if not len(evicted_with_copy(view)):
        return "nothing_out"
    if view.n_to_decode + config.probe_tokens > config.budget // _MAX_TAIL_DIVISOR:
        return "long_tail"
    certainty = confidence if config.recall == "fused" else 0.0
    return "too_dear" if seconds > (1.0 - certainty) * _MAX_PROBE_S else ""


def config_of_unprobed(view: PolicyView, config: PolicyConfig) -> PolicyConfig:
    """Return the settings of a turn in which only the model was to rank, and was not asked.

    Such a turn is ranked by text. Returns `config` itself for all other turns, and where no block
    could be recovered.
    """
    was_asked = view.model_relevance is not None
    if config.recall != "model" or was_asked or not len(evicted_with_copy(view)):
        return config
    return replace(config, recall="text")


def evicted_with_copy(view: PolicyView) -> Positions:
    """Return the indexes of the blocks before the tail that have a copy and are not resident."""
    in_cache = view.in_cache & (view.adopt_to == 0)
    return np.flatnonzero(view.in_pool & ~in_cache & (view.blocks.ends <= view.decode_from))


def blocks_with_rows(view: PolicyView) -> Positions:
    """Return the indexes of the earlier blocks whose rows are resident or copied."""
    return np.flatnonzero((view.in_cache | view.in_pool) & (view.blocks.ends <= view.n_past))


def spans_of(view: PolicyView, indexes: Positions) -> list[list[int]]:
    """Return [start, end] of each of these blocks, as calls to llama-server contain them."""
    starts, ends = view.blocks.starts[indexes].tolist(), view.blocks.ends[indexes].tolist()
    return [[start, end] for start, end in zip(starts, ends, strict=True)]


def most_likely(
    view: PolicyView, bounds: KeyBounds, queries: Queries | None, limit: int = MAX_COMPARED_BLOCKS
) -> Positions:
    """Return the ascending indexes of at most `limit` blocks that the queries may attend to.

    Blocks without bounds come first, then those with the highest bounds. Without queries, the last
    blocks of the prompt are returned.
    """
    indexes = blocks_with_rows(view)
    if len(indexes) <= limit or queries is None:
        return indexes[-limit:]
    peaks = np.nan_to_num(bounds.peaks(queries, view.blocks)[indexes], nan=np.inf)
    return np.sort(indexes[np.argsort(-peaks, kind="stable")[:limit]])


def model_relevance(
    answer: object, indexes: Positions, n_blocks: int, n_tokens: int
) -> FloatArray | None:
    """Return how much the model attended to each block [n_blocks], in [0, 1].

    Reads `key_products` of an answer about the blocks at `indexes`; None without products. Takes
    the softmax of the products over the blocks, averages it over the heads of a layer, and takes
    the maximum over layers and words. Single heads are too noisy: they attend to one block or
    another at nearly every word. Only rows from the last token of the prompt on count; the prompt
    is `n_tokens` long.
    """
    if not isinstance(answer, Mapping) or not answer.get("pos"):
        return None
    products = _products(answer)
    answered = indexes[np.array(answer["known"], np.bool_)]
    rows = np.array(answer["pos"]) >= n_tokens - 1
    if not len(answered) or not rows.any():
        return None
    logits = products[:, :, rows].astype(np.float64) / np.sqrt(int(answer["n_embd"]))
    weights = np.exp(logits - logits.max(axis=0))
    relevance = np.zeros(n_blocks)
    relevance[answered] = (weights / weights.sum(axis=0)).mean(axis=3).max(axis=(1, 2))
    return relevance


def _products(answer: Mapping[str, Any]) -> Float32Array:
    """Return the products [block, layer, row, head] of an answer."""
    shape: Sequence[int] = (len(answer["layers"]), len(answer["pos"]), int(answer["n_head"]))
    return decode_floats(answer["data"]).reshape(-1, *shape)
