"""Baselines of other authors, an oracle, and variants of the evoke policy.

`streaming` is StreamingLLM (Xiao et al., "Efficient Streaming Language Models with Attention
Sinks", ICLR 2024, arXiv:2309.17453): the first `start` tokens as attention sinks and the last
`recent` ones, published with start 4 and recent 512 to 2000. Here `start` is `policy.sink_tokens`,
and `recent` is the rest of the budget in whole blocks. Positions are those of the text, where the
original counts them inside the cache. `recency` is the same without sinks: the window attention
that the paper compares with. With both, evicted blocks are lost.

`infllm`: sinks, a local window, and the K blocks that are most relevant to the query, after Xiao et
al., "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory"
(NeurIPS 2024, arXiv:2402.04617), published with blocks of 128 tokens, 128 initial and 4096 local
tokens and 16 blocks a look-up. Here blocks are `policy.block_tokens`, the initial tokens
`policy.sink_tokens`, K is 8 (other values: `infllm_k2`, `infllm_k4`, `infllm_k16`), and the window
takes what the budget has left, a quarter of it at least. The original finds blocks by the mean of
their representative keys, for each layer and at every step, and moves all of them to one far
position. Here one look-up a turn ranks blocks by their text, as for `evoke`, and rows return to
their own positions.

The next keep the blocks that the model attended to, as llama-server captured it. Evicted blocks are
lost, except with `arkvale`. While nothing was captured, age decides.

`h2o`, heavy hitters (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of
Large Language Models", NeurIPS 2023, arXiv:2306.14048): the sum of all rows; half of the room for
the newest blocks, half for those with the largest sums. `snapkv` (Li et al., "SnapKV: LLM Knows
What You are Looking for Before Generation", NeurIPS 2024, arXiv:2404.14469): the mean of the last
32 rows, and a window of `policy.recent_tokens` over the newest. `tova` (Oren et al., "Transformers
are Multi-State RNNs", EMNLP 2024, arXiv:2401.06104): the last row alone, and no window. `scored`
keeps the blocks that were attended to last: those whose tokens had more than the mean of the
attention in a turn, or were decoded in it.

`arkvale` (Chen et al., "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value
Eviction", NeurIPS 2024) saves what it evicts, and loads the blocks that queries could attend to
most by the bounds of their keys (`policy.attention.KeyBounds`), beside the window of `snapkv`. The
queries are those of the end of the previous prompt: what was asked last, not what is asked now,
which is not decoded yet. The original asks at every step, for each head separately.

Differences from the originals: whole blocks by the mean of their tokens and of the captured layers
and heads, where the originals choose tokens for each head; one choice a turn, before it is decoded,
where they choose at every step or at the end of a prompt. Rows are those of generated tokens and of
the end of each part of a prompt, so that sums lack most rows of the prompt.

`oracle` is the ceiling of retrieval: requests say which blocks hold the answer (`evoke_oracle`).
These blocks come first; the rest of the budget is spent as `evoke` spends it. So the oracle has
what `evoke` has, and the answer. Where it recalls more, `evoke` did not find the block; where it
recalls less than without eviction, that is the cost of the holes.

`bm25` and `random` fill the budget with blocks by plain BM25 (`bench.fills`) of the turn's text,
and in an order drawn anew each turn. Evicted blocks are saved, as with `evoke`. A question that
`bm25` answers does not show that the ranking of `evoke` is good, nor one that `random` answers that
the budget is small.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from bench import fills
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import FloatArray, Mask, blocks_named
from evoke_proxy.core.policy import evoke, planner
from evoke_proxy.core.policy.attention import Capture
from evoke_proxy.core.policy.evoke import EvokeParameters, evoke_choice, evoke_policy
from evoke_proxy.core.policy.planner import Candidates, Choice, WorkingSet, by_score, first_fit
from evoke_proxy.core.policy.registry import Choose, Policy, register
from evoke_proxy.core.policy.view import KeepWeights, PolicyView
from evoke_proxy.core.retrieval.query import Query

# Orders blocks with equal scores by age, and nothing else.
_AGE_WEIGHT = 1e-6
# How much more attention a block must have than one that is already in place.
_MARGIN = 0.1
# The window of InfLLM gets at least the room divided by this.
_MIN_WINDOW_DIVISOR = 4
_N_BLOCKS, _OTHER_N_BLOCKS = 8, (1, 2, 4, 8, 16, 50)
# Above every score, that of requested blocks included.
_GOLD = 100.0

# The blocks that fill a room, from candidates and their scores.
_Fill = Callable[[Candidates, FloatArray, int], Mask]
# How much of a room is for the newest blocks.
_Window = Callable[[PolicyConfig, int], int]


def age_scores(view: PolicyView) -> FloatArray:
    """Return one value in (0, 1] for each block [n]: the newer the higher."""
    ages: FloatArray = view.blocks.ends / max(1, view.n_tokens)
    return ages


def newest(candidates: Candidates, wanted: Mask, room: int) -> Mask:
    """Return the newest wanted blocks that fit, up to the first one that does not."""
    chosen = np.zeros(len(wanted), np.bool_)
    indexes = np.flatnonzero(wanted)[::-1]
    chosen[indexes[candidates.lengths[indexes].cumsum() <= room]] = True
    return chosen


def _selecting(fill: _Fill) -> Callable[[Candidates, FloatArray, int | None], WorkingSet]:
    """Return what selects the working set that fills the capacity in this way."""

    def select(candidates: Candidates, scores: FloatArray, capacity: int | None) -> WorkingSet:
        return planner.fill_capacity(candidates, capacity, partial(fill, candidates, scores))

    return select


def _by_age(view: PolicyView, _: Query, config: PolicyConfig) -> Choice:
    """Keep a window over the newest blocks."""

    def fill(candidates: Candidates, _: FloatArray, room: int) -> Mask:
        return newest(candidates, candidates.resident & ~candidates.required, room)

    ages = age_scores(view)
    return Choice(ages, ages, _selecting(fill))


def _by_relevance(n_blocks: int) -> Choose:
    """Return a choice of `n_blocks` relevant blocks beside a window over the newest."""

    def fill(candidates: Candidates, scores: FloatArray, room: int) -> Mask:
        optional, lengths = candidates.optional, candidates.lengths
        local = newest(candidates, optional, room // _MIN_WINDOW_DIVISOR)
        relevant = optional & ~local & (scores > _AGE_WEIGHT)
        best = by_score(relevant, scores, candidates.blocks)[:n_blocks]
        found = first_fit(best, lengths, room - int(lengths[local].sum()))
        rest = room - int(lengths[found].sum())
        return found | newest(candidates, optional & ~found, rest)

    def choose(view: PolicyView, query: Query, config: PolicyConfig) -> Choice:
        relevance = evoke.relevance_scores(view, query, config)
        scores = relevance.round(9) + _AGE_WEIGHT * age_scores(view)
        return Choice(scores, scores, _selecting(fill), keeps_earlier=True)

    return choose


def _by_attention(scored: Callable[[PolicyView], FloatArray], window: _Window) -> Choose:
    """Return a choice of the blocks with the highest scores beside a window over the newest."""

    def choose(view: PolicyView, _: Query, config: PolicyConfig) -> Choice:
        def fill(candidates: Candidates, scores: FloatArray, room: int) -> Mask:
            in_place = candidates.optional & candidates.was_resident
            local = newest(candidates, in_place, window(config, room))
            adjusted = scores + np.where(candidates.was_resident, _MARGIN, 0.0)
            best = by_score(candidates.optional & ~local, adjusted, candidates.blocks)
            remaining = room - int(candidates.lengths[local].sum())
            return local | first_fit(best, candidates.lengths, remaining)

        ages = age_scores(view)
        return Choice(scored(view) + _AGE_WEIGHT * ages, ages, _selecting(fill))

    return choose


def _attention(view: PolicyView) -> FloatArray:
    """Return the share of attention that each block [n] got last; 0 while none was captured."""
    return np.zeros(len(view.blocks)) if view.attention is None else view.attention.round(9)


def _last_turns(view: PolicyView) -> FloatArray:
    """Return the turn in which each block [n] was last attended to, or else was cut."""
    turns = view.blocks.turns if view.last_attended is None else view.last_attended
    return turns.astype(np.float64)


def _with_gold(view: PolicyView, query: Query, config: PolicyConfig) -> Choice:
    """Choose the blocks that the query's `gold` names, then what `evoke` chooses."""
    choice = evoke_choice()(view, query, config)
    return replace(choice, scores=choice.scores + _GOLD * blocks_named(view.blocks, query.gold))


def _in_order(order: Callable[[PolicyView, Query], Sequence[int]]) -> Choose:
    """Return a choice of the blocks that come first in an order of all indexes."""

    def fill(candidates: Candidates, scores: FloatArray, room: int) -> Mask:
        best = by_score(candidates.optional, scores, candidates.blocks)
        return first_fit(best, candidates.lengths, room)

    def choose(view: PolicyView, query: Query, config: PolicyConfig) -> Choice:
        scores = np.zeros(len(view.blocks))
        scores[list(order(view, query))] = np.linspace(1.0, 0.0, len(scores))
        return Choice(scores, scores, _selecting(fill))

    return choose


def _by_words(view: PolicyView, query: Query) -> Sequence[int]:
    return fills.bm25([block.text for block in view.blocks], query.text)


def _by_chance(view: PolicyView, _: Query) -> Sequence[int]:
    return random.Random(view.n_tokens).sample(range(len(view.blocks)), len(view.blocks))


register(Policy(name="recency", choose=_by_age, keeps_sinks=False))
register(Policy(name="streaming", choose=_by_age))
for _name, _k in (("infllm", _N_BLOCKS), *((f"infllm_k{k}", k) for k in _OTHER_N_BLOCKS)):
    _chosen = _by_relevance(_k)
    register(
        Policy(name=_name, choose=_chosen, saves_evicted=True, uses_query=True, can_probe=True)
    )
_half = _by_attention(_attention, lambda _, room: room // 2)
register(Policy(name="h2o", choose=_half, capture=Capture("sum")))
_beside_recent = _by_attention(_attention, lambda config, room: min(room, config.recent_tokens))
register(Policy(name="snapkv", choose=_beside_recent, capture=Capture("snapkv")))
_newest_row = Capture("ewma", decay=0.0)
_heaviest = _by_attention(_attention, lambda *_: 0)
register(Policy(name="tova", choose=_heaviest, capture=_newest_row))
_latest = _by_attention(_last_turns, lambda *_: 0)
register(Policy(name="scored", choose=_latest, capture=Capture("ewma")))
_by_bounds = Capture("ewma", queries=16, read="queries")
register(Policy(name="arkvale", choose=_beside_recent, saves_evicted=True, capture=_by_bounds))
register(Policy(name="oracle", choose=_with_gold, saves_evicted=True, uses_query=True))
_filled = Policy(name="bm25", choose=_in_order(_by_words), saves_evicted=True, uses_query=True)
register(_filled)
register(replace(_filled, name="random", choose=_in_order(_by_chance)))
# The model's attention as a signal of the keep-score.
register(evoke_policy("evoke_attention", EvokeParameters(weights=KeepWeights(attention=0.3))))
# Without and with a larger margin for blocks that are in place.
for _margin in (0.0, 0.2, 0.5):
    register(evoke_policy(f"evoke_margin_{_margin:g}", EvokeParameters(margin=_margin)))
# The keep-score by the task's focus alone, or by no signal, without the query.
for _name, _focus in (("evoke_focus", 0.4), ("evoke_no_signal", 0.0)):
    _weights = KeepWeights(recency=0.0, focus=_focus, rarity=0.0)
    register(evoke_policy(_name, EvokeParameters(weights=_weights, relevance=0.0, margin=0.0)))
