"""The decode bench: ratios within noise."""

from __future__ import annotations

import pytest

from bench import decode


def speeds(**changed: list[float]) -> dict[str, list[decode.Speed]]:
    usual = [100.0, 90.0, 110.0, 100.0]
    return {arm: [(speed, 1.0) for speed in changed.get(arm, usual)] for arm in decode.ARMS}


@pytest.mark.parametrize(
    ("patched", "expected"),
    [([100.0, 90.0, 110.0, 100.0], True), ([95.0, 85.5, 104.5, 95.0], False)],
)
def test_a_ratio_is_within_noise_when_stock_differs_as_much(
    patched: list[float], expected: bool
) -> None:
    noisy = speeds(stock_again=[99.0, 90.0, 111.1, 100.0], patched=patched)
    rows = [decode.row(arm, noisy) for arm in decode.ARMS]
    total = decode.summary(rows)
    assert total["within_noise"] is expected
    assert total["patched_over_stock"] == pytest.approx(1.0 if expected else 0.95)
    assert total["noise_low"] == pytest.approx(0.99 + 0.15 * 0.01)
