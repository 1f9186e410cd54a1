"""Input of a policy's decision: one slot, one prompt and the task of the conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.model.block_table import ROLES, BlockTable, FloatArray, Mask
from evoke_proxy.core.model.blocks import Role, Span, clipped, without
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.index import Index

# Weights of the old focus and the new topic in the moving average.
_OLD_FOCUS, _NEW_TOPIC = 0.7, 0.3
# A topic with a lower cosine to the focus begins another task.
_SAME_TASK_COSINE = 0.3
# Recency is 1/2 at this distance in tokens. It never reaches 0: distant blocks still have an order.
_HALF_LIFE = 512
# Extra distance, in tokens, of blocks before a task boundary.
_BOUNDARY_DISTANCE = 8 * _HALF_LIFE
# The minimum worth of a block, by role; signals raise it up to 1. Users state facts once, answers
# repeat them, and tools can be called again.
_MIN_WORTH = {Role.SYSTEM: 0.8, Role.USER: 0.6, Role.ASSISTANT: 0.5, Role.TOOL: 0.0}
_MIN_WORTH_BY_ROLE = np.array([_MIN_WORTH[role] for role in ROLES])
_PREFERRED_FACTOR = 2.0
_TOOL = ROLES.index(Role.TOOL)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """The topic of the latest turns, and the start of the task.

    Attributes:
        focus: Unit vector [d] of the topic; None without an embedder.
        start: Position where the client declared a new task; 0 if it never did.
    """

    focus: Vectors | None = None
    start: int = 0

    def after(self, topic: Vectors | None, new_start: int | None) -> Task:
        """Return the task after a turn about `topic`.

        The focus is a moving average of the topics. It is replaced when the topic differs
        (cosine below 0.3) or the client declares a new task, at position `new_start`.
        Without a topic the focus stays, unless a new task begins.
        """
        start = self.start if new_start is None else new_start
        focus = None if new_start is not None else self.focus
        if topic is None or focus is None or focus.shape != topic.shape:
            return Task(focus if topic is None else topic, start)
        if float(focus @ topic) < _SAME_TASK_COSINE:
            return Task(topic, start)
        mixed = _OLD_FOCUS * focus + _NEW_TOPIC * topic
        return Task((mixed / np.linalg.norm(mixed)).astype(np.float32), start)


@dataclass(frozen=True, slots=True, eq=False)
class PolicyView:
    """One slot and one prompt at the moment of a decision.

    The blocks tile the prompt up to its generation prompt. Positions [0, n_past) are not decoded,
    unless the slot adopts saved blocks (`adopt_to`); [n_past, n_tokens) is the tail.

    Attributes:
        blocks: The n blocks of the prompt.
        in_cache: [n] whether the block's rows are in the slot.
        in_pool: [n] whether the host pool has a copy of the block's rows.
        n_tokens: Length of the prompt.
        n_past: Position where decoding begins if no blocks are adopted.
        resident: All rows of the slot. Those from `n_past` on belong to another text and are
            removed when the request starts.
        non_evictable: Rows that llama-server does not evict, in blocks of their own.
        n_free: Number of free cells in the KV cache.
        max_tokens: Limit on the tokens of the answer; None for no limit.
        adopt_to: When above 0, the slot contains another text, and saved blocks cover
            [0, adopt_to).
        pre_restart_resident: Rows resident before a server restart; scored as resident.
        stale: Labels of copies that are no longer needed.
        index: The search index of the session.
        task: The task that the turn belongs to.
        recovered: [n] blocks recovered in this turn or the last ones; None: no block.
        attention: [n] share of attention that each block got last, 0 to 1, with mean 0.5; None
            while none was captured.
        last_attended: [n] turn in which each block last got at least the mean share, and at least
            the turn that created the block; None while no attention was captured.
        model_relevance: [n] relevance of each block by the model's attention in a probe, 0 to 1;
            None without a probe.
    """

    blocks: BlockTable
    in_cache: Mask
    in_pool: Mask
    n_tokens: int
    n_past: int
    resident: tuple[Span, ...] = ()
    non_evictable: tuple[Span, ...] = ()
    n_free: int = 1 << 30
    max_tokens: int | None = None
    adopt_to: int = 0
    pre_restart_resident: tuple[Span, ...] = ()
    stale: tuple[str, ...] = ()
    index: Index = field(default_factory=Index)
    task: Task = field(default_factory=Task)
    recovered: Mask | None = None
    attention: FloatArray | None = None
    last_attended: FloatArray | None = None
    model_relevance: FloatArray | None = None

    @property
    def decode_from(self) -> int:
        """The first position that will be decoded."""
        return self.adopt_to or self.n_past

    @property
    def n_to_decode(self) -> int:
        """How many tokens will be decoded before the first output token."""
        return self.n_tokens - self.decode_from

    @property
    def first_new_block(self) -> int:
        """The index of the first block that this turn decodes."""
        return int(self.blocks.starts.searchsorted(self.decode_from))

    @property
    def reused_rows(self) -> tuple[Span, ...]:
        """Resident rows that belong to the prompt."""
        return clipped(self.resident, Span(0, self.n_past))

    @property
    def foreign_rows(self) -> tuple[Span, ...]:
        """Evictable resident rows of another text.

        The last row of the slot is left out: llama-server does not evict it.
        """
        top = self.resident[-1].end if self.resident else 0
        rows = clipped(self.resident, Span(self.n_past, max(self.n_past, top - 1)))
        return without(rows, self.non_evictable) if rows else ()

    def equals(self, other: PolicyView) -> bool:
        """Whether a decision on the other view, with the same vectors in the index, is the same."""
        return (
            all(getattr(self, name) == getattr(other, name) for name in _COMPARED)
            and self.index is other.index
            and self.task.start == other.task.start
            and _equal(self.task.focus, other.task.focus)
            and all(_equal(getattr(self, name), getattr(other, name)) for name in _COMPARED_ARRAYS)
            and self.blocks.equals(other.blocks)
        )

    def recovered_labels(self, plan: Plan) -> list[str]:
        """Return the labels that a plan recovers, without those that only a restart removed."""
        labels = [load.label for load in plan.loads]
        if plan.adopt is not None and self.pre_restart_resident:
            adopted = self.blocks.labelled(frozenset(plan.adopt.labels))
            adopted &= ~self.blocks.within(self.pre_restart_resident)
            labels += [block.label for block in self.blocks.pick(adopted)]
        return labels


# The fields of a view that `PolicyView.equals` compares by value.
_COMPARED = (
    *("n_tokens", "n_past", "resident", "non_evictable", "n_free", "max_tokens", "adopt_to"),
    *("pre_restart_resident", "stale"),
)
_COMPARED_ARRAYS = (
    *("in_cache", "in_pool", "recovered", "attention", "last_attended", "model_relevance"),
)


def _equal(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    """Return whether two arrays are equal, or both are missing."""
    if one is None or other is None:
        return one is other
    return one is other or bool(np.array_equal(one, other))


@dataclass(frozen=True, slots=True)
class KeepWeights:
    """Weights of the signals of a keep-score; they need not sum to 1, and 0 turns a signal off.

    Attributes:
        recency: Nearness of a block to the end of the prompt.
        focus: Cosine of a block's vector with the focus of the task.
        attention: The share of attention that the block got last.
        rarity: How many words a result of a tool has that few later blocks have.
    """

    recency: float = 0.6
    focus: float = 0.4
    attention: float = 0.0
    rarity: float = 0.33


DEFAULT_KEEP_WEIGHTS = KeepWeights()


def keep_scores(
    view: PolicyView, sink_tokens: int, weights: KeepWeights = DEFAULT_KEEP_WEIGHTS
) -> FloatArray:
    """Return how much each block [n] is worth keeping, in [0, 1], independent of the query.

    The worth is m + (1 - m) s, for the minimum m of the block's author (0 of reminders) and the
    weighted mean s of the available signals, times the block's priority, and times 2 when it is
    preferred; at most 1. Sinks and pinned blocks are worth 1.
    """
    blocks = view.blocks
    least = np.where(blocks.reminders, 0.0, _MIN_WORTH_BY_ROLE[blocks.authors])
    worth = (least + (1 - least) * _mean_signal(view, weights)) * blocks.priority
    worth = np.minimum(1.0, worth * np.where(blocks.preferred, _PREFERRED_FACTOR, 1.0))
    scores: FloatArray = np.where(blocks.pinned | (blocks.starts < sink_tokens), 1.0, worth)
    return scores


def _mean_signal(view: PolicyView, weights: KeepWeights) -> FloatArray:
    """Return the weighted mean [n] of the available signals, in [0, 1]; 0 without any."""
    focus = rarity = None
    is_result = (view.blocks.authors == _TOOL) & ~view.blocks.reminders
    if weights.focus > 0:
        focus = view.index.topic_similarity(view.task.focus, view.blocks)
    if weights.rarity > 0 and is_result.any():
        rarity = view.index.rarity(view.blocks)
    signals = (
        (weights.recency, _recency(view)),
        (weights.focus, focus),
        (weights.attention, view.attention),
        (weights.rarity * is_result, rarity),
    )
    n = len(view.blocks)
    total, total_weight = np.zeros(n), np.zeros(n)
    for weight, signal in signals:
        if signal is not None:
            total += weight * signal
            total_weight += weight
    return np.divide(total, total_weight, out=total, where=total_weight > 0)


def _recency(view: PolicyView) -> FloatArray:
    """Return h / (h + d) [n], for h = _HALF_LIFE and the distance d of a block to the prompt's end.

    Blocks before the start of the task count as _BOUNDARY_DISTANCE further away.
    """
    ends = view.blocks.ends
    distance = view.n_tokens - ends
    distance = distance + np.where(ends <= view.task.start, _BOUNDARY_DISTANCE, 0)
    recency: FloatArray = _HALF_LIFE / (_HALF_LIFE + distance)
    return recency
