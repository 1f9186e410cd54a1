"""Says why an address cannot be listened at, which process listens there, and with which option.

The process is found on Linux only; on other systems it stays unknown.
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


def listen_obstacle(host: str, port: int, option: str) -> str | None:
    """Return why an address cannot be listened at and what to do; None when it can be.

    `option` is the option that names the address. With port 0 the system chooses a free port.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return (
                    f"{address} is taken by {owner_of(port)}: stop it, or choose another: {option}"
                )
            if error.errno == errno.EADDRNOTAVAIL:
                return f"{address} is no address of this machine: choose another: {option}"
            if error.errno in (errno.EACCES, errno.EPERM):
                return f"{address} needs more rights: choose a port from 1024 on: {option}"
            return f"{address} cannot be used: {error.strerror or error}: choose another: {option}"
    return None


def owner_of(port: int) -> str:
    """Return "process PID (PROGRAM)" for the process that listens on a TCP port.

    Returns "another process" when the system does not show that process to this user.
    """
    process = _process_at(port)
    with contextlib.suppress(OSError):
        if process is not None:
            name = (process / "comm").read_text("utf-8", "replace").strip()
            return f"process {process.name} ({name})"
    return "another process"


def directory_option_of(port: int, option: str) -> Path | None:
    """Return the directory that the process which listens on a TCP port was started with.

    None when its command line does not have `option`, when that directory does not exist for this
    process, or when the system does not show the process to this user.
    """
    process = _process_at(port)
    if process is None:
        return None
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        value = os.fsdecode(words[words.index(option.encode()) + 1])
        directory = Path(os.readlink(process / "cwd"), value)
    except (OSError, ValueError, IndexError):
        return None
    return directory if value and directory.is_dir() else None


def _process_at(port: int) -> Path | None:
    """Return the folder in /proc of the process that listens on a port; None if that is unknown."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for handles in _PROC.glob("[0-9]*/fd") if sockets else ():
        with contextlib.suppress(OSError):
            if any(os.readlink(handle) in sockets for handle in handles.iterdir()):
                return handles.parent
    return None


def _inodes(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text("ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]
