"""Fusing scores of several signals, and rankings of several questions."""

from __future__ import annotations

import numpy as np
import pytest

from evoke_proxy.core.retrieval.fusion import Ranking, interleaved, standardized, with_neighbours

LENGTHS = np.full(10, 20)


def ranking(*order: int, weight: float = 1.0) -> Ranking:
    return Ranking(np.array(order, np.int64), weight)


def test_standardized_scores_have_mean_0_and_deviation_1() -> None:
    scores = standardized(np.array([1.0, 2.0, 6.0]))
    assert scores.mean() == pytest.approx(0.0) and scores.std() == pytest.approx(1.0)
    assert standardized(np.full(3, 0.7)).tolist() == [0.0, 0.0, 0.0]
    assert standardized(np.zeros(0)).tolist() == []


def test_a_unit_gets_a_share_of_its_neighbours() -> None:
    values = np.array([0.0, 4.0, 0.0, 0.0])
    assert with_neighbours(values, [0.5]).tolist() == [2.0, 4.0, 2.0, 0.0]
    assert with_neighbours(values, [0.5, 0.25]).tolist() == [2.0, 4.0, 2.0, 1.0]
    assert with_neighbours(np.ones(1), [0.5, 0.25]).tolist() == [1.0]


def test_units_that_are_passed_over_separate_no_neighbours_and_have_those_beside_them() -> None:
    values, linked = np.array([0.0, 1.0, 4.0, 0.0, 0.0]), np.array([0, 2, 4])
    assert with_neighbours(values, [0.5, 0.25], linked).tolist() == [2.0, 3.0, 4.0, 2.25, 2.0]
    assert with_neighbours(values, [0.5], np.arange(5)).tolist() == [0.5, 3.0, 4.5, 2.0, 0.0]


def test_rankings_of_equal_weight_alternate_without_repeating_a_unit() -> None:
    found = interleaved([ranking(1, 2, 3), ranking(3, 4)], LENGTHS)
    assert found.tolist() == [1, 3, 2, 4]


def test_a_ranking_of_half_the_weight_gets_half_as_many_units() -> None:
    found = interleaved([ranking(1, 2, 3, 4), ranking(7, 8, weight=0.5)], LENGTHS)
    assert found.tolist() == [1, 2, 7, 3, 4, 8]


def test_rankings_alternate_by_tokens_and_not_by_units() -> None:
    lengths = np.array([100, 100, 100, 10, 10, 10])
    assert interleaved([ranking(0, 1, 2), ranking(3, 4, 5)], lengths).tolist() == [3, 4, 5, 0, 1, 2]


def test_empty_rankings_give_an_empty_order() -> None:
    assert interleaved([], LENGTHS).tolist() == []
    assert interleaved([ranking(), ranking(5)], LENGTHS).tolist() == [5]
