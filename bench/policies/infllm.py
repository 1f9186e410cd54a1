"""InfLLM on blocks: sinks, a local window, and the K blocks that are most relevant to the query.

After Xiao et al., "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient
Context Memory" (NeurIPS 2024, arXiv:2402.04617), published with blocks of 128 tokens, 128 initial
and 4096 local tokens and 16 blocks a look-up. Here blocks are `policy.block_tokens`, the initial
tokens `policy.sink_tokens`, K is 8 (other values: `infllm_k2`, `infllm_k4`, `infllm_k16`), and the
window takes what the budget has left, a quarter of it at least.

The original finds blocks by the mean of their representative keys, for each layer and at every
step, and moves all of them to one far position. Here one look-up a turn ranks blocks by their text,
as for `evoke`, and rows return to their own positions.
"""

from __future__ import annotations

from bench.policies.by_age import age_scores, newest
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import FloatArray, Mask
from evoke_proxy.core.policy.evoke import relevance_scores
from evoke_proxy.core.policy.planner import (
    Candidates,
    Choice,
    WorkingSet,
    by_score,
    fill_capacity,
    first_fit,
)
from evoke_proxy.core.policy.registry import Choose, Policy, register
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.query import Query

# The window gets at least the room divided by this.
_MIN_WINDOW_DIVISOR = 4
# Orders blocks with equal relevance by age, and nothing else.
_AGE_WEIGHT = 1e-6
N_BLOCKS = 8
OTHER_N_BLOCKS = (1, 2, 4, 8, 16, 50)


def choice(n_blocks: int) -> Choose:
    """Return a choice of `n_blocks` relevant blocks beside a window over the newest."""

    def choose(view: PolicyView, query: Query, config: PolicyConfig) -> Choice:
        def select(candidates: Candidates, scores: FloatArray, capacity: int | None) -> WorkingSet:
            def fill(room: int) -> Mask:
                optional, lengths = candidates.optional, candidates.lengths
                local = newest(candidates, optional, room // _MIN_WINDOW_DIVISOR)
                relevant = optional & ~local & (scores > _AGE_WEIGHT)
                best = by_score(relevant, scores, candidates.blocks)[:n_blocks]
                found = first_fit(best, lengths, room - int(lengths[local].sum()))
                rest = room - int(lengths[found].sum())
                return found | newest(candidates, optional & ~found, rest)

            return fill_capacity(candidates, capacity, fill)

        relevance = relevance_scores(view, query, config)
        scores = relevance.round(9) + _AGE_WEIGHT * age_scores(view)
        return Choice(scores, scores, select, keeps_earlier=True)

    return choose


def _policy(name: str, n_blocks: int) -> Policy:
    return Policy(
        name=name,
        choose=choice(n_blocks),
        saves_evicted=True,
        uses_query=True,
        can_probe=True,
    )


register(_policy("infllm", N_BLOCKS))
for _n_blocks in OTHER_N_BLOCKS:
    register(_policy(f"infllm_k{_n_blocks}", _n_blocks))
