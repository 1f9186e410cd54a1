"""Counts in untrusted JSON, and moving means of rates."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.model.counts import MAX_TOKENS, Rate, is_count, seconds_of, token_count

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=3,
)


@pytest.mark.parametrize("value", [0, 1, 7.9, MAX_TOKENS, float(MAX_TOKENS)])
def test_a_number_up_to_the_limit_is_a_count(value: float) -> None:
    assert is_count(value)
    assert token_count(value) == int(value)


@pytest.mark.parametrize(
    "value",
    [-1, -0.5, MAX_TOKENS + 1, math.inf, math.nan, 10**400, True, False, None, "3", [3], {}],
)
def test_anything_else_is_no_count_and_is_taken_as_0(value: object) -> None:
    assert not is_count(value)
    assert token_count(value) == 0


@given(JSON)
def test_any_json_value_gives_a_count_and_seconds_within_the_limit(value: object) -> None:
    assert 0 <= token_count(value) <= MAX_TOKENS
    assert 0.0 <= seconds_of(value) <= MAX_TOKENS / 1000


def test_milliseconds_are_converted_to_seconds_and_invalid_ones_are_0() -> None:
    assert seconds_of(1500) == 1.5
    assert seconds_of(0.25) == 0.00025
    for value in (True, -1, MAX_TOKENS + 1, math.nan, "5", None, json.loads("1e999")):
        assert seconds_of(value) == 0.0


def test_a_rate_is_the_first_measurement_and_then_moves_by_three_tenths() -> None:
    rate = Rate()
    assert rate.seconds(100) == 0.0
    rate.note(100, 1.0)
    assert (rate.value, rate.seconds(50)) == (100.0, 0.5)
    rate.note(200, 1.0)
    assert rate.value == pytest.approx(130)


@pytest.mark.parametrize(
    ("amount", "seconds"),
    [(0, 1.0), (-1, 1.0), (10, 0.0), (10, -1.0), (1e308, 1e-308), (math.inf, 1.0)],
)
def test_an_invalid_measurement_does_not_change_a_rate(amount: float, seconds: float) -> None:
    rate = Rate(5.0)
    rate.note(amount, seconds)
    assert rate.value == 5.0
