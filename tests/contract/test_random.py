"""Random operations on two slots: no crash, no wiped slot, no hash that disagrees."""

from __future__ import annotations

import pytest
from operations import WEIGHTS, play

OPERATIONS = 300


@pytest.mark.parametrize("layout", ["two", "shared"])
def test_random_operations(request: pytest.FixtureRequest, layout: str) -> None:
    done = play(request.getfixturevalue(layout), OPERATIONS).done
    assert sum(done.values()) == OPERATIONS
    assert set(done) == set(WEIGHTS)
