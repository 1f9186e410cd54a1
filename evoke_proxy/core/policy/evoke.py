"""The evoke policy, and the built-in policies derived from it.

Evoke chooses one working set per query and moves as few blocks as possible. Every block with rows,
in the cache or in the host pool, competes for the budget with its keep-score and its relevance to
the query. Chosen blocks that are not resident are loaded; the others are saved and evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import ROLES, FloatArray, Positions
from evoke_proxy.core.model.blocks import Role, count
from evoke_proxy.core.policy.attention import Capture
from evoke_proxy.core.policy.planner import (
    Candidates,
    Choice,
    TailRoom,
    WorkingSet,
    capacity_for_blocks,
    free_tokens,
    required_blocks,
    room_for_blocks,
)
from evoke_proxy.core.policy.registry import Choose, Policy, register
from evoke_proxy.core.policy.selection import (
    SelectionOrder,
    blocks_to_keep,
    leading_last,
    select_blocks,
)
from evoke_proxy.core.policy.standing import (
    Room,
    asked_blocks,
    file_blocks,
    leading_blocks,
    live_blocks,
    rule_blocks,
    system_blocks,
    task_blocks,
)
from evoke_proxy.core.policy.view import DEFAULT_KEEP_WEIGHTS, KeepWeights, PolicyView, keep_scores
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.retrieval.units import Units

# Characters at each end of a long turn that rank the turn's own blocks. The complete query would
# match all of these blocks, because it is their text.
_NARROW_CHARS = 300
# The longest message, in tokens, that is ranked and recovered as a whole, and its largest share of
# the room.
_MAX_UNIT_TOKENS = 768
_MAX_UNIT_SHARE = 0.95
# With more questions than this, the largest unit is smaller, so that each question gets one.
_FEW_QUESTIONS = 3
# Messages that only lead up to the question keep their places in the ranking within this share of
# the room, or within what two of the longest messages leave.
_LEADING_SHARE, _EARLIER_TOKENS = 0.1, 2 * _MAX_UNIT_TOKENS
# The answer directly before the question keeps its place when it takes at most this share of the
# room, or when the question refers to earlier turns.
_ANSWER_SHARE = 0.15
# What the ranking adds to a keep-score in [0, 1]: at least the largest keep-score, so that ranked
# blocks come first.
_RANKED = 1.0
# Scores above those of ranked blocks: of the newest results of a task or a chat's last messages, of
# a task that fits as a whole, of the files that the turn works on, of rules for every answer and
# the message that began the task, of the system prompt with tools, and of a question that is not
# decoded again.
_LIVE, _TASK, _FILES, _RULES, _SYSTEM, _ASKED = 3.0, 4.0, 4.25, 4.5, 4.75, 5.0
# The share of the room beside what stays that the ranking may take in a step of an agent; the rest
# is for the blocks with the highest keep-scores.
_STEP_SHARE = 0.35
# At most this share of the budget is for a question that is not decoded again.
_MAX_ASKED_SHARE = 0.5
# An answer is expected to take at most the budget divided by this.
_MAX_ANSWER_DIVISOR = 2
# Added to the scores of the tail: to blocks to keep, and to blocks that ask the question.
_KEPT, _ASKS = 9.0, 18.0
_USER = ROLES.index(Role.USER)


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
        room = _room_beside_question(view, config)
        rules = files = task = live = np.zeros(len(view.blocks), np.bool_)
        # Room for the ranked units, beside the blocks that stay whatever the query finds.
        left = room
        if room is not None:
            standing = _standing_room(view, config, room)
            rules = rule_blocks(view, standing)
            if parameters.relevance > 0 and uses_text(config):
                files = file_blocks(view, query.files, standing.left(rules), room)
            task = task_blocks(view, standing, rules | files)
            live = live_blocks(view, standing, rules)
            stays = rules | task | live
            left = room - int(view.blocks.lengths[stays].sum()) - config.sink_tokens
        # An agent works on what it has just read and done, which the words of a step do not find.
        share = _STEP_SHARE if view.blocks.is_step else 1.0
        units = Units.of(view.blocks, _max_unit_tokens(left, query, share))
        view.index.expect_vectors(query, view.task.focus)
        keep = keep_scores(view, config.sink_tokens, parameters.weights)
        order = np.zeros(0, np.int64)
        if parameters.relevance > 0 and not _fits(view, config):
            order = _unit_order(view, query, config, units)
            if room is not None:
                leads = leading_blocks(view, _answer_tokens(view, query, room))
                order = leading_last(order, units, leads, _leading_room(room))
        scores = keep + _ranked(order, units)
        if room is not None:
            # Newer live blocks score higher, in case not all of them fit beside the files.
            if live.any():
                scores[live] = _LIVE + np.linspace(0.0, 0.5, len(scores))[live]
            for kept, score in ((task, _TASK), (files, _FILES), (rules, _RULES)):
                scores[kept] = score
            scores[rules & system_blocks(view.blocks)] = _SYSTEM
        worth = keep if view.blocks.is_step else scores
        selection = SelectionOrder(units, order, margin, worth, share)
        asked = asked_blocks(view, int(_MAX_ASKED_SHARE * (config.budget or 0)))

        def select(candidates: Candidates, scores: FloatArray, capacity: int | None) -> WorkingSet:
            return select_blocks(candidates, np.where(asked, _ASKED, scores), capacity, selection)

        # A long tail, or one with text before its question, is partly evicted while it is decoded.
        tail_scores, tail_room = scores, None
        if room is not None and config.budget is not None:
            asks = view.blocks.question_start
            left = _room_beside_tail(view, config, room)
            if 2 * view.n_to_decode > config.budget:
                tail_scores = _tail_scores(view, query, config, keep, scores)
            if 2 * view.n_to_decode > config.budget or left is not None:
                stays = blocks_to_keep(selection, view, scores, room if left is None else left)
                tail_scores = tail_scores + np.where(stays, _KEPT, 0.0)
            if left is not None:
                tail_scores[asks:] += _ASKS
                # Only the text between the earlier blocks and the question.
                stays[asks:] = stays[: view.first_new_block] = False
                tail_room = TailRoom(left, stays, view.n_tokens - int(view.blocks.starts[asks]))
        rounded = scores.round(9)
        tail_rounded = rounded if tail_scores is scores else tail_scores.round(9)
        return Choice(rounded, tail_rounded, select, keeps_earlier=True, tail_room=tail_room)

    return choose


def _fits(view: PolicyView, config: PolicyConfig) -> bool:
    """Return whether prompt and answer should fit budget and cells, so that nothing is evicted.

    An answer is expected to take at most half of the budget; one that takes more is decoded with
    blocks evicted by their keep-scores.
    """
    if config.budget is None:
        return True
    longest = config.budget // _MAX_ANSWER_DIVISOR
    answer = longest if view.max_tokens is None else min(view.max_tokens, longest)
    n_needed = view.n_tokens + answer
    return n_needed <= min(config.budget, view.n_free + count(view.resident))


def _room_beside_question(view: PolicyView, config: PolicyConfig) -> int | None:
    """Return the tokens left for all other blocks beside the question; None without a budget."""
    first = view.blocks.question_start
    start = int(view.blocks.starts[first]) if len(view.blocks) else 0
    room = room_for_blocks(view.n_tokens - start, view.max_tokens, config)
    return None if room is None else max(room, capacity_for_blocks(view, config) or 0)


def _answer_tokens(view: PolicyView, query: Query, room: int) -> int:
    """Return the length of the longest answer before the question that keeps its place.

    A question of the user that refers to earlier turns needs the answer of any length.
    """
    if view.blocks.is_step or (view.blocks.roles[-1:] != _USER).any():
        return 0
    return room if query.n_context else int(_ANSWER_SHARE * room)


def _leading_room(room: int) -> int:
    """Return the tokens within which messages that lead up to the question keep their places."""
    return max(int(_LEADING_SHARE * room), room - _EARLIER_TOKENS)


def _standing_room(view: PolicyView, config: PolicyConfig, room: int) -> Room:
    """Return the room for blocks that stay whatever the query finds, of `room` beside the question.

    Whole messages may use what is left beside the text that the turn decodes.
    """
    n_whole = room_for_blocks(view.n_to_decode, view.max_tokens, config) or 0
    n_whole = max(n_whole, _room_beside_tail(view, config, room) or 0)
    required = required_blocks(view, config.sink_tokens)
    return Room(view.blocks.lengths, required, room, min(room, n_whole))


def _room_beside_tail(view: PolicyView, config: PolicyConfig, room: int) -> int | None:
    """Return the tokens for earlier blocks and for text before the question that the turn decodes.

    Such text is, for example, an answer that another server generated. `free_tokens` are left out,
    for the part of the text that is evicted while it is decoded. None when the turn decodes no such
    text, or when its question takes more than half of the budget.
    """
    starts, budget, asks = view.blocks.starts, config.budget, view.blocks.question_start
    if budget is None or view.first_new_block >= asks:
        return None
    n_asked = view.n_tokens - int(starts[asks])
    n_before = view.n_to_decode - n_asked
    if 2 * n_asked > budget:
        return None
    return min(room, budget - n_asked - free_tokens(n_before, budget, config.block_tokens))


def _max_unit_tokens(capacity: int | None, query: Query, share: float) -> int:
    """Return the length, in tokens, of the longest message that is ranked as a whole.

    The ranking has this share of the capacity. With many questions each has a share of that, and
    one message may take most of a share.
    """
    if capacity is None:
        return _MAX_UNIT_TOKENS
    share *= _MAX_UNIT_SHARE * min(1.0, _FEW_QUESTIONS / max(1, query.n_own + query.n_earlier))
    return min(_MAX_UNIT_TOKENS, int(share * max(0, capacity)))


def _unit_order(view: PolicyView, query: Query, config: PolicyConfig, units: Units) -> Positions:
    """Return the indexes of the units that the query finds, best first, by `policy.recall`.

    With `model`, there are none before the model is probed.
    """
    model_relevance = view.model_relevance if config.recall in ("model", "fused") else None
    if not uses_text(config):
        if model_relevance is None:
            return np.zeros(0, np.int64)
        query = Query()
    first = view.blocks.question_start
    return view.index.unit_order(query, view.blocks, units, first, model_relevance)


def _ranked(order: Positions, units: Units) -> FloatArray:
    """Return what the ranking adds to the score of each block [n]: 1 to 2, or 0 if unranked."""
    by_unit = np.zeros(len(units))
    by_unit[order] = _RANKED + 1.0 - np.arange(len(order)) / max(1, len(order))
    added: FloatArray = by_unit[units.of_block]
    return added


def _tail_scores(
    view: PolicyView, query: Query, config: PolicyConfig, keep: FloatArray, scores: FloatArray
) -> FloatArray:
    """Return the scores [n] by which the turn's own text is evicted while it is decoded.

    Blocks of the question are ranked by the beginning and the end of the question only: the
    complete question contains their words, so it would match all of them.
    """
    first = view.blocks.question_start
    relevance = relevance_scores(view, query.narrowed(_NARROW_CHARS), config)
    tail_scores = scores.copy()
    tail_scores[first:] = (keep + _RANKED * relevance)[first:] + _RANKED
    return tail_scores


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


def evoke_policy(name: str, parameters: EvokeParameters) -> Policy:
    """Return the evoke policy with other parameters, under another name."""
    return Policy(
        name=name,
        choose=evoke_choice(parameters),
        saves_evicted=True,
        uses_query=True,
        can_probe=True,
        capture=Capture("ewma") if parameters.weights.attention > 0 else None,
    )


register(evoke_policy("evoke", EvokeParameters()))
# The baseline without recovery: it makes the same choice, and evicted blocks are lost.
register(Policy(name="discard", choose=evoke_choice(), uses_query=True))
# Messages that must stay can exceed the budget; then blocks of the shortened prompt are evicted.
register(Policy(name="truncate", choose=evoke_choice(), truncates=True))
register(Policy(name="no_eviction", choose=None))
