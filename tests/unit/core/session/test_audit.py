"""What audits found: changes of log probability, and the sentence for each budget."""

from __future__ import annotations

import math

import pytest

from evoke_proxy.core.request.forced_answer import Step
from evoke_proxy.core.session.audit import AuditedAnswer, AuditHistory, advice, compare


def step(token: int, probability: float, best: int) -> Step:
    return Step(token, math.log(probability), {best: math.log(0.9)})


def test_the_change_is_per_token_and_below_0_when_the_budget_costs() -> None:
    given = [step(1, 0.5, 1), step(2, 0.5, 2)]
    whole = [step(1, 1.0, 1), step(2, 0.5, 2)]
    found = compare(384, given, whole)
    assert found.change == pytest.approx(math.log(0.5) / 2)
    assert found.budget == 384 and not found.is_other
    assert compare(384, given, [whole[0], step(2, 0.5, 7)]).is_other


def test_a_history_counts_by_budget() -> None:
    history = AuditHistory()
    assert history.mean_change is None and list(history.by_budget) == []
    history.add(AuditedAnswer(384, -0.5, True))
    history.add(AuditedAnswer(384, 0.1, False))
    history.add(AuditedAnswer(6000, 0.1, False))
    assert history.to_json() == {"audits": 3, "others": 1, "change": -0.1}
    assert list(history.by_budget) == [(384, 2, 1), (6000, 1, 0)]


def test_budgets_are_bounded() -> None:
    history = AuditHistory()
    for budget in range(1000):
        history.add(AuditedAnswer(budget + 1, 0.0, False))
    assert len(list(history.by_budget)) == 16 and history.n_audits == 1000


def test_the_advice_adds_up_all_sessions() -> None:
    one, other = AuditHistory(), AuditHistory()
    for number in range(300):
        one.add(AuditedAnswer(6000, 0.0, number == 0))
    other.add(AuditedAnswer(384, 0.0, True))
    other.add(AuditedAnswer(6000, 0.0, False))
    large, small = advice([one, other])
    assert large["text"] == "A budget of 6,000 tokens changed 1 of 301 audited answers (0.3 %)."
    assert (small["budget"], small["audits"], small["others"]) == (384, 1, 1)
    assert advice([]) == advice([AuditHistory()]) == []


def test_an_impossible_token_does_not_dominate_all_audits() -> None:
    """llama-server reports -3.4e38 for a probability that it rounds to 0."""
    impossible = Step(1, -3.4e38, {1: -3.4e38})
    found = compare(384, [impossible, step(2, 1.0, 2)], [step(1, 1.0, 1), step(2, 1.0, 2)])
    assert found.change == pytest.approx(-52)
