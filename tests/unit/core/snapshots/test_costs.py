"""What snapshots cost and save: measured rates, trust, the cost of a turn in each dialect."""

from __future__ import annotations

from typing import Any

import pytest

from evoke_proxy.core.snapshots.costs import Costs, SuccessTracker, TenantTrackers, cost_of


def test_unmeasured_costs_allow_a_restore_and_measured_ones_decide() -> None:
    costs = Costs(stall_share=0.1)
    assert costs.worth_restoring(1, 10**12) and costs.worth_saving(1, 10**9)
    costs.prefilled(1000, 1.0)
    costs.restore.note(1_000_000, 1.0)
    assert costs.worth_restoring(5000, 1_000_000)  # 5 s of decoding for 1 s of reading
    assert not costs.worth_restoring(1500, 1_000_000)
    costs.saved(1000, 1_000_000, 1.0, now=100.0)
    assert costs.next_save_at == pytest.approx(109.0)  # a tenth of the time
    assert costs.worth_saving(gain=101, n_tokens=1000)  # 0.1 s of decoding for a second's stall
    assert not costs.worth_saving(gain=99, n_tokens=1000)
    # a save that a request waits for must pay off with its first restore
    assert costs.worth_saving(gain=1001, n_tokens=1000, waited_for=True)
    assert not costs.worth_saving(gain=999, n_tokens=1000, waited_for=True)
    costs.min_gain = 0.0  # whatever it costs
    assert costs.worth_restoring(1, 10**12) and costs.worth_saving(1, 10**9, waited_for=True)


def test_a_request_does_not_wait_for_a_first_save_with_little_gain() -> None:
    costs = Costs(stall_share=0.1)
    assert costs.worth_saving(500, 1000, waited_for=True)
    assert not costs.worth_saving(499, 1000, waited_for=True)


def test_a_prefill_of_few_tokens_is_not_a_measurement() -> None:
    costs = Costs(0.1)
    costs.prefilled(10, 1.0)
    assert costs.prefill.value == 0


def test_trust_ends_after_three_failures_unless_as_many_succeeded() -> None:
    tracker = SuccessTracker()
    assert [tracker.record(100, kept) for kept in (0, 49)] == [False, False]
    assert tracker.is_trusted
    tracker.record(100, 10)
    assert not tracker.is_trusted
    for _ in range(3):
        assert tracker.record(100, 50)
    assert tracker.is_trusted


def test_a_method_without_trust_is_tried_again_and_regains_it() -> None:
    tracker = SuccessTracker()
    for _ in range(3):
        tracker.record(100, 0)
    tried = [tracker.may_try() for _ in range(48)]
    assert sum(tried) == 3 and not any(tried[:15])
    for _ in range(3):
        tracker.record(100, 100)
    assert tracker.may_try() and tracker.may_try()


def test_tenants_have_trackers_of_their_own_and_the_least_recent_is_forgotten() -> None:
    trackers = TenantTrackers()
    for name in ("a", "b"):
        for _ in range(3):
            trackers.of(name).record(100, 0)
    for number in range(1022):
        trackers.of(f"t{number}")
    assert not trackers.of("a").is_trusted and trackers.n_distrusted == 2
    trackers.of("another")
    assert trackers.n_distrusted == 1 and trackers.of("b").is_trusted


@pytest.mark.parametrize(
    ("timings", "usage"),
    [
        ({"cache_n": 5, "prompt_n": 3, "predicted_n": 2}, {"prompt_tokens": 8}),
        ({}, {"cache_read_input_tokens": 5, "input_tokens": 3, "output_tokens": 2}),
        (
            {},
            {
                "input_tokens": 8,
                "output_tokens": 2,
                "input_tokens_details": {"cached_tokens": 5},
            },
        ),
    ],
)
def test_the_cost_of_a_turn_is_read_in_every_dialect(
    timings: dict[str, int], usage: dict[str, Any]
) -> None:
    assert cost_of(timings, usage) == (5, 3, 2)
    assert cost_of({}, {}) == (0, 0, 0)
