"""Starts the server and the proxy of an arm on free loopback ports, and stops them."""

from __future__ import annotations

import http.client
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from evoke_proxy.config.policy_names import MODULES_VARIABLE
from evoke_proxy.demo.client import DemoError

# Context of the slot, tokens, and host memory for evicted blocks.
CONTEXT = 8192
RAM_MIB = 256
# The model is so small that threads mostly wait for each other: on busy cores two threads take
# three times as long as one.
THREADS = 1
# Most seconds for the start of a process, and for its end after SIGTERM.
START_S = 60.0
STOP_S = 10.0
_POLL_S = 0.05
# The ports that Linux assigns to outgoing connections and to sockets bound to port 0.
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _ATTEMPTS = 20_000, 64


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago.

    It lies below the system's ephemeral range where that leaves room, so that no other program is
    assigned it before the caller binds it.
    """
    for port in (*_ports_below_ephemeral(), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # in use
                continue
            return int(probe.getsockname()[1])
    raise DemoError("every port of 127.0.0.1 is taken")


def _ports_below_ephemeral() -> list[int]:
    """Return random ports below the ephemeral range; [] if it is unknown or leaves no room."""
    try:
        n_ports = int(_EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0]) - _LOWEST_PORT
    except (OSError, ValueError, IndexError):
        return []
    return (
        [_LOWEST_PORT + secrets.randbelow(n_ports) for _ in range(_ATTEMPTS)] if n_ports > 0 else []
    )


def server_command(binary: Path, model: Path, port: int, *, blocks: bool) -> list[str]:
    """Return the command line of llama-server; `blocks` enables block calls (a patched server)."""
    command = [str(binary), "-m", str(model), "-np", "1", "-c", str(CONTEXT), "-t", str(THREADS)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--evoke-ram", str(RAM_MIB)] if blocks else command


def proxy_command(port: int, upstream: int) -> list[str]:
    """Return the command line of the proxy in front of the server on port `upstream`."""
    options = ["--upstream", f"http://127.0.0.1:{upstream}", "--listen", f"127.0.0.1:{port}"]
    return [sys.executable, "-m", "evoke_proxy", "serve", *options]


@contextmanager
def serving(
    command: Sequence[str], port: int, log: Path, *, start_s: float | None = None
) -> Iterator[int]:
    """Run the command inside the `with` block, its output in `log`; yields the port.

    The block starts when GET /health answers 200. Raises DemoError when the process ends before
    that or `start_s` seconds (START_S) pass. The process is stopped on every exit from the block.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=plain_environment(),
        )
        try:
            _await_health(process, command[0], port, log, start_s or START_S)
            yield port
        finally:
            _stop(process)


@contextmanager
def stack(
    binary: Path, model: Path, logs: Path, name: str, options: Sequence[str] = ()
) -> Iterator[int]:
    """Run the patched server with `options` and a proxy in front of it; yields the proxy's port."""
    upstream, front = free_port(), free_port()
    server = [*server_command(binary, model, upstream, blocks=True), *options]
    with serving(server, upstream, logs / f"{name}-llama-server.log"):
        with serving(proxy_command(front, upstream), front, logs / f"{name}-proxy.log"):
            yield front


def plain_environment() -> dict[str, str]:
    """This process's environment without variables that configure the server or the proxy.

    The modules of further policies stay: they only make more policies available.
    """
    prefixes = ("EVOKE_", "LLAMA_ARG_")
    return {
        name: value
        for name, value in os.environ.items()
        if name == MODULES_VARIABLE or not name.startswith(prefixes)
    }


def healthy(port: int) -> bool:
    """Return whether GET /health on 127.0.0.1 answers 200 right now."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _await_health(
    process: subprocess.Popen[bytes], name: str, port: int, log: Path, start_s: float
) -> None:
    deadline = time.monotonic() + start_s
    while not healthy(port):
        if process.poll() is not None:
            raise DemoError(f"{name} ended with {process.returncode}, see {log}:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise DemoError(f"{name} was not ready in {start_s:.0f} s, see {log}")
        time.sleep(_POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
