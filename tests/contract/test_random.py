"""Random operations on two slots: no crash, no wiped slot, no hash and no row that disagrees."""

from __future__ import annotations

import pytest
from operations import WEIGHTS, play

OPERATIONS = 300


@pytest.mark.parametrize("layout", ["two", "shared"])
def test_random_operations(request: pytest.FixtureRequest, layout: str) -> None:
    model = play(request.getfixturevalue(layout), OPERATIONS)
    assert sum(model.done.values()) == OPERATIONS
    assert set(model.done) == set(WEIGHTS)
    assert model.compared > 1000
