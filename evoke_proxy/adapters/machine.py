"""Measures the free memory of this machine: devices, host memory, disk."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from evoke_proxy.core.servers.memory_plan import Machine

_MIB = 1 << 20
_TIMEOUT_S = 20.0
# A line of `llama-server --list-devices`, whatever the backend.
_DEVICE = re.compile(
    r"^ {1,8}\w{1,40}: .{0,200}\((\d{1,9}) MiB, (\d{1,9}) MiB free\)", re.MULTILINE
)
_MEMINFO = Path("/proc/meminfo")


def measure(server: Path | None, disk: Path) -> Machine:
    """Return the memory that is free now, in bytes.

    `server` is a llama-server, whose devices count: a build for the CPU lists none. Without one,
    the devices that nvidia-smi or rocm-smi list count. The free memory of all devices is added.
    `disk` is a path on the disk to measure, which need not exist.
    """
    device = _listed(server) if server is not None else (_nvidia() or _rocm())
    return Machine(device or None, _available_ram(), _free_disk(disk))


def _listed(server: Path) -> int:
    devices = _DEVICE.findall(_output([str(server), "--list-devices"]))
    return sum(int(free) for _, free in devices) * _MIB


def _nvidia() -> int:
    output = _output(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"])
    return sum(int(line) for line in output.split() if line.isdigit()) * _MIB


def _rocm() -> int:
    output = _output(["rocm-smi", "--showmeminfo", "vram", "--csv"])
    rows = [line.split(",") for line in output.splitlines()[1:]]
    sizes = [row[1:3] for row in rows if len(row) > 2 and row[1].isdigit() and row[2].isdigit()]
    return sum(int(total) - int(used) for total, used in sizes)


def _output(command: list[str]) -> str:
    """Return the output of a program; "" when it is missing, fails or takes over 20 seconds."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
        if done.returncode == 0:
            return done.stdout
    return ""


def _available_ram() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_disk(path: Path) -> int:
    """Return the free bytes of the disk on which `path` is, or would be created.

    0 for a path that this user may not see.
    """
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        return shutil.disk_usage(path).free
    except OSError:
        return 0
