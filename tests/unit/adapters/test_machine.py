"""Measuring the machine: device memory, host memory, disk."""

from __future__ import annotations

from pathlib import Path

from evoke_proxy.adapters.machine import measure

MIB = 1 << 20


def program(path: Path, output: str) -> Path:
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n", "utf-8")
    path.chmod(0o755)
    return path


def test_the_free_memory_of_all_devices_that_the_server_lists_is_added(tmp_path: Path) -> None:
    listed = "Available devices:\n  CUDA0: NVIDIA H200 (143156 MiB, 142000 MiB free)\n"
    listed += "  Vulkan0: Some GPU (8192 MiB, 8000 MiB free)"
    server = program(tmp_path / "server", listed)
    assert measure(server, tmp_path).device == 150_000 * MIB
    assert measure(program(tmp_path / "cpu", "Available devices:"), tmp_path).device is None
    assert measure(tmp_path / "none", tmp_path).device is None


def test_host_memory_and_disk_are_measured(tmp_path: Path) -> None:
    machine = measure(program(tmp_path / "cpu", ""), tmp_path / "not" / "yet" / "there")
    assert machine.ram > 64 * MIB
    assert machine.disk > 0


def test_a_path_that_cannot_be_looked_at_has_no_free_disk(tmp_path: Path) -> None:
    assert measure(program(tmp_path / "cpu", ""), tmp_path / ("x" * 300)).disk == 0
