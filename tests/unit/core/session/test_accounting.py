"""Token accounting: parsing it from a reply, and the forecast of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from slot_model import view_columns

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Adopt, DecodeBudget, Evict, Load, Plan
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.session.accounting import TokenAccounting, TurnRecord, forecast, moved_spans

RECORD = TurnRecord(1, 0.0, "recovered", "evoke", 0.1, 100, 25, 20, 50, 5)
REPORTED: dict[str, Any] = {
    "epoch": 7,
    "n_prompt": 100,
    "resident_before": 50,
    "recovered": 20,
    "decoded": 25,
    "decoded_hidden": 3,
    "omitted": 5,
    "n_resident": 90,
    "n_resident_peak": 95,
    "budget": 96,
    "marker": "ok",
    "auto_evicted": [[0, 64, "s/0"], [64, 70, None]],
    "something_new": [1],
}


def test_the_accounting_is_parsed_from_timings() -> None:
    assert TokenAccounting.parse({"cache_n": 70, "evoke": REPORTED}) == TokenAccounting(
        decoded=25,
        recovered=20,
        resident_before=50,
        omitted=5,
        n_prompt=100,
        decoded_hidden=3,
        n_resident=90,
        n_resident_peak=95,
        budget=96,
        epoch=7,
        marker="ok",
        auto_evicted=((Span(0, 64), "s/0"), (Span(64, 70), None)),
    )


@pytest.mark.parametrize(
    "timings",
    [
        None,
        {},
        {"evoke": 3},
        {"evoke": REPORTED | {"decoded": "many"}},
        {"evoke": REPORTED | {"decoded": None}},
        {"evoke": REPORTED | {"auto_evicted": [[1, 2]]}},
        {"evoke": REPORTED | {"auto_evicted": [[2, 1, "x"]]}},
        {"evoke": REPORTED | {"auto_evicted": 3}},
    ],
)
def test_timings_without_valid_accounting_are_parsed_as_none(timings: Any) -> None:
    assert TokenAccounting.parse(timings) is None


def counts(accounting: TokenAccounting) -> tuple[int, int, int, int]:
    return accounting.decoded, accounting.recovered, accounting.resident_before, accounting.omitted


def test_a_forecast_counts_each_token_once() -> None:
    view = PolicyView(
        *view_columns((), ()), n_tokens=100, n_past=80, resident=(Span(0, 30), Span(60, 95))
    )
    plan = Plan(
        evicts=(Evict(Span(0, 10), "a"), Evict(Span(85, 90))),
        loads=(Load("b", Span(30, 45)),),
        stream=DecodeBudget(96),
    )
    accounting = forecast(view, plan)
    assert counts(accounting) == (20, 15, 40, 25)
    assert (accounting.n_prompt, accounting.n_resident, accounting.budget) == (100, 75, 96)
    assert counts(forecast(view, Plan.EMPTY)) == (20, 0, 50, 30)


def test_rows_in_the_slot_before_an_adoption_do_not_count() -> None:
    view = PolicyView(
        *view_columns((), ()), n_tokens=100, n_past=0, resident=(Span(0, 70),), adopt_to=64
    )
    plan = Plan(adopt=Adopt(64, ("a", "b"), (Span(0, 16), Span(40, 64))))
    assert counts(forecast(view, plan)) == (36, 40, 0, 24)


def test_tokens_that_were_decoded_before_the_request_count_as_decoded() -> None:
    reported = TokenAccounting(decoded=10, recovered=3, resident_before=80, omitted=7, n_prompt=100)
    counted = reported.with_prefilled(60)
    assert counts(counted) == (70, 3, 20, 7) and counted.n_prompt == 100
    assert counts(reported.with_prefilled(99)) == (90, 3, 0, 7)


def test_moved_ranges_are_merged() -> None:
    """A turn moves thousands of small blocks, most of them next to each other."""
    evicts = tuple(Evict(Span(i, i + 10), f"s/{i}") for i in range(0, 1000, 10))
    loads = (Load("a", Span(2000, 2010)), Load("b", Span(2010, 2020)), Load("c", Span(3000, 3010)))
    accounting = TokenAccounting(1, 1, 1, 1, auto_evicted=((Span(990, 1010), None),))
    evicted, recovered = moved_spans(Plan(evicts=evicts, loads=loads), accounting)
    assert evicted == (Span(0, 1010),)
    assert recovered == (Span(2000, 2020), Span(3000, 3010))


def test_a_record_keeps_its_longest_ranges() -> None:
    evicted = tuple(Span(100 * i, 100 * i + length) for i, length in enumerate((3, 9, 1, 9, 5)))
    record = replace(RECORD, evicted=evicted, recovered_spans=evicted[:2])
    assert record.with_ranges(5) is record and record.n_ranges == 7
    shorter = record.with_ranges(3)
    assert shorter.evicted == (Span(100, 109), Span(300, 309), Span(400, 405))
    assert (shorter.recovered_spans, shorter.ranges_left_out) == (evicted[:2], 2)
    none = shorter.with_ranges(0)
    assert (none.evicted, none.recovered_spans, none.ranges_left_out) == ((), (), 7)
    assert none.to_json()["ranges_left_out"] == 7 and none.to_json()["evicted"] == []
