"""What audits found: how probable given answers would have been without eviction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.request.forced_answer import Step

# Budgets that are counted apart; further ones are not counted.
_MAX_BUDGETS = 16
# Least log probability of a token: llama-server reports -3.4e38 for a probability below 1e-45.
_LEAST_LOGPROB = -104.0


@dataclass(frozen=True, slots=True)
class AuditedAnswer:
    """One answer that was generated again, with the blocks of its turn and with all.

    Attributes:
        budget: Budget of the turn, tokens.
        change: Log probability of the answer with the blocks of its turn, less that with all
            blocks, per token in nats. Below 0: the answer is less probable with the budget.
        is_other: Whether the most probable token is another at some token of the answer.
    """

    budget: int
    change: float
    is_other: bool


def compare(budget: int, budgeted: Sequence[Step], whole: Sequence[Step]) -> AuditedAnswer:
    """Compare the steps of an answer with the blocks of its turn with those with all blocks."""
    total = _logprob(budgeted) - _logprob(whole)
    is_other = any(ours.best != theirs.best for ours, theirs in zip(budgeted, whole, strict=True))
    return AuditedAnswer(budget, total / len(budgeted), is_other)


def _logprob(steps: Sequence[Step]) -> float:
    return sum(max(step.logprob, _LEAST_LOGPROB) for step in steps)


class AuditHistory:
    """The audited answers of a conversation.

    Attributes:
        n_audits: Number of audited answers.
        n_others: Number of those with another most probable token.
        mean_change: Mean change of the log probability per token; None before the first audit.
    """

    def __init__(self) -> None:
        self.n_audits = self.n_others = 0
        self._total = 0.0
        self._by_budget: dict[int, tuple[int, int]] = {}

    @property
    def mean_change(self) -> float | None:
        """See the class."""
        return round(self._total / self.n_audits, 4) if self.n_audits else None

    @property
    def by_budget(self) -> Iterable[tuple[int, int, int]]:
        """For each budget: the budget, its audited answers, those with another token."""
        return ((budget, *counts) for budget, counts in self._by_budget.items())

    def add(self, answer: AuditedAnswer) -> None:
        """Record one more audited answer."""
        self.n_audits += 1
        self.n_others += answer.is_other
        self._total += answer.change
        if answer.budget in self._by_budget or len(self._by_budget) < _MAX_BUDGETS:
            audits, others = self._by_budget.get(answer.budget, (0, 0))
            self._by_budget[answer.budget] = audits + 1, others + answer.is_other

    def to_json(self) -> dict[str, Any]:
        """The history as operators see it."""
        return {"audits": self.n_audits, "others": self.n_others, "change": self.mean_change}


def advice(histories: Iterable[AuditHistory]) -> list[dict[str, Any]]:
    """Return for each budget how many answers were audited and changed, the largest budget first.

    `text` says it in one sentence.
    """
    found: dict[int, tuple[int, int]] = {}
    for history in histories:
        for budget, audits, others in history.by_budget:
            before = found.get(budget, (0, 0))
            found[budget] = before[0] + audits, before[1] + others
    return [
        {
            "budget": budget,
            "audits": audits,
            "others": others,
            "text": _sentence(budget, audits, others),
        }
        for budget, (audits, others) in sorted(found.items(), reverse=True)
    ]


def _sentence(budget: int, audits: int, others: int) -> str:
    return (
        f"A budget of {budget:,} tokens changed {others} of {audits:,} audited answers"
        f" ({100 * others / audits:.1f} %)."
    )
