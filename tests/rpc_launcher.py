#!/usr/bin/env python3
"""Replaces itself with llama-server, beside an RPC server that computes for it alone.

An RPC server has one client at a time, so each llama-server of a test run needs its own. It ends
with its llama-server. `MATRIX_LLAMA_SERVER` and `MATRIX_RPC_SERVER` name the two programs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_START_S = 20.0


def main() -> None:
    """Starts the RPC server, then runs llama-server in this process with the same arguments."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [os.environ["MATRIX_RPC_SERVER"], "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
    subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=_end_with_parent)
    _await_listener(port)
    server = os.environ["MATRIX_LLAMA_SERVER"]
    os.execv(server, [server, *sys.argv[1:], "--rpc", f"127.0.0.1:{port}"])


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _await_listener(port: int) -> None:
    until = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > until:
                sys.exit("the RPC server does not listen")
            time.sleep(0.05)


if __name__ == "__main__":
    main()
