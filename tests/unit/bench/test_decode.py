"""The decode bench: ratios within noise, percentiles and the CPU time of a process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

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


def test_a_percentile_is_interpolated_between_two_values() -> None:
    assert decode.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert decode.percentile([1.0, 2.0], 0.25) == 1.25
    assert decode.percentile([7.0], 0.95) == 7.0


def test_cpu_time_grows_with_work_and_not_with_waiting() -> None:
    own = Path("/proc/self")

    def spent(run: Callable[[], object]) -> float:
        start = decode.cpu_s(own)
        run()
        return decode.cpu_s(own) - start

    # Another thread of this process may use the CPU during some of the waits.
    assert any(spent(lambda: time.sleep(0.1)) < 0.05 for _ in range(9))
    assert spent(lambda: sum(range(20_000_000))) > 0.05


def test_a_port_without_a_server_is_an_error() -> None:
    with pytest.raises(LookupError, match="--port 1"):
        decode.process(1)
