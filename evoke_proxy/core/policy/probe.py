"""Whether to probe the model for the blocks it attends to, and what its answer says.

A probe decodes the end of the prompt and the first words of an answer without the evicted blocks.
The queries of these words are compared with the keys of all blocks: first with the bounds of the
keys (`policy.attention.KeyBounds`), then, for the best of those, with the keys themselves. What the
probe decoded is removed, what the model attended to is recovered, and the prompt is decoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import FloatArray, Positions
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.counts import Rate, seconds_of, token_count
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.attention import Float32Array, KeyBounds, Queries, decode_floats
from evoke_proxy.core.policy.registry import probes
from evoke_proxy.core.policy.view import PolicyView

# This many blocks are compared with the keys themselves; of more, bounds select the best. Bounds
# are loose (bench/results/recall.json: `bounds` beside `keys`), so that more are kept than return.
MAX_COMPARED_BLOCKS = 256
# A tail longer than the budget divided by this leaves no room for what a probe could find.
_MAX_TAIL_DIVISOR = 2
# The seconds that a probe may take when the query's text finds nothing.
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
        """Take the `timings` of a reply into account."""
        values = timings or {}
        for rate, name in ((self.prompt, "prompt"), (self.answer, "predicted")):
            rate.note(token_count(values.get(f"{name}_n")), seconds_of(values.get(f"{name}_ms")))

    def seconds(self, n_prompt: int, n_answer: int) -> float:
        """Return how long a probe of so many tokens takes; 0 before anything was measured."""
        return self.prompt.seconds(n_prompt) + self.answer.seconds(n_answer)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The cost of a probe.

    Attributes:
        plan: The plan that was run before the probe.
        decoded: Tokens decoded for it: the tail and the first words of an answer.
        seconds: Its duration.
    """

    plan: Plan
    decoded: int
    seconds: float

    def remaining_spans(self, later: Plan) -> list[Span]:
        """Return what the probe's plan loaded and a later plan left in place."""
        adopt = self.plan.adopt
        loaded = [load.span for load in self.plan.loads] + list(adopt.spans if adopt else ())
        evicted = {evict.span for evict in later.evicts}
        return [span for span in loaded if span not in evicted]

    def summary(self, later: Plan) -> dict[str, Any]:
        """Return what the client is told: `brought` tokens were loaded because of the probe."""
        brought = sum(len(load.span) for load in later.loads)
        ms = round(self.seconds * 1000, 1)
        return {"decoded": self.decoded, "brought": brought, "ms": ms}


def reason_to_skip(
    view: PolicyView, config: PolicyConfig, seconds: float, confidence: float
) -> str:
    """Return in one word why a turn is not probed; empty when it is.

    `seconds` is how long the probe takes, `confidence` how certain the text is to have found what
    is asked, in [0, 1]: the less certain, the longer a probe may take.
    """
    if not probes(config) or config.budget is None:
        return "off"
    if not len(evicted_with_copy(view)):
        return "nothing_out"
    if view.n_to_decode + config.probe_tokens > config.budget // _MAX_TAIL_DIVISOR:
        return "long_tail"
    certainty = confidence if config.recall == "fused" else 0.0
    return "too_dear" if seconds > (1.0 - certainty) * _MAX_PROBE_S else ""


def evicted_with_copy(view: PolicyView) -> Positions:
    """Return the indexes of the blocks of which only a copy is left."""
    in_cache = view.in_cache & (view.adopt_to == 0)
    return np.flatnonzero(view.in_pool & ~in_cache & (view.blocks.ends <= view.decode_from))


def blocks_with_rows(view: PolicyView) -> Positions:
    """Return the indexes of the earlier blocks whose rows are resident or copied."""
    return np.flatnonzero((view.in_cache | view.in_pool) & (view.blocks.ends <= view.n_past))


def spans_of(view: PolicyView, indexes: Positions) -> list[list[int]]:
    """Return the spans of these blocks in the form of block calls."""
    starts, ends = view.blocks.starts[indexes].tolist(), view.blocks.ends[indexes].tolist()
    return [[start, end] for start, end in zip(starts, ends, strict=True)]


def most_likely(
    view: PolicyView, bounds: KeyBounds, queries: Queries | None, limit: int = MAX_COMPARED_BLOCKS
) -> Positions:
    """Return the ascending indexes of at most `limit` blocks that the queries may attend to.

    The best by the bounds of their keys, after those without bounds.
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
    the maximum over layers and words: single heads are noisy, and attend to one block or another
    at nearly every word. Rows before the last token of the prompt, which is `n_tokens` long, do
    not count, because nothing is answered there.
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
