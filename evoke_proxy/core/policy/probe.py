"""Whether to ask the model itself what a question is about, and what its answer says of blocks.

A probe decodes the end of the prompt and the first words of an answer without what is evicted. The
queries of these words, held against the keys of all blocks, say what the model looks for: first
against their bounds (core/policy/key_bounds.py), then, for the best of those, against the keys
themselves. What it has decoded is taken back, what it looks for comes back, and the prompt is
decoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import Positions
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.counts import Rate, seconds_of, token_count
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.attention import probes
from evoke_proxy.core.policy.key_bounds import Floats, KeyBounds, Queries, floats
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.policy.score import Scores

# So many blocks are held against the keys themselves; of more, bounds say which. They are loose
# (bench/results/recall.json: `bounds` beside `keys`), so many more are kept than come back.
MOST_BLOCKS = 256
# A tail that takes more of the budget than that leaves no room for what a probe could find.
_MAX_BUDGET_SHARE = 2


@dataclass(slots=True)
class Pace:
    """Speeds of one server, tokens per second: of prompts, and of answers."""

    prompt: Rate = field(default_factory=Rate)
    answer: Rate = field(default_factory=Rate)

    def note(self, timings: Mapping[str, Any] | None) -> None:
        """What a reply's timings say of both."""
        given = timings or {}
        for rate, name in ((self.prompt, "prompt"), (self.answer, "predicted")):
            rate.note(token_count(given.get(f"{name}_n")), seconds_of(given.get(f"{name}_ms")))

    def seconds(self, tail: int, words: int) -> float:
        """How long a probe of so many tokens takes; 0 before anything was measured."""
        return self.prompt.seconds(tail) + self.answer.seconds(words)


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe took: `plan` was run before it, `decoded` tokens are those of the tail and of
    the words it began with."""

    plan: Plan
    decoded: int
    seconds: float

    def kept(self, later: Plan) -> list[Span]:
        """What its plan brought back and the one after it left in place."""
        adopt = self.plan.adopt
        brought = [load.span for load in self.plan.loads] + list(adopt.spans if adopt else ())
        gone = {evict.span for evict in later.evicts}
        return [span for span in brought if span not in gone]

    def shown(self, later: Plan) -> dict[str, Any]:
        """What a client is told of it: `brought` tokens came back because of it."""
        brought = sum(len(load.span) for load in later.loads)
        ms = round(self.seconds * 1000, 1)
        return {"decoded": self.decoded, "brought": brought, "ms": ms}


def declined(view: PolicyView, config: PolicyConfig, seconds: float, confidence: float) -> str:
    """Why a turn is not to be probed, in one word; empty when a probe pays.

    `seconds` is what it takes, `confidence` how sure text is of having found what is asked, 0 to 1:
    what it could find besides is worth `policy.probe_worth_s` seconds of waiting.
    """
    cursor = view.adopt_to or view.n_past
    if not probes(config) or config.budget is None:
        return "off"
    if not len(outside(view)):
        return "nothing_out"
    if view.n_tokens - cursor + config.probe_tokens > config.budget // _MAX_BUDGET_SHARE:
        return "long_tail"
    sure = confidence if config.recall == "fused" else 0.0
    return "too_dear" if seconds > (1.0 - sure) * config.probe_worth_s else ""


def outside(view: PolicyView) -> Positions:
    """Indexes of the blocks that only a copy is left of."""
    cursor = view.adopt_to or view.n_past
    in_cache = view.in_cache & (view.adopt_to == 0)
    return np.flatnonzero(view.in_pool & ~in_cache & (view.blocks.ends <= cursor))


def reachable(view: PolicyView) -> Positions:
    """Indexes of the blocks of the history that have rows, resident or copied."""
    known = (view.in_cache | view.in_pool) & (view.blocks.ends <= view.n_past)
    return np.flatnonzero(known)


def spans(view: PolicyView, at: Positions) -> list[list[int]]:
    """Where these blocks are, as block calls want it."""
    starts, ends = view.blocks.starts[at].tolist(), view.blocks.ends[at].tolist()
    return [[start, end] for start, end in zip(starts, ends, strict=True)]


def likeliest(
    view: PolicyView, bounds: KeyBounds, queries: Queries | None, limit: int = MOST_BLOCKS
) -> Positions:
    """Indexes of the blocks that queries could look at most by the bounds of their keys, and of
    those without bounds; ascending, `limit` at most."""
    at = reachable(view)
    if len(at) <= limit or queries is None:
        return at[-limit:]
    found = np.nan_to_num(bounds.peaks(queries, view.blocks)[at], nan=np.inf)
    return np.sort(at[np.argsort(-found, kind="stable")[:limit]])


def sought(answer: object, at: Positions, n_blocks: int, n_tokens: int) -> Scores | None:
    """How much the model looked for each block, 0 to 1: of `key_products` for blocks `at`.

    The softmax over the blocks of their products, its mean over the heads of a layer, and of a
    block the most that any layer gave it at any word: heads by themselves look for one block or
    another at nearly every word, those of a layer together where they want the fact. Rows before
    the last token of the prompt, which is `n_tokens` long, do not count: nothing is answered there.
    None without products.
    """
    if not isinstance(answer, Mapping) or not answer.get("pos"):
        return None
    products = _products(answer)
    known = at[np.array(answer["known"], np.bool_)]
    rows = np.array(answer["pos"]) >= n_tokens - 1
    if not len(known) or not rows.any():
        return None
    logits = products[:, :, rows].astype(np.float64) / np.sqrt(int(answer["n_embd"]))
    weights = np.exp(logits - logits.max(axis=0))
    found = np.zeros(n_blocks)
    found[known] = (weights / weights.sum(axis=0)).mean(axis=3).max(axis=(1, 2))
    return found


def _products(answer: Mapping[str, Any]) -> Floats:
    """[block, layer, row, head]"""
    shape: Sequence[int] = (len(answer["layers"]), len(answer["pos"]), int(answer["n_head"]))
    return floats(answer["data"]).reshape(-1, *shape)
