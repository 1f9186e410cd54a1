"""The limit bench: the search for the largest number of conversations that work."""

from __future__ import annotations

import pytest

from bench import limit


@pytest.mark.parametrize("largest", [0, 1, 5, 15, 16])
def test_the_search_finds_the_largest_number_of_conversations_that_work(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def together(_: object, count: int, each: int) -> float:
        return float(count * each) if count <= largest else 0.0

    monkeypatch.setattr(limit, "together", together)
    assert limit.most(None, 10) == (largest, 10.0 * largest)  # type: ignore[arg-type]
