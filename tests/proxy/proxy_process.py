"""Runs a proxy in its own process, which a test can kill."""

from __future__ import annotations

import atexit
import functools
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from forked_python import ForkedPython, forked_python
from harness import ask, until

from bench.proxy import tuned_proxy_command
from evoke_proxy.demo.processes import free_port, healthy


def dotted(settings: Path) -> dict[str, Any]:
    """The settings of a JSON file by dotted key, also those that only code can set."""
    sections = json.loads(settings.read_text("utf-8"))
    return {
        f"{part}.{key}": value for part, keys in sections.items() for key, value in keys.items()
    }


@functools.cache
def _forks() -> ForkedPython:
    """The interpreter that the proxies of this test process are forked from."""
    stack = ExitStack()
    atexit.register(stack.close)
    modules = ("evoke_proxy.cli.serve", "evoke_proxy.web.serve", "evoke_proxy.engine.assembly")
    return stack.enter_context(forked_python(*modules, env=os.environ))


class ProxyProcess:
    """A proxy process with the settings of a JSON file; it is killed at the end of the block."""

    def __init__(self, upstream: int, settings: Path) -> None:
        self.port, self._admin = free_port(), free_port()
        admin = ["--admin-listen", f"127.0.0.1:{self._admin}"]
        self._command = [*tuned_proxy_command(self.port, upstream, dotted(settings)), *admin]

    def __enter__(self) -> ProxyProcess:
        _, _, *words = self._command
        output = {"stdout": Path(os.devnull), "stderr": Path(os.devnull)}
        self._process = _forks().start(*words, env=os.environ, folder=None, **output)
        until(lambda: healthy(self.port) or self._process.poll() is not None)
        assert self._process.poll() is None, "the proxy process has ended"
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_until_idle(self) -> None:
        """Wait until no conversation is in use."""

        def busy() -> bool:
            sessions = json.loads(ask(self._admin, "GET", "/evoke/sessions").body)["sessions"]
            # A session that is only on disk has no "busy".
            return any(session.get("busy") for session in sessions)

        until(lambda: not busy())

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self._process.kill()
        self._process.wait()
