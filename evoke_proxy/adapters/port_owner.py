"""Finds the process that listens on a port, so that an error message can name it.

Works on Linux; on other systems the process stays unknown.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"
_PROC = Path("/proc")


def taken_by(host: str, port: int) -> str | None:
    """Return the process that uses an address, or None when it is free or `port` is 0.

    The process is described as by `owner_of`.
    """
    if port == 0 or _is_free(host, port):
        return None
    return owner_of(port)


def owner_of(port: int) -> str:
    """Return "process PID (PROGRAM)" for the process that listens on a TCP port.

    Returns "another process" when the system does not show that process to this user.
    """
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for handles in _PROC.glob("[0-9]*/fd") if sockets else ():
        with contextlib.suppress(OSError):
            if any(os.readlink(handle) in sockets for handle in handles.iterdir()):
                name = (handles.parent / "comm").read_text("utf-8", "replace").strip()
                return f"process {handles.parent.name} ({name})"
    return "another process"


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _inodes(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text("ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]
