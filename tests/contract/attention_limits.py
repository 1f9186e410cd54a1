"""Limits of the cells and the memory of attention tests."""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama import MODEL, Llama, binary

from evoke_proxy.demo.processes import free_port, healthy, plain_environment

LAYERS = [0, 1, 2, 3]


@contextmanager
def many_cells(path: Path, *options: str) -> Iterator[tuple[Llama, int]]:
    """Four slots share 65,536 cells; the process writes its log to `path`."""
    port = free_port()
    command = [str(binary(True)), "-m", str(MODEL), "-t", "1", "--port", str(port), "-np", "4"]
    command += ["-kvu", "-c", "65536", "-ub", "256", "-fa", "on", "--evoke-ram", "8", *options]
    # A malloc arena per thread would reserve most of the address space that a test allows.
    environment = plain_environment() | {"MALLOC_ARENA_MAX": "1"}
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        while not healthy(port):
            assert process.poll() is None, path.read_text()
            time.sleep(0.05)
        yield Llama(port), process.pid
        assert healthy(port), path.read_text()
    finally:
        process.kill()
        process.wait()


def limit_memory(process: int, more: int) -> None:
    """Lets the process allocate at most `more` further bytes of address space."""
    status = Path(f"/proc/{process}/status").read_text()
    size = int(next(line for line in status.splitlines() if line.startswith("VmSize")).split()[1])
    resource.prlimit(process, resource.RLIMIT_AS, (size * 1024 + more, resource.RLIM_INFINITY))
