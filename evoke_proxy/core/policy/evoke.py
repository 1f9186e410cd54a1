"""The evoke policy, and the built-in policies derived from it.

Evoke chooses one working set per query and moves as few blocks as possible. Every block with rows,
in the cache or in the host pool, competes for the budget with its keep-score and its relevance to
the query. Chosen blocks that are not resident are loaded; the others are saved and evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import ROLES, FloatArray, Mask, Positions
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.policy.attention import Capture
from evoke_proxy.core.policy.planner import (
    Candidates,
    Choice,
    WorkingSet,
    choose_best,
    room_for_blocks,
)
from evoke_proxy.core.policy.registry import Choose, Policy, register
from evoke_proxy.core.policy.view import DEFAULT_KEEP_WEIGHTS, KeepWeights, PolicyView, keep_scores
from evoke_proxy.core.retrieval.query import Query

# Characters at each end of a long turn that rank the turn's own blocks. The complete query would
# match all of these blocks, because it is their text.
_NARROW_CHARS = 300
# The files that a turn works on get at most this share of the room for blocks.
_MAX_FILE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class EvokeParameters:
    """Parameters of the evoke policy.

    Attributes:
        weights: Weights of the keep-score's signals.
        relevance: Weight of the relevance to the query, beside a keep-score in [0, 1].
        margin: By how much the score of a block must exceed that of a resident block to replace it;
            a block that was just recovered counts with twice the margin.
    """

    weights: KeepWeights = DEFAULT_KEEP_WEIGHTS
    relevance: float = 2.0
    margin: float = 0.1


def evoke_choice(parameters: EvokeParameters = EvokeParameters()) -> Choose:
    """Return the choice function of the evoke policy with these parameters."""

    def choose(view: PolicyView, query: Query, config: PolicyConfig) -> Choice:
        was_recovered = view.recovered if view.recovered is not None else False
        margin = parameters.margin * (1.0 + np.where(was_recovered, 1.0, 0.0))

        def select(candidates: Candidates, scores: FloatArray, capacity: int | None) -> WorkingSet:
            return choose_best(candidates, scores, capacity, margin)

        scores_for = _scorer(view, query, config, parameters)
        scores = tail_scores = scores_for(query)
        has_new_blocks = len(view.blocks) and view.blocks.starts[-1] >= view.decode_from
        if config.budget is not None and has_new_blocks:
            narrow = query.narrowed(_NARROW_CHARS)
            tail_scores = scores if narrow is query else scores_for(narrow)
        return Choice(scores, tail_scores, select, keeps_earlier=True)

    return choose


def _scorer(
    view: PolicyView, query: Query, config: PolicyConfig, parameters: EvokeParameters
) -> Callable[[Query], FloatArray]:
    """Return a function that scores the blocks of a view for a query."""
    base_scores = keep_scores(view, config.sink_tokens, parameters.weights)
    reread = reread_file_blocks(view, query, config) if uses_text(config) else None

    def scores_for(query: Query) -> FloatArray:
        relevance = relevance_scores(view, query, config)
        if reread is not None:
            relevance[reread] = 1.0
        scores: FloatArray = (base_scores + parameters.relevance * relevance).round(9)
        return scores  # rounded, so that the order of summation does not change the plan

    return scores_for


def uses_text(config: PolicyConfig) -> bool:
    """Return whether the text of the blocks decides their relevance, alone or beside the model."""
    return config.recall in ("text", "fused")


def relevance_scores(view: PolicyView, query: Query, config: PolicyConfig) -> FloatArray:
    """Return the relevance of each block [n] to a query, in [0, 1], by `policy.recall`.

    While the model has not been probed, `fused` is the relevance by text, and `model` is 0.
    """
    if uses_text(config):
        model_relevance = view.model_relevance if config.recall == "fused" else None
        return view.index.relevance(query, view.blocks, view.first_new_block, model_relevance)
    if config.recall == "model" and view.model_relevance is not None:
        return view.index.relevance(
            Query(), view.blocks, view.first_new_block, view.model_relevance
        )
    return np.zeros(len(view.blocks))


def reread_file_blocks(view: PolicyView, query: Query, config: PolicyConfig) -> Mask:
    """Return the blocks of the files that the turn's tools were called with.

    Retrieval ranks blocks by their words, and most lines of a file share none with the query. But
    a tool call with the file's path shows that the complete file matters: it may be edited, or
    compared with a new reading. Each file's latest reading comes first, then the later messages
    that name the file, the latest first. A message is taken completely or not at all. All of them
    together get at most half of the room for blocks.
    """
    wanted = np.zeros(len(view.blocks), np.bool_)
    room = room_for_blocks(view.n_to_decode, view.max_tokens, config)
    remaining = view.n_tokens if room is None else int(_MAX_FILE_SHARE * room)
    for path in query.files:
        named = view.index.named(path, view.blocks, view.first_new_block)
        for message in _messages_since_reading(view, named):
            in_message = named[view.blocks.messages[named] == message]
            length = int(view.blocks.lengths[in_message].sum())
            if length <= remaining:
                wanted[in_message] = True
                remaining -= length
    return wanted


def _messages_since_reading(view: PolicyView, named: Positions) -> list[int]:
    """Return the message of a file's latest reading, then the later ones, the latest first.

    A reading is a tool result that is at least half as long as the longest result that names the
    file; the result of an edit is much shorter.
    """
    blocks = view.blocks
    results = named[blocks.roles[named] == ROLES.index(Role.TOOL)]
    if not len(results):
        return []
    lengths = np.bincount(blocks.messages[results], blocks.lengths[results])
    reading = int(np.flatnonzero(2 * lengths >= lengths.max())[-1])
    messages = np.unique(blocks.messages[named])
    return [reading, *messages[messages > reading][::-1].tolist()]


def evoke_policy(name: str, parameters: EvokeParameters) -> Policy:
    """Return the evoke policy with other parameters, under another name."""
    return Policy(
        name=name,
        choose=evoke_choice(parameters),
        saves_evicted=True,
        quotes_evicted=True,
        uses_query=True,
        probes=True,
        capture=Capture("ewma") if parameters.weights.attention > 0 else None,
    )


register(evoke_policy("evoke", EvokeParameters()))
# The control without recovery: it makes the same choice, and loses evicted blocks.
register(Policy(name="discard", choose=evoke_choice(), uses_query=True))
# The shortened prompt fits the budget, or nearly fits it.
register(Policy(name="truncate", choose=evoke_choice(), truncates=True))
register(Policy(name="no_eviction", choose=None))
