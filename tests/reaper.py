"""Kills all processes with a given mark as soon as the marking tests have ended."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def marked(mark: bytes) -> list[int]:
    """The processes with this in their environment, but for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            theirs = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is none of ours
            continue
        if mark in theirs and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


if __name__ == "__main__":
    sys.stdin.buffer.read()  # ends with whoever holds the other end
    for process in marked(f"TESTED_BY={os.environ['TESTED_BY']}".encode()):
        try:
            os.kill(process, signal.SIGKILL)
        except OSError:
            pass
