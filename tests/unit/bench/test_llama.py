"""Processes of benches: their processor time, and finding one by its port."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.llama import cpu_s, process


def test_cpu_time_grows_with_work_and_not_with_waiting() -> None:
    own = Path("/proc/self")

    def spent(run: Callable[[], object]) -> float:
        start = cpu_s(own)
        run()
        return cpu_s(own) - start

    # Another thread of this process may use the CPU during some of the waits.
    assert any(spent(lambda: time.sleep(0.1)) < 0.05 for _ in range(9))
    assert spent(lambda: sum(range(20_000_000))) > 0.05


def test_a_port_without_a_server_is_an_error() -> None:
    with pytest.raises(LookupError, match="--port 1"):
        process(1)
