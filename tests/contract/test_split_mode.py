"""Tensor parallelism: block calls are off, and the reason is reported."""

from __future__ import annotations

from pathlib import Path

from native import run

PROGRAM = Path(__file__).parents[1] / "split_mode/split_mode.cpp"


def test_blocks_are_refused_on_the_meta_backend_of_two_cpu_devices(tmp_path: Path) -> None:
    printed = run(PROGRAM, tmp_path)
    assert "two devices, tensor parallelism: each row is split over devices" in printed
