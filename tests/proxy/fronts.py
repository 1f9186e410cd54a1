"""A proxy in a process of its own, which can be killed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from evoke_proxy.demo.processes import free_port, healthy, proxy_command


class Front:
    """Runs for as long as the block, with these settings; killed at its end, if not before."""

    def __init__(self, upstream: int, settings: Path) -> None:
        self.port = free_port()
        admin = ["--admin-listen", "127.0.0.1:0"]
        self._command = [*proxy_command(self.port, upstream), "--config", str(settings), *admin]

    def __enter__(self) -> Front:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not healthy(self.port):
            assert time.monotonic() < deadline and self._process.poll() is None
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Without a word, and gone when this returns."""
        self._process.kill()
        self._process.wait()
