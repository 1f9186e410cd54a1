"""A proxy in its own process, which a test can kill."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from harness import ask, until

from evoke_proxy.demo.processes import free_port, healthy, proxy_command


class ProxyProcess:
    """Runs for as long as the block, with these settings; killed at its end, if not before."""

    def __init__(self, upstream: int, settings: Path) -> None:
        self.port, self._admin = free_port(), free_port()
        admin = ["--admin-listen", f"127.0.0.1:{self._admin}"]
        self._command = [*proxy_command(self.port, upstream), "--config", str(settings), *admin]

    def __enter__(self) -> ProxyProcess:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        until(lambda: healthy(self.port) or self._process.poll() is not None)
        assert self._process.poll() is None, "the proxy ended"
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def quiet(self) -> None:
        """Wait until no conversation is in use."""

        def busy() -> bool:
            found = json.loads(ask(self._admin, "GET", "/evoke/sessions").body)["sessions"]
            return any(session.get("busy") for session in found)  # those on disk only are not

        until(lambda: not busy())

    def kill(self) -> None:
        """Without a word, and gone when this returns."""
        self._process.kill()
        self._process.wait()
